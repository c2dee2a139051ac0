"""Typed, range-checked access to the metadata of a model file."""

import math
from typing import Any

from strata_jax.errors import BadFileError
from strata_jax.weights.gguf import GgufFile

PREFIX = "qwen4exp."
_INTEGERS = frozenset({"u8", "i8", "u16", "i16", "u32", "i32", "u64", "i64"})
_FLOATS = frozenset({"f32", "f64"})


class MetaReader:
    """Gets values by key. Whatever is absent, of another type or out of range is a BadFileError.

    Keys without a prefix of their own (general., tokenizer.) are those of the architecture.
    Integers may be stored in any width; a bool or a float is never taken for one.
    """

    def __init__(self, file: GgufFile):
        self.path = file.paths[0]
        self.metadata = file.metadata
        self.warnings: list[str] = []

    def has(self, key: str) -> bool:
        """Whether the file has a value under this key."""
        return self._full(key) in self.metadata

    def warn(self, what: str) -> None:
        """Keeps a line about something odd that does not stop the model from working."""
        self.warnings.append(f"{self.path}: {what}")

    def error(self, key: str, expected: str) -> BadFileError:
        """Makes the error for a value that is there but wrong."""
        full = self._full(key)
        entry = self.metadata.entry(full)
        short = entry.count is None or entry.count <= 64
        shown = str(entry)
        if short and entry.end - entry.start <= 512:
            value = self.metadata[full]
            shown = repr(list(value) if isinstance(value, tuple) else value)
        return BadFileError(f"{self.path}: metadata {full} is {shown}, {expected} expected")

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        """One integer from `low` to `high`, both included; absent only where a default is given."""
        if default is not None and not self.has(key):
            return default
        value = self._get(key, _INTEGERS, array=False)
        if not low <= value <= high:
            raise self.error(key, f"{low} to {high}")
        return value

    def number(self, key: str, low: float, high: float) -> float:
        """One finite float between `low` and `high`, both included."""
        value = self._get(key, _FLOATS | _INTEGERS, array=False)
        if not math.isfinite(value) or not low <= value <= high:
            raise self.error(key, f"{low:g} to {high:g}")
        return float(value)

    def text(self, key: str) -> str:
        """One string."""
        return self._get(key, frozenset({"string"}), array=False)

    def integers(self, key: str, lengths: tuple[int, ...], low: int, high: int) -> tuple[int, ...]:
        """Integers from `low` to `high`, as many as one of `lengths`."""
        return self._array(key, _INTEGERS, lengths, low, high)

    def flags(self, key: str, length: int) -> tuple[bool, ...]:
        """Bools, also where they were stored as integers 0 and 1."""
        values = self._array(key, _INTEGERS | {"bool"}, (length,), 0, 1)
        return tuple(value == 1 for value in values)

    def string_count(self, key: str) -> int:
        """Length of an array of strings, without looking at them."""
        entry = self.metadata.entry(self._full(key))
        if entry.kind != "string" or entry.count is None:
            raise self.error(key, "an array of strings")
        return entry.count

    def _array(
        self, key: str, kinds: frozenset[str], lengths: tuple[int, ...], low: int, high: int
    ) -> tuple[Any, ...]:
        self._require(key, kinds, array=True)
        full = self._full(key)
        if self.metadata.entry(full).count not in lengths:  # before decoding: it may be long
            wanted = " or ".join(str(length) for length in lengths)
            raise self.error(key, f"an array of {wanted} values")
        values = self._get(key, kinds, array=True)
        for value in values:
            if not low <= value <= high:
                raise self.error(key, f"values from {low} to {high}")
        return values

    def _get(self, key: str, kinds: frozenset[str], *, array: bool) -> Any:
        """The decoded value; its type is one of `kinds`, which the caller turns into its own."""
        self._require(key, kinds, array=array)
        return self.metadata[self._full(key)]

    def _require(self, key: str, kinds: frozenset[str], *, array: bool) -> None:
        full = self._full(key)
        if full not in self.metadata:
            raise BadFileError(f"{self.path}: metadata {full} is missing")
        entry = self.metadata.entry(full)
        if entry.kind not in kinds or (entry.count is not None) != array:
            wanted = "string" if "string" in kinds else "bool" if "bool" in kinds else "number"
            wanted = f"an array of {wanted}s" if array else f"one {wanted}"
            if kinds == _INTEGERS:
                wanted = wanted.replace("number", "integer")
            raise BadFileError(f"{self.path}: metadata {full} has type {entry}, {wanted} expected")

    @staticmethod
    def _full(key: str) -> str:
        return key if key.startswith(("general.", "tokenizer.")) else PREFIX + key
