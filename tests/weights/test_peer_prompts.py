"""The peer's part in prompts, as a plan has it."""

import types
from typing import Any

import numpy as np
import pytest

from strata_jax.config import TierSettings
from strata_jax.ops.native import Backend
from strata_jax.weights.budget import MIB
from strata_jax.weights.peer_prompts import (
    PEER_STREAM,
    PeerPart,
    PeerWay,
    peer_part,
    taken,
    tiles_bytes,
    with_ring,
)


@pytest.mark.parametrize(
    ("settings", "is_reached", "has_tiles", "way", "share"),
    [
        ({"peer_device": 1}, True, True, PeerWay.COMPUTES, PEER_STREAM),
        ({"peer_device": 1, "peer_stream": 1.0}, True, True, PeerWay.COMPUTES, 1.0),
        ({"peer_device": 1, "prefill_ring": 0}, True, True, PeerWay.COMPUTES, 0.0),
        ({"peer_device": 1}, False, True, PeerWay.STREAMED, 0.0),
        ({"peer_device": 1, "prefill_ring": 0}, False, True, PeerWay.WINDOWS, 0.0),
        ({"peer_device": 1}, False, False, PeerWay.WINDOWS, 0.0),
        ({"peer_device": 1}, True, False, PeerWay.READ, 0.0),
        ({"peer_device": "loopback"}, True, True, PeerWay.READ, 0.0),
        ({"peer_device": "loopback", "peer_stream": 0.0}, True, True, PeerWay.COMPUTES, 0.0),
    ],
)
def test_the_way_of_a_tiles_rows(settings, is_reached, has_tiles, way, share):
    part, notes = peer_part(TierSettings(**settings), is_reached, has_tiles)

    assert (part.way, part.share) == (way, share)
    assert part.is_far == (not is_reached)
    assert bool(notes) == (not is_reached)


def test_a_share_without_effect_is_named():
    for is_reached in (False, True):
        settings = TierSettings(peer_device=1, peer_stream=0.5)
        _, notes = peer_part(settings, is_reached, not is_reached)

        assert "--peer_stream=0.5: no effect, " in notes[0]


def test_a_share_is_spread_evenly_over_each_layer():
    host = np.ones((2, 10), bool)
    host[1, ::2] = False

    assert taken(host, 0.0).sum() == 0
    assert (taken(host, 1.0) == host).all()
    assert taken(host, 0.35).sum(axis=1).tolist() == [3, 1]
    assert np.flatnonzero(taken(host, 0.35)[0]).tolist() == [2, 5, 8]


def test_who_streams_what():
    host, peer = np.ones((1, 4), bool), np.zeros((1, 4), bool)
    host[0, 0], peer[0, 0] = False, True
    computes = PeerPart(way=PeerWay.COMPUTES, share=0.5)

    assert computes.passing(host, peer).tolist() == [[False, True, False, True]]
    assert PeerPart(way=PeerWay.STREAMED).passing(host, peer).all()
    assert (PeerPart(way=PeerWay.READ).passing(host, peer) == host).all()


def test_a_peer_without_room_for_a_ring_streams_nothing():
    host = np.ones((2, 8), bool)
    part = PeerPart(way=PeerWay.COMPUTES, share=0.5)

    roomy, notes = with_ring(part, host, MIB, 16 * 8 * MIB)
    assert (roomy.ring_slots, notes) == (8, ())
    short, notes = with_ring(part, host, MIB, MIB)
    assert (short.share, short.ring_slots) == (0.0, 0)
    assert notes[0].startswith("peer: no room for a ring")


def test_memory_is_no_less_than_what_is_taken():
    sizes: Any = types.SimpleNamespace(
        num_experts_active=10, num_experts=512, hidden=2560, expert_width=640
    )
    for rows in (64, 2048, 8192):
        takes = Backend("emulated").library.peer_tiles_bytes(rows, 10, 512, 2560, 640)
        assert takes <= tiles_bytes(sizes, rows) <= takes + 16384
    assert takes < 300 * MIB  # of a chunk of the released sizes
