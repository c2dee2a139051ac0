"""What is told of a peer's own timeline."""

import json

from strata_jax.engine.peer_timing import PeerTiming

MS = 1_000_000


def test_is_told_by_phase_in_lines_and_as_json():
    marks = [(3, 1), (4, 2), (5, 3), (9, 4), (12, 0), (20, 1), (21, 0)]
    timing = PeerTiming(
        experts_streamed=4,
        bytes_streamed=36_000_000,
        slot_wait_s=0.002,
        marks=tuple((at * MS, phase) for at, phase in marks),
    )
    written = json.loads(json.dumps(timing.to_json()))

    assert written["device_ms"] == 18.0
    assert written["spans"][2] == ["gate and up", 2000.0, 4000.0]
    assert timing.phases_ms["rows in"] == 2.0
    first, second = timing.lines()
    assert first.startswith("peer by phase, 18.0 ms: idle 8.0 ms (44 %), rows in 2.0 ms (11 %), ")
    assert "4 experts streamed over its link, 2.0 GB/s" in second
