"""What a caller asks for and what comes back; imports no jax."""

import dataclasses
import math
from collections.abc import Mapping

from strata_jax.errors import UsageError

FILE_PREFIX = "general.sampling."
FILE_KEYS = {
    "temperature": f"{FILE_PREFIX}temp",
    "top_k": f"{FILE_PREFIX}top_k",
    "top_p": f"{FILE_PREFIX}top_p",
    "min_p": f"{FILE_PREFIX}min_p",
    "repetition_penalty": f"{FILE_PREFIX}penalty_repeat",
}
"""Where a file recommends a setting, by its name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """How the next id is drawn from the logits. Values out of range raise UsageError."""

    temperature: float = 1.0
    """0 (and anything under 1e-5) = the largest logit, ties to the lowest id."""
    top_k: int = 0
    """Keep the k most probable ids; 0 = all."""
    top_p: float = 1.0
    """Keep the smallest set of most probable ids whose probabilities reach this sum."""
    min_p: float = 0.0
    """Drop ids less probable than this times the most probable one."""
    seed: int = 0
    """The draw at a position is a function of seed and position alone."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of ids seen in the prompt or the answer."""
    presence_penalty: float = 0.0
    """Taken off the logit of every id in the answer so far."""
    frequency_penalty: float = 0.0
    """Taken off once for every time an id stands in the answer so far."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Ids and what is added to their logits, after the penalties."""

    def __post_init__(self):
        _between("temperature", self.temperature, 0.0, 100.0)
        _between("top_p", self.top_p, 0.0, 1.0)
        _between("min_p", self.min_p, 0.0, 1.0)
        _between("repetition_penalty", self.repetition_penalty, 1e-3, 1e3)
        _between("presence_penalty", self.presence_penalty, -1e3, 1e3)
        _between("frequency_penalty", self.frequency_penalty, -1e3, 1e3)
        for token, bias in self.logit_bias:
            _between(f"logit_bias of id {token}", bias, -1e3, 1e3)
        ids = [token for token, _ in self.logit_bias]
        if len(set(ids)) < len(ids) or min(ids, default=0) < 0:
            raise UsageError(f"logit_bias: ids {ids}, expected different ids of 0 or more")
        if self.top_k < 0:
            raise UsageError(f"top_k: {self.top_k}, expected 0 (all) or more")
        if not 0 <= self.seed < 2**64:
            raise UsageError(f"seed: {self.seed}, expected a number from 0 to 2^64 - 1")

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, object]) -> "SamplingSettings":
        """The file's own defaults (`general.sampling.*`); what it does not name stays neutral."""
        found = {name: metadata.get(key) for name, key in FILE_KEYS.items()}
        numbers = {k: v for k, v in found.items() if isinstance(v, int | float)}
        return cls(**numbers)  # type: ignore[arg-type]


def _between(name: str, value: float, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise UsageError(f"{name}: {value}, expected a number from {low:g} to {high:g}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt and how to answer it."""

    ids: tuple[int, ...]
    settings: SamplingSettings
    max_tokens: int
    """0 reads the prompt only."""
    stop_ids: frozenset[int] = frozenset()
    """Ids that end the answer; the id itself is part of it."""
    max_repeats: int = 0
    """One id so often in a row ends the answer, which would go on like that to its length; 0 = never."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timings:
    """Seconds and rates of one request; None where nothing was measured."""

    load_s: float
    """Reading headers, vectors and tables; once per engine."""
    compile_s: float
    """Compiling or fetching from the compile cache; once per engine."""
    prompt_s: float | None = None
    """From the start of the prompt to the first id."""
    decode_s: float | None = None
    """From the first id to the last."""
    prompt_tok_s: float | None = None
    decode_tok_s: float | None = None
    """(n - 1) ids over `decode_s`."""
