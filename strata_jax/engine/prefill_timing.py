"""Where the time of a prompt went: the device's timeline by phase."""

import collections
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from strata_jax.engine.peer_timing import PeerTiming
from strata_jax.ops.timed import PHASES
from strata_jax.weights.device_experts import DeviceExperts
from strata_jax.weights.experts import ExpertTiers

_T = TypeVar("_T")
CAPACITY = 1 << 16
"""Marks of a prompt: some 25 a layer and chunk."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillTiming:
    """Of one prompt."""

    wall_s: float
    slot_wait_s: float
    """Of the thread that issues copies, for free slots of the ring."""
    experts_streamed: int
    experts_unrouted: int
    """That no row had chosen, and that were not copied."""
    bytes_streamed: int
    marks: tuple[tuple[int, int], ...]
    """(nanoseconds, number in `PHASES`) in order; a phase lasts until the next mark."""
    peer: PeerTiming | None = None
    """What the peer did meanwhile, if it takes part in prompts."""

    @property
    def device_s(self) -> float:
        """From the first mark to the last."""
        return (self.marks[-1][0] - self.marks[0][0]) / 1e9 if self.marks else 0.0

    @property
    def phases_ms(self) -> dict[str, float]:
        """Milliseconds by phase, the longest first."""
        times: collections.Counter[str] = collections.Counter()
        for (begin, phase), (end, _) in zip(self.marks, self.marks[1:]):
            times[PHASES[phase]] += end - begin
        return {phase: time / 1e6 for phase, time in times.most_common()}

    def to_json(self) -> dict[str, Any]:
        """All of it; `spans` are phase, beginning and duration in microseconds."""
        first = self.marks[0][0] if self.marks else 0
        spans = [
            [PHASES[phase], (begin - first) / 1e3, (end - begin) / 1e3]
            for (begin, phase), (end, _) in zip(self.marks, self.marks[1:])
        ]
        return {
            "wall_ms": 1e3 * self.wall_s,
            "device_ms": 1e3 * self.device_s,
            "slot_wait_ms": 1e3 * self.slot_wait_s,
            "experts_streamed": self.experts_streamed,
            "experts_unrouted": self.experts_unrouted,
            "bytes_streamed": self.bytes_streamed,
            "phases_ms": self.phases_ms,
            "spans": spans,
            "peer": None if self.peer is None else self.peer.to_json(),
        }

    def lines(self) -> Sequence[str]:
        """For people."""
        rate = self.bytes_streamed / max(self.device_s, 1e-9) / 1e9
        lines = [
            f"prompt: {1e3 * self.wall_s:.1f} ms, of these from the device's first mark to its last "
            f"{1e3 * self.device_s:.1f}; the host waits for it otherwise"
            if self.marks
            else f"prompt: {1e3 * self.wall_s:.1f} ms; phases are told of a GPU only",
        ]
        total = max(1e3 * self.device_s, 1e-9)
        phases = [
            f"{phase} {time:.1f} ms ({100 * time / total:.0f} %)"
            for phase, time in self.phases_ms.items()
        ]
        if phases:
            lines.append(f"prompt by phase: {', '.join(phases)}")
        if self.experts_streamed:
            lines.append(
                f"prompt: {self.experts_streamed} experts streamed, {rate:.1f} GB/s on average, and "
                f"{self.experts_unrouted} left out that no row had chosen; their thread waited "
                f"{1e3 * self.slot_wait_s:.1f} ms for free slots"
            )
        return lines if self.peer is None else [*lines, *self.peer.lines()]


def timed_prompt(
    experts: ExpertTiers | DeviceExperts, read: Callable[[], _T]
) -> tuple[_T, PrefillTiming]:
    """What `read` returns, which reads a prompt and waits for it, and where its time went."""
    experts.take_marks()  # of a prompt that nobody waited for
    experts.take_peer_marks()
    before, start = experts.counters(), time.perf_counter()
    result = read()
    wall_s, marks = time.perf_counter() - start, experts.take_marks()
    now = experts.counters()
    done = {name: count - before[name] for name, count in now.items()}
    peer_marks, peer = experts.take_peer_marks(), None
    if peer_marks:
        peer = PeerTiming(
            experts_streamed=done["peer_experts_streamed"],
            bytes_streamed=done["peer_bytes_streamed"],
            slot_wait_s=done["peer_waits_us"] / 1e6,
            marks=peer_marks,
        )
    timing = PrefillTiming(
        wall_s=wall_s,
        slot_wait_s=done["waits_us"] / 1e6,
        experts_streamed=done.get("experts_streamed", 0),
        experts_unrouted=done.get("experts_unrouted", 0),
        bytes_streamed=done["bytes_streamed"],
        marks=marks,
        peer=peer,
    )
    return result, timing
