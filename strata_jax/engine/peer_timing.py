"""What a GPU's peer did while a prompt was read: its own timeline by phase."""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

PEER_PHASES = (
    # `PeerPhase` of ffi/cuda/timeline.h.
    "idle",
    "rows in",
    "waiting for copies",
    "gate and up",
    "down and rows out",
    "attention in",
    "selection",
    "attention",
)
"""Names by number."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PeerTiming:
    """Of one prompt."""

    experts_streamed: int
    """Over the peer's own link."""
    bytes_streamed: int
    slot_wait_s: float
    """Of the thread that issues its copies, for free slots of its ring."""
    marks: tuple[tuple[int, int], ...]
    """(nanoseconds of the peer's clock, number in `PEER_PHASES`) in order."""

    @property
    def device_s(self) -> float:
        """From the first mark to the last."""
        return (self.marks[-1][0] - self.marks[0][0]) / 1e9 if self.marks else 0.0

    @property
    def phases_ms(self) -> dict[str, float]:
        """Milliseconds by phase, in the order of the work."""
        times: collections.Counter[int] = collections.Counter()
        for (begin, phase), (end, _) in zip(self.marks, self.marks[1:]):
            times[phase] += end - begin
        return {PEER_PHASES[phase]: times[phase] / 1e6 for phase in sorted(times)}

    def to_json(self) -> dict[str, Any]:
        """All of it; `spans` are phase, beginning and duration in microseconds, from its own first mark."""
        first = self.marks[0][0] if self.marks else 0
        spans = [
            [PEER_PHASES[phase], (begin - first) / 1e3, (end - begin) / 1e3]
            for (begin, phase), (end, _) in zip(self.marks, self.marks[1:])
        ]
        return {
            "device_ms": 1e3 * self.device_s,
            "slot_wait_ms": 1e3 * self.slot_wait_s,
            "experts_streamed": self.experts_streamed,
            "bytes_streamed": self.bytes_streamed,
            "phases_ms": self.phases_ms,
            "spans": spans,
        }

    def lines(self) -> Sequence[str]:
        """For people."""
        total = max(1e3 * self.device_s, 1e-9)
        phases = [
            f"{phase} {time:.1f} ms ({100 * time / total:.0f} %)"
            for phase, time in self.phases_ms.items()
        ]
        lines = [f"peer by phase, {total:.1f} ms: {', '.join(phases)}"]
        if self.experts_streamed:
            rate = self.bytes_streamed / max(self.device_s, 1e-9) / 1e9
            lines.append(
                f"peer: {self.experts_streamed} experts streamed over its link, {rate:.1f} GB/s on "
                f"average; their thread waited {1e3 * self.slot_wait_s:.1f} ms for free slots"
            )
        return lines
