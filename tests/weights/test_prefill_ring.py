"""The size of the ring that prompts stream experts through."""

import numpy as np
import pytest

from strata_jax.errors import UsageError
from strata_jax.weights.budget import StepSizes
from strata_jax.weights.prefill_ring import auto_room, min_rows, ring_slots

SLOT = 1000


def away(counts: list[int]) -> np.ndarray:
    """So many of a layer's 64 experts are on no device."""
    return np.arange(64)[None, :] < np.asarray(counts)[:, None]


@pytest.mark.parametrize(
    ("counts", "room", "slots"),
    [
        ([40, 30], 10**6, 80),  # two layers' worth of the layer with the most
        ([40, 30], 50 * SLOT, 50),
        ([40, 30], 8 * SLOT, 8),  # two groups of sixteen
        ([40, 30], 7 * SLOT, 0),
        ([3, 1], 6 * SLOT, 6),
        ([0, 0], 10**6, 0),
    ],
)
def test_auto_is_two_layers_or_what_there_is_room_for(counts, room, slots):
    assert ring_slots(None, away(counts), SLOT, room) == slots


def test_takes_what_was_asked_for_as_far_as_it_is_of_use():
    assert ring_slots(20, away([40, 30]), SLOT, 0) == 20
    assert ring_slots(500, away([40, 30]), SLOT, 0) == 80
    assert ring_slots(0, away([40, 30]), SLOT, 10**6) == 0


def test_refuses_a_ring_that_holds_too_little_of_a_layer():
    with pytest.raises(
        UsageError, match="--prefill_ring=7: 0 or at least 8 slots expected for 40 "
    ):
        ring_slots(7, away([40, 30]), SLOT, 10**6)


def test_auto_takes_a_sixteenth_of_the_memory_but_no_more_than_is_left():
    assert auto_room(1600, None) == 100
    assert auto_room(1600, 30) == 30
    assert auto_room(1600, -5) == 0
    assert auto_room(None, None) == 0


def test_programs_of_few_rows_stream_nothing():
    assert min_rows(StepSizes(tile_rows=2048)) == 32
