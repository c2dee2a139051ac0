from typing import Any

import pytest

from strata_jax.gate.comparison import LiveRows, Mode
from strata_jax.gate.outcome import EXIT_CODES, Seen, Verdict, worst
from strata_jax.gate.tier_flags import FROZEN, MISSES


def test_a_failure_is_worse_than_a_difference_and_that_than_no_exercise():
    order: list[Verdict] = ["identical", "not exercised", "differs", "failed"]

    for index, verdict in enumerate(order):
        assert worst(order[: index + 1]) == verdict


def test_exit_codes_are_those_of_the_design():
    assert [EXIT_CODES[each] for each in ("identical", "differs", "failed", "not exercised")] == [
        0,
        1,
        1,
        5,
    ]


@pytest.mark.parametrize(
    ("counters", "expected"),
    [
        ({"entries_stream": 0, "entries_host": 2, "entries_file": 1}, (3, True)),
        ({"entries_stream": 0, "entries_host": 0, "entries_file": 0}, (0, False)),
        ({"entries_host": 2}, (None, False)),
        ({}, (None, False)),
    ],
)
def test_looks_claims_up(counters: dict[str, int], expected: tuple[int | None, bool]):
    seen = Seen.count(MISSES, counters)

    assert (seen.found, seen.holds) == expected


def test_what_was_not_reported_is_not_zero():
    assert not Seen.count(FROZEN, {"swaps_primary": 0}).holds
    assert Seen.count(FROZEN, {"swaps_primary": 0, "swaps_peer": 0}).holds


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        ([{"ngram": {"mode": "direct"}}, {"ngram": {"mode": "direct"}}], ("direct", True)),
        ([{"ngram": {"mode": "mmap"}}], ("mmap", False)),
        ([{"ngram": {"mode": "direct"}}, {"ngram": {"mode": "mmap"}}], ("direct, mmap", False)),
        ([{"ngram": {"mode": "direct"}}, {}], ("direct", False)),
        ([{"ngram": None}], (None, False)),
        ([{"ngram": {"mode": [3]}}], (None, False)),
        ([], (None, False)),
    ],
)
def test_looks_modes_up(results: list[dict[str, Any]], expected: tuple[str | None, bool]):
    seen = Seen.mode(Mode(("ngram", "mode"), "direct"), results)

    assert (seen.found, seen.holds) == expected
    assert seen.text == "ngram.mode == direct"


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        ([{"windows": {"1": 9, "3": 2}}, {"windows": {"3": 1}}], ("3", True)),
        ([{"windows": {"1": 9, "3": 0}}], ("1", False)),
        ([{"windows": {"1": 9, "4": 1}}], ("4", False)),
        ([{"windows": {"3": 1}}, {"windows": {"1": 1}}], ("1, 3", False)),
        ([{"windows": {"3": 1}}, {}], ("3", False)),
        ([{"windows": {}}], (None, False)),
        ([{"windows": {"three": 1, "x": "y"}}], (None, False)),
        ([{"windows": None}], (None, False)),
        ([], (None, False)),
    ],
)
def test_looks_live_rows_up(results: list[dict[str, Any]], expected: tuple[str | None, bool]):
    seen = Seen.live_rows(LiveRows(3), results)

    assert (seen.found, seen.holds) == expected
    assert seen.text == "live rows of the widest window == 3"
