"""How many drafts pay."""

import numpy as np
import pytest

from strata_jax.engine.draft_length import DraftLength


def simulate(chance, cost, windows=400, most=7, seed=0, length=None):
    """Runs windows whose drafts come true with `chance` each; `cost(drafts)` is their time.

    Returns:
        ids a second over those of windows without drafts, and the drafts of each window.
    """
    rng = np.random.default_rng(seed)
    length = length or DraftLength(most)
    ids = seconds = 0.0
    chosen = []
    for _ in range(windows):
        drafts, _ = length.choose(most)
        came_true = int(np.cumprod(rng.random(drafts) < chance).sum())
        length.seen(came_true, cost(drafts), wanted=drafts)
        ids += came_true + 1
        seconds += cost(drafts)
        chosen.append(drafts)
    return ids / seconds * cost(0), chosen


def dear(drafts):
    return 1 + 0.5 * drafts


def cheap(drafts):
    return 1 + 0.05 * drafts


def learned(most, *, ahead=False):
    """One that knows what windows without drafts cost, and has a warm drafter."""
    length = DraftLength(most, ahead=ahead)
    for _ in range(16):
        length.seen(0, 1.0, wanted=0)
    for _ in range(8):
        length.seen(0, 1.0, wanted=1)
    return length


def test_the_first_windows_tell_what_one_without_drafts_costs():
    length = DraftLength(7)
    begun = [length.choose(7)[0]]
    for _ in range(16):
        length.seen(0, 1.0, wanted=0)
        begun.append(length.choose(7)[0])

    assert begun[:11] == [0] * 11
    assert begun[-1] > 0


def test_the_first_windows_with_drafts_do_not_count():
    """What runs for the first times is slow, and says nothing of how well drafts do."""
    length = DraftLength(3)
    for _ in range(16):
        length.seen(0, 1.0, wanted=0)
    for _ in range(8):
        drafts, _ = length.choose(3)
        assert drafts > 0
        assert not length.seen(0, 5.0, wanted=drafts)

    assert length.paused == 0
    assert length.choose(3)[0] > 0


def test_windows_without_drafts_do_not_seem_dear_because_a_device_falls_behind_first():
    """A device that works a step ahead takes twice as long for the first few windows after a draft."""
    length, drafted, since = DraftLength(1, ahead=True), 0, 0
    for _ in range(300):
        drafts, _ = length.choose(1)
        drafted += drafts
        since = 0 if drafts else since + 1
        # One and a half ids a window: they would pay if one without drafts took two.
        came_true = drafts * (drafted % 2)
        length.seen(came_true, 1.8 if drafts else 2.0 if since <= 3 else 1.0, wanted=drafts)
    assert 0 < drafted < 40


def test_drafts_that_come_true_are_made():
    speed, chosen = simulate(0.9, cheap)

    assert speed > 3
    assert np.median(chosen) == 7


@pytest.mark.parametrize("cost", [cheap, dear])
def test_drafts_that_never_come_true_cost_little(cost):
    speed, chosen = simulate(0.0, cost, windows=500)

    assert speed > 0.95
    assert 0 < np.count_nonzero(chosen) < 120


def test_texts_that_drafts_fail_in_cost_little_however_many_begin():
    length = learned(3)
    simulate(0.0, dear, windows=200, most=3, length=length)
    for _ in range(5):
        length.begin()
        speed, _ = simulate(0.0, dear, windows=200, most=3, length=length)
        assert speed > 0.95


def test_a_text_where_drafts_pay_does_not_wait_for_the_end_of_a_pause():
    length = learned(3)
    simulate(0.0, dear, windows=400, most=3, length=length)
    length.begin()

    assert simulate(0.9, cheap, windows=100, most=3, length=length)[0] > 2


def test_drafts_that_pay_a_little_go_on():
    """Where a window in four loses nearly a window's time, estimates of a few windows say now this, now that."""
    speeds = [simulate(0.75, lambda n: 1 + 0.35 * (n > 0), most=1, seed=n)[0] for n in range(20)]

    assert np.median(speeds) > 1.2


def test_what_one_draft_costs_decides_on_its_chance():
    assert simulate(0.6, cheap)[0] > 1.5
    speed, chosen = simulate(0.3, dear)
    assert speed > 0.95
    assert np.mean(chosen) < 1


@pytest.mark.parametrize("ahead", [False, True])
def test_pauses_grow_and_end_when_drafts_pay_again(ahead):
    length = learned(1, ahead=ahead)
    pauses = []
    for _ in range(1000):
        drafts, _ = length.choose(1)
        if length.seen(0, dear(drafts), wanted=drafts):
            pauses.append(length.paused)
    assert pauses[2] > pauses[1]
    for _ in range(1200):  # however long the last one is
        drafts, _ = length.choose(1)
        length.seen(drafts, dear(drafts), wanted=drafts)
    assert length.paused <= 1
    assert length.choose(1)[0] == 1 - length.paused


def test_there_are_no_more_drafts_than_there_is_room_for():
    length = learned(7)

    assert length.choose(1)[0] == 1
    assert length.choose(0) == (0, 0.0)


def test_a_drafter_that_is_asked_in_vain_pauses_when_that_takes_longer():
    """A draft that is not likely enough is not tried, but it took its time: on one H200 half of all."""
    length, asked = learned(3), 0
    for _ in range(300):
        count, _ = length.choose(3)
        asked += count > 0
        length.seen(0, 1.5 if count else 1.0, wanted=count)
    assert 0 < asked < 30


def test_a_drafter_that_is_asked_in_vain_now_and_then_goes_on_where_it_pays():
    length, paused = learned(3), 0
    for window in range(300):
        count, _ = length.choose(3)
        length.seen(count if window % 3 else 0, 1.2 if count else 1.0, wanted=count)
        paused += length.paused > 8  # longer than a look at windows without drafts
    assert paused == 0


@pytest.mark.parametrize(("dear", "most"), [(1.9, 150), (5.0, 450)])
def test_windows_without_drafts_that_were_believed_dear_are_looked_at_again(dear, most):
    """A machine that was slow at first: drafts would seem to pay for ever."""
    length, drafted = DraftLength(1), 0
    for window in range(600):
        drafts, _ = length.choose(1)
        drafted += drafts
        slow = window < 38
        length.seen(0, 1.5 if drafts else dear if slow else 1.0, wanted=drafts)
    assert 60 < drafted < most


def test_the_first_window_behind_drafts_does_not_tell_what_windows_without_cost():
    """Caches are full of the draft layer then. Drafts that lose a little would seem to pay for ever."""
    length, drafted, before = DraftLength(1), 0, 0
    for window in range(2000):
        drafts, _ = length.choose(1)
        dear = 1.6 if window < 100 else 2.15
        length.seen(drafts, dear if drafts else 1.25 if before else 1.0, wanted=drafts)
        drafted, before = drafted + drafts, drafts

    assert 100 < drafted < 800


def test_a_device_that_gets_going_again_makes_a_pause_longer():
    length = learned(1, ahead=True)
    while not length.paused:
        length.seen(0, 2.0, wanted=1)
    paused = length.paused
    length.seen(0, 3.0, wanted=0)
    assert length.paused > paused + 40


def test_a_pause_that_a_request_cuts_short_is_owed():
    length = learned(1)
    simulate(0.0, dear, windows=100, most=1, length=length)
    rest = length.paused

    length.begin()
    assert length.paused == 0 < rest
    length.seen(0, 2.0, wanted=1)

    assert length.paused > rest


def test_windows_in_a_devices_queue_make_a_pause_longer_by_what_they_lose():
    length = learned(1, ahead=True)
    while not length.paused:
        length.seen(0, 2.0, wanted=1)
    paused = length.paused
    length.seen(1, 1.5, wanted=1)  # won
    assert length.paused == paused
    length.seen(0, 2.0, wanted=1)
    assert length.paused > paused + 20
