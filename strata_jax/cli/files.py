"""Paths that flags name: which model file a command is about, what is read and what is written."""

import importlib.resources
from pathlib import Path

from absl import flags

from strata_jax.errors import UsageError

EMBEDDED = ("models", "strata-small", "model-IQ3_S.gguf")
"""Path of the model that runs without --model, inside the package."""
_MOST_CHARACTERS = 4096
_SHOWN = 60


def user_path(flag: str, text: str) -> Path:
    """The path that the value of --`flag` is, with ~ for a home folder.

    Raises:
        UsageError: if it can be none.
    """
    problem = None
    if not text:
        problem = "is empty"
    elif "\0" in text:
        problem = "has a zero byte"
    elif len(text) > _MOST_CHARACTERS:
        problem = f"has {len(text)} characters"
    else:
        try:
            return Path(text).expanduser()
        except RuntimeError:
            problem = "is in the home folder of nobody here"
    shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
    raise UsageError(f"--{flag}={shown}: {problem}, a path expected")


def output_path(flag: str, text: str | None) -> Path | None:
    """Where --`flag` lets something be written; None if it was not given.

    Checked before the work is done: afterwards it would be a pity. A pipe that nobody reads would hold
    the work up.

    Raises:
        UsageError: if no file can be written there.
    """
    if text is None:
        return None
    path = user_path(flag, text)
    if path.is_dir() or path.is_fifo() or not path.parent.is_dir():
        raise UsageError(f"--{flag}={text}: a file in an existing folder expected")
    return path


def model_path(values: flags.FlagValues) -> Path:
    """The file that --model names, or the embedded one.

    Raises:
        UsageError: if it names none.
    """
    given = values.model
    if given is not None:
        return user_path("model", given)
    return embedded_model()


def embedded_model() -> Path:
    """The file inside the package."""
    return Path(str(importlib.resources.files("strata_jax").joinpath(*EMBEDDED)))
