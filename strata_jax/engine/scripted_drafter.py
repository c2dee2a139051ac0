"""Drafts from known answers, some of them spoiled: for gates and measurements. Imports no jax."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from strata_jax.engine.drafts import Drafted
from strata_jax.errors import UsageError


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftScript:
    """Where the answers are, and how many drafts shall come true."""

    path: Path
    """A JSON list of lists of ids, each a prompt with its answer."""
    percent: float
    """Of positions whose draft is right, spread evenly: 50 is every other one."""

    def load(self) -> "ScriptedDrafter":
        """The drafter.

        Raises:
            UsageError: if the file cannot be used.
        """
        if not 0 <= self.percent <= 100:
            raise UsageError(f"draft_script: {self.percent} percent, expected 0 to 100")
        expected = "a JSON list of lists of ids expected"
        if self.path.exists() and not self.path.is_file():  # it might have no end
            raise UsageError(f"draft_script: {self.path}: is no regular file; {expected}")
        try:
            texts = json.loads(self.path.read_text())
            is_right = all(type(token) is int for ids in texts for token in ids)
            known = [np.asarray(ids, np.int32) for ids in texts] if is_right else []
        except (OSError, ValueError, TypeError, OverflowError, RecursionError) as error:
            raise UsageError(f"draft_script: {self.path}: {error}; {expected}") from None
        if not is_right:
            raise UsageError(f"draft_script: {self.path}: something else than ids; {expected}")
        return ScriptedDrafter(known, self.percent)


class ScriptedDrafter:
    """Goes on as the one text that begins like the sequence."""

    def __init__(self, texts: list[np.ndarray], percent: float):
        """See `DraftScript`."""
        self._texts = texts
        self._percent = percent
        self.reset()

    def reset(self) -> None:
        """See `Drafter`."""
        self._left = list(self._texts)
        self._end = 1  # position behind the newest id; nobody tells the id at position 0

    def read(self, ids: np.ndarray, residual: Any, position: int) -> None:  # noqa: ARG002
        """See `Drafter`; only the ids count."""
        begin, self._end = position + 1, position + 1 + len(ids)
        self._left = [t for t in self._left if np.array_equal(t[begin : self._end], ids)]

    def draft(self, count: int) -> Drafted:
        """See `Drafter`."""
        ids = self._drafts()[self._end : self._end + count]
        return Drafted(ids=ids, probabilities=np.ones(len(ids), np.float32))

    def script(self, length: int) -> np.ndarray:
        """The drafts for positions up to `length`, int32; -1: none."""
        ids = np.full(length, -1, np.int32)
        drafts = self._drafts()[:length]
        ids[: len(drafts)] = drafts
        return ids

    def _drafts(self) -> np.ndarray:
        """For every position of the text that the sequence begins like."""
        ids = self._left[0].copy() if self._left else np.zeros(0, np.int32)
        positions = np.arange(len(ids))
        right = np.floor((positions + 1) * self._percent / 100) > np.floor(
            positions * self._percent / 100
        )
        ids[~right] ^= 1  # another id, and no less an id of the model but for the last one
        return ids
