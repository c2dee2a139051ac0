"""How the misses of a GPU are shared between its link and the host."""

import numpy as np
import pytest

from strata_jax.weights.device_host import (
    host_threads,
    sides_that_move,
    streamed_measured,
    streamed_share,
)
from strata_jax.weights.experts import AdaptSettings
from strata_jax.weights.placement import Tier


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
    ("tiers", "swaps", "peer_swaps", "expected"),
    [
        ([[0, 1], [0, 1]], 1, 1, [Tier.PRIMARY]),
        ([[0, 1], [0, 2]], 1, 1, [Tier.PRIMARY, Tier.PEER]),
        ([[0, 1], [0, 2]], 0, 1, [Tier.PEER]),
        ([[0, 1], [0, 2]], 1, 0, [Tier.PRIMARY]),
        ([[0, 0], [0, 0]], 1, 1, []),
        ([[1, 2], [1, 2]], 1, 1, []),
        ([[0, 1]], 1, 1, []),
    ],
)
def test_moves_experts_where_some_are_on_a_device_and_some_are_on_none(
    tiers, swaps, peer_swaps, expected
):
    adapt = AdaptSettings(every=1, swaps=swaps, peer_swaps=peer_swaps, decay=0.7)

    assert sides_that_move(adapt, np.array(tiers)) == expected
