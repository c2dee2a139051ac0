import dataclasses

import numpy as np
import pytest

from strata_jax.ops.case_inputs import make_call
from strata_jax.ops.cases import CASES
from tests.ops_maker import assert_close, assert_same_bits, changed, native, run_plain, small_cases
from tests.ops_rules import InPlaceRules, Rules


def make(rows, seed=0):
    return make_call("gdn_chunk", dataclasses.replace(CASES["gdn_chunk"][0], rows=rows), seed=seed)


def recurrence(call):
    """The same call of `gdn_window`, without drafts."""
    *operands, live = call.operands
    channels, heads = operands[1].shape[1], operands[2].shape[0]
    none = (np.zeros((0, channels + 2 * heads), np.float32), np.int32(0), live)
    return dataclasses.replace(call, op="gdn_window", operands=(*operands, *none, live))


class TestRules(Rules, InPlaceRules):
    """The native set's form for tiles, whatever it is made of."""

    op = "gdn_chunk"
    later_rows_only = True


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("rows", [64, 192])
def test_equals_the_recurrence(rows, seed):
    call = make(rows, seed)

    assert_close("gdn_chunk", run_plain(call), run_plain(recurrence(call))[:3])


@pytest.mark.parametrize("case", small_cases("gdn_chunk"), ids=lambda case: case.name)
def test_equals_the_native_recurrence(case):
    call = make_call("gdn_chunk", case, seed=3)

    assert_close("gdn_chunk", run_plain(call), native(recurrence(call))[:3])


@pytest.mark.parametrize("live", [0, 1, 63, 64, 65, 127])
def test_leaves_dead_rows_out(live):
    call = changed(make(128), live=np.int32(live))
    proj = call.operands[0].copy()
    proj[live:] = np.nan

    got = run_plain(changed(call, _0=proj))

    assert_same_bits(got, run_plain(call))
    assert_close("gdn_chunk", got, native(recurrence(call))[:3])
    assert not got[0][live:].any()


@pytest.mark.parametrize("alpha", [-50.0, 50.0])
def test_stays_finite_where_a_block_forgets_all_or_nothing(alpha):
    # Decays far apart overflow above the diagonal unless they are masked before exp.
    call = make(128)
    proj = call.operands[0].copy()
    proj[:, -16:-8] = alpha
    proj[::7, -16:-8] = -alpha
    call = changed(call, _0=proj)

    got = run_plain(call)

    assert all(np.isfinite(result).all() for result in got)
    assert_close("gdn_chunk", got, native(recurrence(call))[:3])


def test_is_the_native_window_in_the_native_set():
    call = make(64)

    assert_same_bits(native(call), native(recurrence(call))[:3])
