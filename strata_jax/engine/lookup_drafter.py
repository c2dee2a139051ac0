"""Drafts from the text itself: what followed the last time its newest ids stood there. Imports no jax."""

from typing import Any

import numpy as np

from strata_jax.engine.drafts import Drafted

_MOST_LOOKED_AT = 16
"""Earlier places of a match, the most recent first; older ones are not compared."""
_LONGEST = 64
"""Ids that are compared; of two longer matches the more recent one wins."""


class LookupDrafter:
    """Finds the longest earlier match of the sequence's end, of equally long ones the most recent.

    Every id costs one look-up and a draft a few comparisons, however long the text is: places that end in
    the same `match` ids are linked, newest first.
    """

    def __init__(self, match: int):
        """`match`: ids that must agree at least."""
        assert match >= 1
        self._match = match
        self.reset()

    def reset(self) -> None:
        """See `Drafter`."""
        self._ids = np.zeros(1024, np.int32)
        self._earlier = np.zeros(1024, np.int32)  # place that ends in the same ids; -1: none
        self._count = 0
        self._newest: dict[bytes, int] = {}

    def read(self, ids: np.ndarray, residual: Any, position: int) -> None:  # noqa: ARG002
        """See `Drafter`; only the ids count."""
        end = self._count + len(ids)
        while end > len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._earlier = np.concatenate([self._earlier, np.zeros_like(self._earlier)])
        self._ids[self._count : end] = ids
        for place in range(self._count, end):
            key = self._ids[max(0, place + 1 - self._match) : place + 1].tobytes()
            self._earlier[place] = self._newest.get(key, -1)
            self._newest[key] = place
        self._count = end

    def draft(self, count: int) -> Drafted:
        """See `Drafter`."""
        place = self._best_place()
        if place is None:
            return Drafted(ids=np.zeros(0, np.int32), probabilities=np.zeros(0, np.float32))
        # A text that repeats itself up to its end goes on repeating.
        following = self._ids[place + 1 : self._count]
        ids = np.resize(following, count)
        return Drafted(ids=ids, probabilities=np.ones(count, np.float32))

    def _best_place(self) -> int | None:
        """Where the best match ends; None if there is none."""
        if self._count < self._match:
            return None
        places, place = [], self._count - 1
        while len(places) < _MOST_LOOKED_AT and (place := int(self._earlier[place])) >= 0:
            places.append(place)
        if not places:
            return None
        back = np.arange(min(_LONGEST, self._count))
        at = np.asarray(places)[:, None] - back
        equal = (self._ids[at] == self._ids[self._count - 1 - back]) & (at >= 0)
        lengths = np.cumprod(equal, axis=1).sum(axis=1)
        return places[int(np.argmax(lengths))]  # the first, so the most recent, of the longest
