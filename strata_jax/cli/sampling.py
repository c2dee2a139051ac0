"""Sampling settings: what the flags say, else what the model file recommends, else neutral."""

import dataclasses
import math
from collections.abc import Mapping

from absl import flags

from strata_jax.engine.request import FILE_KEYS, FILE_PREFIX, SamplingSettings
from strata_jax.errors import BadFileError, UsageError


def settings(values: flags.FlagValues, metadata: Mapping[str, object]) -> SamplingSettings:
    """The settings of one answer.

    Raises:
        UsageError: if a flag cannot be used.
        BadFileError: if a recommendation of the file cannot, and no flag overrules it.
    """
    names = [field.name for field in dataclasses.fields(SamplingSettings)]
    given = {name: values[name].value for name in names if values[name].value is not None}
    if "logit_bias" in given:
        given["logit_bias"] = _biases(str(given["logit_bias"]))
    recommended = {
        key: _number(metadata[key], name, key)
        for name, key in FILE_KEYS.items()
        if key in metadata and name not in given
    }
    try:
        followed = SamplingSettings.from_metadata(recommended)
    except UsageError as error:
        raise BadFileError(f"metadata {FILE_PREFIX}*: {error}; the flag overrules it") from None
    return dataclasses.replace(followed, **given)


def not_followed(metadata: Mapping[str, object]) -> tuple[str, ...]:
    """Recommendations of the file that nothing here knows."""
    known = set(FILE_KEYS.values())
    return tuple(
        f"{key}: the file recommends {metadata[key]!r}, which is not supported and not followed"
        for key in metadata
        if key.startswith(FILE_PREFIX) and key not in known
    )


def _biases(value: str) -> tuple[tuple[int, float], ...]:
    try:
        pairs = [each.split(":") for each in value.split(",")]
        return tuple((int(token), float(bias)) for token, bias in pairs)
    except ValueError:
        raise UsageError(
            f"--logit_bias={value}: ID:BIAS,... expected, as in 198:-100,256:1.5"
        ) from None


def _number(value: object, name: str, key: str) -> float:
    kinds = int if name == "top_k" else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not math.isfinite(value):
        what = "a whole number" if name == "top_k" else "a number"
        raise BadFileError(f"metadata {key} is {value!r}, {what} expected; --{name} overrules it")
    return value
