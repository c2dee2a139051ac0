"""How many drafts pay."""

import numpy as np
import pytest

from strata_jax.engine.draft_length import DraftLength


def simulate(chance, cost, windows=400, most=7, seed=0):
    """Runs windows whose drafts come true with `chance` each; `cost(drafts)` is their time.

    Returns:
        ids a second over those of windows without drafts, and the drafts of each window.
    """
    rng = np.random.default_rng(seed)
    length = DraftLength(most)
    ids = seconds = 0.0
    chosen = []
    for _ in range(windows):
        drafts, _ = length.choose(most)
        came_true = int(np.cumprod(rng.random(drafts) < chance).sum())
        length.seen(drafts, came_true, cost(drafts))
        ids += came_true + 1
        seconds += cost(drafts)
        chosen.append(drafts)
    return ids / seconds * cost(0), chosen


def dear(drafts):
    return 1 + 0.5 * drafts


def cheap(drafts):
    return 1 + 0.05 * drafts


def test_the_first_window_tells_what_one_without_drafts_costs():
    assert DraftLength(7).choose(7) == (0, 0.0)


def test_drafts_that_come_true_are_made():
    speed, chosen = simulate(0.9, cheap)

    assert speed > 3
    assert np.median(chosen) == 7


@pytest.mark.parametrize("cost", [cheap, dear])
def test_drafts_that_never_come_true_cost_little(cost):
    speed, chosen = simulate(0.0, cost, windows=500)

    assert speed > 0.95
    assert 0 < np.count_nonzero(chosen) < 25


def test_what_one_draft_costs_decides_on_its_chance():
    assert simulate(0.6, cheap)[0] > 1.5
    speed, chosen = simulate(0.3, dear)
    assert speed > 0.95
    assert np.mean(chosen) < 1


def test_pauses_grow_and_end_when_drafts_pay_again():
    length = DraftLength(4)
    length.seen(0, 0, 1.0)
    pauses, run = [], 0
    for _ in range(200):
        drafts, _ = length.choose(4)
        run = run + 1 if drafts == 0 else 0
        if length.seen(drafts, 0, dear(drafts)):
            pauses.append(length.paused)
    assert pauses[:4] == [16, 32, 64, 128]
    for _ in range(600):
        drafts, _ = length.choose(4)
        length.seen(drafts, drafts, dear(drafts))
    assert length.paused == 0
    assert length.choose(4)[0] == 4


def test_there_are_no_more_drafts_than_there_is_room_for():
    length = DraftLength(7)
    length.seen(0, 0, 1.0)

    assert length.choose(1)[0] == 1
    assert length.choose(0) == (0, 0.0)
