"""Drafts looked up in the text so far."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_jax.engine.lookup_drafter import LookupDrafter

NONE = np.zeros(0, np.float32)


def after(ids, match=3, count=4, cut=()):
    """The draft after `ids`, told in the given pieces."""
    drafter = LookupDrafter(match)
    at = 0
    for end in (*cut, len(ids)):
        drafter.read(np.asarray(ids[at:end], np.int32), NONE, at)
        at = end
    return drafter.draft(count).ids.tolist()


def test_goes_on_as_the_text_did():
    assert after([1, 2, 3, 7, 8, 9, 1, 2, 3]) == [7, 8, 9, 1]


@pytest.mark.parametrize("ids", [[], [1], [1, 2, 3], [1, 2, 3, 4, 9, 2, 3], [5, 2, 3, 4, 1, 2, 3]])
def test_drafts_nothing_without_a_match(ids):
    assert after(ids) == []


def test_the_longest_match_wins():
    text = [4, 1, 2, 3, 50, 0, 9, 1, 2, 3, 60, 0, 4, 1, 2, 3]

    assert after(text, count=1) == [50]


def test_of_equally_long_matches_the_most_recent_wins():
    assert after([1, 2, 3, 50, 0, 1, 2, 3, 60, 9, 1, 2, 3], count=1) == [60]


def test_a_text_that_repeats_itself_goes_on_repeating():
    assert after([1, 2, 1, 2, 1, 2], match=2, count=5) == [1, 2, 1, 2, 1]
    assert after([7] * 5, count=3) == [7, 7, 7]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 4), st.integers(0, 60))
def test_finds_what_a_search_of_the_whole_text_finds(ids, match, cut):
    best = (0, -1)
    for place in range(len(ids) - 1):
        length = 0
        while length <= place and ids[place - length] == ids[len(ids) - 1 - length]:
            length += 1
        best = max(best, (length, place)) if length >= match else best

    drafted = after(ids, match=match, count=1, cut=(min(cut, len(ids)),))

    # Only the 16 most recent places are compared: longer texts of four ids have more of them.
    if len(ids) <= 16:
        assert drafted == ([ids[best[1] + 1]] if best[0] else [])
    else:
        assert bool(drafted) == bool(best[0])


def test_forgets_the_text():
    drafter = LookupDrafter(1)
    drafter.read(np.asarray([1, 1], np.int32), NONE, 0)
    drafter.reset()

    assert drafter.draft(3).ids.tolist() == []


def test_takes_long_texts():
    drafter = LookupDrafter(3)
    ids = np.arange(5000, dtype=np.int32)
    drafter.read(ids, NONE, 0)
    drafter.read(np.asarray([10, 11, 12], np.int32), NONE, 5000)

    assert drafter.draft(2).ids.tolist() == [13, 14]
    assert drafter.draft(2).probabilities.tolist() == [1, 1]
