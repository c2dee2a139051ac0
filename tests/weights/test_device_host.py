"""How the misses of a GPU are shared between its link and the host."""

import numpy as np
import pytest

from strata_jax.weights.device_host import (
    HostSettings,
    host_threads,
    moves,
    streamed_measured,
    streamed_share,
)
from strata_jax.weights.experts import AdaptSettings


def settings(swaps: int) -> HostSettings:
    adapt = AdaptSettings(every=1, swaps=swaps, peer_swaps=0, decay=0.5)
    return HostSettings(
        window_rows=8,
        num_active=4,
        width=256,
        threads=1,
        stream_share=None,
        timeout_ms=1000,
        adapt=adapt,
    )


@pytest.mark.parametrize(
    ("share", "counts"),
    [(0.0, [0, 0, 0, 0, 0]), (0.5, [0, 0, 1, 1, 2]), (1.0, [0, 1, 2, 3, 4])],
)
def test_streams_the_share_that_was_asked_for_rounded_down(share, counts):
    assert streamed_share(4, share) == counts


def test_streams_as_many_as_end_when_the_host_ends():
    assert streamed_measured(8, 50e-6, 50e-6)[8] == 4
    assert streamed_measured(8, 30e-6, 90e-6)[8] == 6
    # One miss goes where it is done first, the way to the host and back counted.
    assert streamed_measured(8, 50e-6, 45e-6)[1] == 1
    assert streamed_measured(8, 50e-6, 20e-6)[1] == 0


def test_never_streams_more_than_there_are():
    counts = streamed_measured(10, 1e-6, 1.0)
    assert counts == list(range(11))
    assert streamed_measured(10, 1.0, 1e-6) == [0] * 11


def test_counts_cores_that_share_nothing_and_leaves_one(tmp_path, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3, 4, 5})
    for cpu in range(6):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cpu // 2 * 2}-{cpu // 2 * 2 + 1}\n")

    assert host_threads(0, tmp_path) == 2
    assert host_threads(5, tmp_path) == 5
    assert host_threads(0, tmp_path / "none") == 5  # the system does not tell


@pytest.mark.parametrize(
    ("away", "swaps", "expected"),
    [
        ([[True, False], [True, False]], 1, True),
        ([[True, False], [True, False]], 0, False),
        ([[True, True], [True, True]], 1, False),
        ([[False, False], [False, False]], 1, False),
        ([[True, False]], 1, False),
    ],
)
def test_moves_experts_where_some_are_on_the_device_and_some_are_not(away, swaps, expected):
    assert moves(settings(swaps), np.array(away)) is expected
