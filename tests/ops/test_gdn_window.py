import dataclasses

import numpy as np
import pytest

from strata_jax.ops.case_inputs import make_call
from strata_jax.ops.cases import CASES
from tests.ops_drafts import ACCEPTANCES, count_rows, drafted, run_certain, run_windows
from tests.ops_maker import (
    OP_ERRORS,
    assert_close,
    assert_same_bits,
    changed,
    native,
    run_plain,
    small_cases,
)
from tests.ops_rules import InPlaceRules, Rules


def small_call(seed=0):
    return make_call("gdn_window", CASES["gdn_window"][2], seed=seed)  # 8 rows


class TestRules(Rules, InPlaceRules):
    op = "gdn_window"
    later_rows_only = True


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("case", small_cases("gdn_window"), ids=lambda case: case.name)
def test_equals_its_twin(case, seed):
    call = make_call("gdn_window", case, seed=seed)

    assert_close("gdn_window", native(call), run_plain(call))


@pytest.mark.parametrize("live", [0, 1, 7])
def test_equals_its_twin_where_rows_are_dead(live):
    call = changed(small_call(), live=np.int32(live))

    assert_close("gdn_window", native(call), run_plain(call))


def test_computes_a_known_row():
    # One head of 16, one tap: q = k = v = silu(1), so both unit vectors are 1/4 everywhere.
    dim = 16
    proj = np.ones((1, 3 * dim + dim + 2), np.float32)
    proj[0, -2] = 100.0  # alpha: softplus is the identity there, the decay e^-100 forgets the state
    proj[0, -1] = 0.0  # beta = 1/2
    call = dataclasses.replace(
        small_call(),
        operands=(
            proj,
            np.ones((1, 3 * dim), np.float32),
            -np.ones(1, np.float32),
            np.zeros(1, np.float32),
            np.full(dim, 2, np.float32),
            np.zeros((0, 3 * dim), np.float32),
            np.full((1, dim, dim), 3, np.float32),
            *(np.zeros((7, 3 * dim + 2), np.float32), np.int32(0), np.int32(1)),
            np.int32(1),
        ),
        attributes={"key_heads": 1, "eps": 0.0},
    )

    y, conv_state, state, _ = native(call)

    v = 1 / (1 + np.exp(-1))
    np.testing.assert_allclose(state[0], np.full((dim, dim), 0.25 * 0.5 * v), rtol=1e-5)
    np.testing.assert_allclose(y, np.full((1, dim), 2 / (1 + np.exp(-1))), rtol=1e-5)
    assert conv_state.shape == (0, 3 * dim)


@pytest.mark.parametrize("gate", [-300.0, -30.0, 19.9, 20.1, 300.0])
def test_stays_finite_at_extreme_gates(gate):
    call = small_call()
    proj = call.operands[0].copy()
    proj[:, -16:] = gate  # alpha and beta of 8 heads

    call = changed(call, _0=proj)

    got = native(call)
    assert all(np.isfinite(result).all() for result in got)
    assert_close("gdn_window", got, run_plain(call))


def test_shows_a_nan_of_the_state():
    call = small_call()
    state = call.operands[6].copy()
    state[3, 1, 2] = np.nan

    y, _, new_state, _ = native(changed(call, _6=state))

    heads = np.isnan(y.reshape(8, 8, 64)).any(axis=(0, 2))
    assert heads.tolist() == [head == 3 for head in range(8)]
    assert_same_bits((np.delete(new_state, 3, 0),), (np.delete(native(call)[2], 3, 0),))


class TestErrors:
    call = small_call()

    @pytest.mark.parametrize(
        ("place", "shape"),
        [
            (0, (8, 1551)),
            (1, (4, 1008)),
            (1, (0, 1024)),
            (2, (7,)),
            (3, (9,)),
            (4, (48,)),
            (5, (2, 1024)),
            (5, (3, 1008)),
            (6, (8, 64, 48)),
            (6, (4, 64, 64)),
            (6, (8, 48, 48)),
        ],
    )
    def test_name_shapes_that_do_not_belong_together(self, place, shape):
        with pytest.raises(OP_ERRORS, match="gdn_window: shapes of proj, conv_weight, conv_state"):
            native(changed(self.call, **{f"_{place}": np.zeros(shape, np.float32)}))

    @pytest.mark.parametrize("key_heads", [0, -1, 3, 8])
    def test_name_key_heads_that_do_not_divide(self, key_heads):
        attributes = {**self.call.attributes, "key_heads": key_heads}

        with pytest.raises(OP_ERRORS, match="gdn_window: shapes of proj, conv_weight, conv_state"):
            native(dataclasses.replace(self.call, attributes=attributes))


@pytest.mark.parametrize("windows", ACCEPTANCES)
def test_leaves_what_certain_rows_leave_when_drafts_come_true(windows):
    call = small_call()

    rows, states = run_windows(call, native, windows)

    expected, expected_states = run_certain(call, native, count_rows(windows))
    assert_same_bits((rows, *states), (expected, *expected_states))


@pytest.mark.parametrize(("kept", "certain", "live"), [(0, 1, 4), (3, 1, 8), (7, 2, 2), (2, 0, 0)])
def test_equals_its_twin_with_drafts(kept, certain, live):
    call = drafted(small_call(), kept, certain, live)

    assert_close("gdn_window", native(call), run_plain(call))


@pytest.mark.parametrize(("kept", "certain"), [(8, 8), (-1, 8), (0, -1)])
def test_refuses_more_drafts_than_there_is_room_for(kept, certain):
    with pytest.raises(OP_ERRORS, match=r"gdn_window: .* drafts expected"):
        native(drafted(small_call(), kept, certain, 8))
