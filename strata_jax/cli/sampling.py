"""Sampling settings: what the flags say, else what the model file recommends, else neutral."""

import math
from collections.abc import Mapping
from typing import Any

from absl import flags

from strata_jax.engine.request import SamplingSettings
from strata_jax.errors import BadFileError, UsageError

PREFIX = "general.sampling."
_NEUTRAL = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
_FILE_KEYS = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
"""Setting to key behind `PREFIX`. Source: gguf package, constants.py."""


def settings(values: flags.FlagValues, metadata: Mapping[str, object]) -> SamplingSettings:
    """The settings of one answer.

    Raises:
        UsageError: if a flag cannot be used.
        BadFileError: if a recommendation of the file cannot.
    """
    chosen: dict[str, Any] = dict(_NEUTRAL)
    recommended = {}
    for name, key in _FILE_KEYS.items():
        if PREFIX + key in metadata and values[name].value is None:
            recommended[name] = _number(metadata[PREFIX + key], name, key)
    _check_recommended(chosen | recommended)
    given = {name: values[name].value for name in _NEUTRAL if values[name].value is not None}
    return SamplingSettings(**chosen | recommended | given, seed=values.seed)


def not_followed(metadata: Mapping[str, object]) -> tuple[str, ...]:
    """Recommendations of the file that nothing here knows."""
    known = {PREFIX + key for key in _FILE_KEYS.values()}
    return tuple(
        f"{key}: the file recommends {metadata[key]!r}, which is not supported and not followed"
        for key in metadata
        if key.startswith(PREFIX) and key not in known
    )


def _number(value: object, name: str, key: str) -> float:
    kinds = int if name == "top_k" else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not math.isfinite(value):
        what = "a whole number" if name == "top_k" else "a number"
        raise BadFileError(
            f"metadata {PREFIX}{key} is {value!r}, {what} expected; --{name} overrules it"
        )
    return value


def _check_recommended(recommended: dict[str, Any]) -> None:
    try:
        SamplingSettings(**recommended, seed=0)
    except UsageError as error:
        raise BadFileError(f"metadata {PREFIX}*: {error}; the flag overrules it") from None
