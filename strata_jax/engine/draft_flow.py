"""Windows with drafts, one after the other on a device, which the host follows one window behind.

A window's ids, positions and live rows come from what was found behind the window before
(`engine/follow_programs.py`), so the next one is in the queue before the host has seen anything. The host sees
what came true when it is there, and decides how many drafts a later window gets. An answer ends on the
device: windows behind its end have no live row, so the state stands for what was read, whoever stops.
"""

import collections
import dataclasses

import jax
import numpy as np

from strata_jax.engine.device_sampling import DeviceSampling
from strata_jax.engine.follow_programs import Orders, stop_mask
from strata_jax.engine.follower import Follower
from strata_jax.engine.runner import Runner
from strata_jax.errors import StrataError


@dataclasses.dataclass(frozen=True, kw_only=True)
class FoundIds:
    """What a window gave."""

    ids: list[int]
    """At least one, but for a window behind the answer's end; -1: logits were not finite."""
    drafts: int
    """Those of the window."""
    wanted: int
    """Drafts that were wanted for it, and had room."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Queued:
    report: jax.Array
    wanted: int


class DraftFlow:
    """Of one engine; from an id that the host knows to wherever it stops."""

    def __init__(self, runner: Runner, follower: Follower):
        """`follower` drafts behind the windows of `runner`."""
        self.follower = follower
        self._runner = runner
        self._sharding = runner.placing.sharding
        rows = runner.options.window_rows
        self._undrawn = jax.device_put(np.zeros(rows, np.int32), self._sharding)
        self._draws: DeviceSampling | None = None
        self._last = 0
        self._stop_ids: frozenset[int] | None = None
        self._stops = self._undrawn
        self._packed: jax.Array | np.ndarray = np.zeros(0, np.int32)
        self._wanted = 0  # drafts of the window that is queued next
        self._queue: collections.deque[_Queued] = collections.deque()

    def start(self, draws: DeviceSampling | None, stop_ids: frozenset[int], last: int) -> None:
        """Takes what belongs to an answer.

        Args:
            draws: on the device; None: the largest logits win.
            stop_ids: end the answer.
            last: position of the answer's last id.
        """
        self._draws, self._last = draws, last
        if stop_ids != self._stop_ids:
            mask = stop_mask(stop_ids, self._runner.drawable)
            self._stops, self._stop_ids = jax.device_put(mask, self._sharding), stop_ids

    @property
    def in_flight(self) -> int:
        """Windows that were not waited for."""
        return len(self._queue)

    @property
    def has_drafts(self) -> bool:
        """Whether drafts were wanted for the window that is queued next."""
        return self._wanted > 0

    @property
    def has_more(self) -> bool:
        """Whether a window may find ids that those in the queue do not find for sure: one each."""
        return self._runner.position + len(self._queue) < self._last

    def begin(self, token: int) -> None:
        """The next window reads this id, and nothing else."""
        self.follower.begin()
        self._packed, self._wanted = self._runner.operand(token), 0

    def queue(self, wanted: int) -> None:
        """Queues the next window; the one behind it is to get so many drafts."""
        runner = self._runner
        window = runner.queue_window(self._packed)
        drawn = self._undrawn
        if self._draws is not None:
            lowest = runner.position + 1
            _, drawn = self._draws.draw_rows(window.logits, window.packed, lowest)
        orders = Orders(wanted=wanted, last=self._last, drawn=self._draws is not None)
        queue = self._queue
        end = runner.position + sum(1 + each.wanted for each in queue) + 1 + self._wanted
        end = min(end, self._last)
        self._packed, report = self.follower.follow(window, drawn, self._stops, orders, end)
        queue.append(_Queued(report=report, wanted=self._wanted))
        self._wanted = wanted

    def wait(self) -> FoundIds:
        """Waits for the oldest window.

        Raises:
            StrataError: if a tier says that it means nothing.
        """
        queued = self._queue.popleft()
        try:
            live, count, *ids = np.asarray(queued.report).tolist()
        except (ValueError, RuntimeError):
            self._lose()
            raise
        position = self._runner.position
        self._runner.found(live=live, kept=max(count - 1, 0))
        self.follower.saw(ids[:count], position)
        wanted = min(queued.wanted, max(0, self._last - position - 1))
        return FoundIds(ids=ids[:count], drafts=max(live - 1, 0), wanted=wanted)

    def end(self) -> None:
        """Waits for what nobody wants any more, so that the runner's position is that of its state."""
        while self._queue:
            try:
                self.wait()
            except (ValueError, RuntimeError, StrataError):
                self._lose()

    def _lose(self) -> None:
        self._queue.clear()
        self._runner.lose()
        self.follower.lose()
