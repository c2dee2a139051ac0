"""Drafts of the recurrent ops, for tests: which rows of a call are drafts, and what became of them."""

import itertools

import numpy as np

from strata_jax.ops.case_inputs import Call
from strata_jax.ops.cases import ROW_OPERANDS, STATES
from tests.ops_maker import changed

Results = tuple[np.ndarray, ...]

ACCEPTANCES = [
    [(3, 1, 0)],
    [(4, 1, 3), (4, 1, 0), (1, 1, 0)],
    [(8, 1, 7), (8, 1, 2), (2, 2, 0)],
    [(5, 3, 1), (7, 1, 6), (8, 8, 0)],
    [(2, 1, 1), (2, 1, 1), (2, 1, 0), (3, 1, 2), (1, 0, 1)],
]
"""Windows one after the other: live rows, certain rows, drafts that came true."""


def drafted(call: Call, kept: int, certain: int, live: int) -> Call:
    """The call with these numbers, which are its last operands."""
    *operands, _, _, _ = call.operands
    numbers = (np.int32(kept), np.int32(certain), np.int32(live))
    places = range(len(operands), len(operands) + 3)
    return changed(call, **{f"_{place}": n for place, n in zip(places, numbers)})


def carried(call: Call, results: Results) -> Call:
    """The call with its state replaced by the results that carry it on."""
    states = STATES[call.op]
    return changed(call, **{f"_{operand}": results[place] for operand, place in states.items()})


def rows_from(call: Call, first: int) -> Call:
    """The call with its rows moved up by `first`, as a ring."""
    rows = {
        f"_{place}": np.roll(call.operands[place], -first, 0) for place in ROW_OPERANDS[call.op]
    }
    return changed(call, **rows)


def run_windows(call: Call, run, windows) -> tuple[np.ndarray, Results]:
    """Runs windows with drafts; rows that did not come true are read again by the next one.

    Returns:
        the first result of the rows that came true, and the states after replaying the last drafts.
    """
    parts, at, kept = [], 0, 0
    for live, certain, came_true in windows:
        results = run(drafted(rows_from(call, at), kept, certain, live))
        parts.append(results[0][: certain + came_true])
        call, at, kept = carried(call, results), at + certain + came_true, came_true
    settled = run(drafted(call, kept, 0, 0))
    return np.concatenate(parts), settled[1:-1]


def run_certain(call: Call, run, count: int) -> tuple[np.ndarray, Results]:
    """The same rows one by one, none a draft."""
    parts = []
    for at in range(count):
        results = run(drafted(rows_from(call, at), 0, 1, 1))
        parts.append(results[0][:1])
        call = carried(call, results)
    return np.concatenate(parts), run(drafted(call, 0, 0, 0))[1:-1]


def count_rows(windows) -> int:
    """Rows that came true."""
    return sum(certain + came_true for _, certain, came_true in itertools.chain(windows))
