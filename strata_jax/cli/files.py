"""Which model file a command is about."""

import importlib.resources
from pathlib import Path

from absl import flags

EMBEDDED = ("models", "strata-small", "model-IQ3_S.gguf")
"""Path of the model that runs without --model, inside the package."""


def model_path(values: flags.FlagValues) -> Path:
    """The file that --model names, or the embedded one."""
    given = values.model
    if given is not None:
        return Path(given).expanduser()
    return embedded_model()


def embedded_model() -> Path:
    """The file inside the package."""
    return Path(str(importlib.resources.files("strata_jax").joinpath(*EMBEDDED)))
