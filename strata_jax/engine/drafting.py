"""The drafters of an engine: who drafts for the next window, how much, and what became of it."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from strata_jax.engine.draft_flow import DraftFlow
from strata_jax.engine.draft_length import DraftLength
from strata_jax.engine.drafts import Drafter


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """A drafter and what is known of it."""

    name: str
    drafter: Drafter
    length: DraftLength | None
    """None: always as many drafts as there is room for."""
    flow: DraftFlow | None = None
    """The same drafter where it works on a device by itself."""


@dataclasses.dataclass(kw_only=True)
class DraftCounts:
    """What became of drafts. Only those behind nothing but drafts that came true were looked at."""

    drafted: int = 0
    accepted: int = 0
    passes: int = 0
    """Windows after the prompt."""
    tokens: int = 0
    """Ids that those found."""
    given_up: int = 0
    """How often drafts did not pay and were paused."""
    steps: list[list[int]] = dataclasses.field(default_factory=list)
    """Per place in a window: drafts looked at, and those that came true."""

    def to_json(self) -> dict[str, Any]:
        """For `generate --json`; rates are None where nothing was counted."""
        steps = [
            {"looked_at": seen, "accepted": came_true, "rate": came_true / seen if seen else None}
            for seen, came_true in self.steps
        ]
        return {
            "drafted": self.drafted,
            "accepted": self.accepted,
            "acceptance": self.accepted / self.drafted if self.drafted else None,
            "steps": steps,
            "given_up": self.given_up,
            "passes": self.passes,
            "tokens_per_pass": self.tokens / self.passes if self.passes else None,
        }


class Drafting:
    """Asks the drafter whose drafts promise most. What it learns of costs outlives a request."""

    def __init__(self, sources: Sequence[Source], most: int, min_p: float = 0.0):
        """Takes the drafters.

        Args:
            sources: at least one.
            most: drafts of a window.
            min_p: a draft less probable than this ends them.
        """
        self._sources = tuple(sources)
        self._most = most
        self._min_p = min_p
        self._chosen: Source | None = None
        self._asked: dict[str, int] = {}  # drafts wanted of a source, by its name
        self.counts = DraftCounts()
        """Of the request."""

    def reset(self) -> None:
        """Begins a request."""
        self.counts = DraftCounts(steps=[[0, 0] for _ in range(self._most)])
        for source in self._sources:
            source.drafter.reset()
            if source.length is not None:
                source.length.begin()

    def read(self, ids: np.ndarray, residual: jax.Array, position: int) -> None:
        """See `Drafter.read`."""
        for source in self._sources:
            source.drafter.read(ids, residual, position)

    def next(self, room: int) -> np.ndarray:
        """Drafts for the next window, int32 [n], at most `room`; may be none."""
        room = min(room, self._most)
        choices = []
        for source in self._sources:
            count, speed = source.length.choose(room) if source.length else (room, np.inf)
            choices.append((speed, count, source))
        self._chosen, self._asked = None, {}
        for _, count, source in sorted(choices, key=lambda choice: -choice[0]):
            if count <= 0:
                continue
            self._asked[source.name] = count
            drafted = source.drafter.draft(count)
            unsure = np.flatnonzero(drafted.probabilities < self._min_p)
            ids = drafted.ids[: unsure[0] if len(unsure) else count]
            if len(ids):
                self._chosen = source
                return ids.astype(np.int32)
        return np.zeros(0, np.int32)

    @property
    def flow(self) -> DraftFlow | None:
        """Drafts on the device without the host; None: the host asks for every window."""
        return self._sources[0].flow if len(self._sources) == 1 else None

    def pays(self, room: int) -> bool:
        """Whether `flow` is worth its time for a window with room for so many drafts."""
        return self._wanted(room) > 0

    def go_on(self, flow: DraftFlow) -> bool:
        """Queues the next window of `flow`, if there is to be one; whether there may be more."""
        if not flow.has_more:
            return False
        wanted = self._wanted(self._most)
        if wanted > 0 or flow.has_drafts:
            flow.queue(wanted)
        return wanted > 0

    def _wanted(self, room: int) -> int:
        length, room = self._sources[0].length, min(room, self._most)
        return length.choose(room)[0] if length else max(room, 0)

    def followed(self, drafts: int, came_true: int, seconds: float, wanted: int) -> None:
        """Takes note of a window of `flow`.

        Args:
            drafts: fewer than were wanted where not all were likely enough.
            came_true: of them.
            seconds: of the window, and of the drafts for the next one.
            wanted: 0: this window was to have none, and its time says nothing.
        """
        self._chosen = self._sources[0]
        self._asked = {self._chosen.name: wanted}
        if wanted > 0:
            self.seen(drafts, came_true, seconds)
        else:
            self._count(drafts, came_true)

    def seen(self, drafts: int, came_true: int, seconds: float) -> None:
        """Takes note of a window with the drafts that `next` gave."""
        self._count(drafts, came_true)
        for source in self._sources:
            if source.length is not None and (drafts == 0 or source is self._chosen):
                wanted = self._asked.get(source.name, 0)
                self.counts.given_up += source.length.seen(came_true, seconds, wanted=wanted)
        self._asked = {}

    def seen_without(self, seconds: float) -> None:
        """Takes note of a window that was to have no drafts, whatever was asked for since it was queued."""
        self._asked = {}
        self.seen(0, 0, seconds)

    def _count(self, drafts: int, came_true: int) -> None:
        counts = self.counts
        counts.passes += 1
        counts.tokens += came_true + 1
        counts.drafted += drafts
        counts.accepted += came_true
        for place in range(min(came_true + 1, drafts)):
            counts.steps[place][0] += 1
            counts.steps[place][1] += place < came_true
