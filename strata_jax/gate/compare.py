"""Two answers to one request, compared: ids, reason to end, logits bit for bit.

NaNs are compared by place, not by payload: payloads differ between processors (numerics.md).
"""

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

_CHUNK_VALUES = 1 << 22


@dataclasses.dataclass(frozen=True, kw_only=True)
class Value:
    """One logit as a person and as a machine reads it."""

    text: str
    bits: str

    @classmethod
    def of(cls, value: np.float32) -> "Value":
        """The value's shortest decimal form and its bits."""
        return cls(text=str(value), bits=f"0x{int(value.view(np.uint32)):08x}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogitDifference:
    """Where two arrays of logits differ first, and how much of them does."""

    position: int
    """Of the id whose reading gave the logits, from 0."""
    token_id: int
    """The logit's column."""
    reference: Value
    other: Value
    num_values: int
    num_positions: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class IdDifference:
    """Where two answers differ first; None is the end of an answer."""

    index: int
    """In the answer, from 0."""
    reference: int | None
    other: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """Everything in which two answers to one prompt differ; None where they do not."""

    prompt: str
    ids: IdDifference | None
    finish_reasons: tuple[str | None, str | None] | None
    logits: LogitDifference | None
    positions: tuple[int, int] | None
    """How many positions have logits, where the numbers differ."""

    def lines(self, prompt_tokens: int) -> list[str]:
        """What differs, a line each, the earliest place first.

        Args:
            prompt_tokens: length of the prompt, which tells its positions from the answer's.
        """
        lines = []
        if self.logits is not None:
            found = self.logits
            part = "prompt" if found.position < prompt_tokens else "answer"
            lines.append(
                f"position {found.position} ({part}), logit of id {found.token_id}: "
                f"{found.reference.text} ({found.reference.bits}) against "
                f"{found.other.text} ({found.other.bits}); {found.num_values} logits at "
                f"{found.num_positions} positions differ"
            )
        if self.ids is not None:
            found_id = self.ids
            lines.append(
                f"answer id {found_id.index}: {_id_text(found_id.reference)} against "
                f"{_id_text(found_id.other)}"
            )
        if self.finish_reasons is not None:
            lines.append("ended by {} against {}".format(*self.finish_reasons))
        if self.positions is not None:
            lines.append("logits of {} positions against {}".format(*self.positions))
        return [f"prompt {self.prompt}: {line}" for line in lines]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogitsSummary:
    """What a record keeps of logits."""

    positions: int
    vocabulary: int
    sha256: str
    """Of the values in C order, NaNs made one pattern."""
    num_nan: int
    rows_without_number: int
    """Positions where every logit is NaN: nothing is compared there."""


def compare_ids(reference: Sequence[int], other: Sequence[int]) -> IdDifference | None:
    """The first difference of two lists of ids."""
    for index in range(max(len(reference), len(other))):
        left = reference[index] if index < len(reference) else None
        right = other[index] if index < len(other) else None
        if left != right:
            return IdDifference(index=index, reference=left, other=right)
    return None


def compare_logits(reference: np.ndarray, other: np.ndarray) -> LogitDifference | None:
    """The first difference of two float32 arrays [positions, V], up to the shorter one's end."""
    count = min(len(reference), len(other))
    first: tuple[int, int] | None = None
    num_values = num_positions = 0
    rows = _chunk_rows(reference)
    for begin in range(0, count, rows):
        end = min(begin + rows, count)
        differs = _bits(reference[begin:end]) != _bits(other[begin:end])
        if not differs.any():
            continue
        if first is None:
            row, column = np.unravel_index(int(differs.argmax()), differs.shape)
            first = begin + int(row), int(column)
        num_values += int(differs.sum())
        num_positions += int(differs.any(axis=1).sum())
    if first is None:
        return None
    return LogitDifference(
        position=first[0],
        token_id=first[1],
        reference=Value.of(reference[first]),
        other=Value.of(other[first]),
        num_values=num_values,
        num_positions=num_positions,
    )


def summarise(logits: np.ndarray) -> LogitsSummary:
    """Hash and counts of float32 logits [positions, V]."""
    digest = hashlib.sha256()
    num_nan = empty = 0
    rows = _chunk_rows(logits)
    for begin in range(0, len(logits), rows):
        chunk = logits[begin : begin + rows]
        is_nan = np.isnan(chunk)
        num_nan += int(is_nan.sum())
        empty += int(is_nan.all(axis=1).sum())
        digest.update(_bits(chunk).tobytes())
    return LogitsSummary(
        positions=logits.shape[0],
        vocabulary=logits.shape[1],
        sha256=digest.hexdigest(),
        num_nan=num_nan,
        rows_without_number=empty,
    )


def load_logits(path: Path) -> np.ndarray:
    """Logits that `generate --logits_out` wrote, mapped.

    Raises:
        ValueError: if the file holds something else.
        OSError: if it cannot be read.
    """
    try:
        logits = np.load(path, mmap_mode="r", allow_pickle=False)
    except EOFError as error:  # what numpy says to an empty file
        raise ValueError(str(error)) from None
    if logits.ndim != 2 or logits.dtype != np.float32:
        raise ValueError(f"{logits.dtype} {list(logits.shape)}, float32 [positions, V] expected")
    return logits


def _bits(values: np.ndarray) -> np.ndarray:
    """The bits of float32 values, the same ones for every NaN."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return np.where(np.isnan(values), np.uint32(0x7FC00000), bits)


def _chunk_rows(logits: np.ndarray) -> int:
    return max(1, _CHUNK_VALUES // max(1, logits.shape[1]))


def _id_text(token_id: int | None) -> str:
    return "the end" if token_id is None else str(token_id)
