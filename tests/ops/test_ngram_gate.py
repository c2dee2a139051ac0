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
    return make_call("ngram_gate", CASES["ngram_gate"][2], seed=seed)  # 8 rows


class TestRules(Rules, InPlaceRules):
    op = "ngram_gate"
    later_rows_only = True


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("case", small_cases("ngram_gate"), ids=lambda case: case.name)
def test_equals_its_twin(case, seed):
    call = make_call("ngram_gate", case, seed=seed)

    assert_close("ngram_gate", native(call), run_plain(call))


@pytest.mark.parametrize("seed", range(3))
def test_equals_its_twin_closely_where_no_gate_is_near_zero(seed):
    call = small_call(seed)
    key_value = call.operands[0].copy()
    key_value[:, :1024] = call.operands[5].reshape(8, 1024)  # keys along their streams
    key_value[:, 256:512] *= -1
    call = changed(call, _0=key_value)

    for got, expected in zip(native(call), run_plain(call)):
        np.testing.assert_allclose(got, expected, rtol=0, atol=5e-6)


@pytest.mark.parametrize("live", [0, 1, 5])
def test_equals_its_twin_where_rows_are_dead(live):
    call = changed(small_call(), live=np.int32(live))

    assert_close("ngram_gate", native(call), run_plain(call))


@pytest.mark.parametrize("dilation", [1, 2, 3])
def test_reads_taps_that_lie_a_dilation_apart(dilation):
    call = small_call()
    history = np.zeros((3 * dilation, 1024), np.float32)
    history[0] = 1  # read by the first tap of row 0 alone
    call = dataclasses.replace(call, attributes={**call.attributes, "dilation": dilation})
    call = changed(call, _6=history)

    (got, *_), (without, *_) = native(call), native(changed(call, _6=np.zeros_like(history)))

    assert (got != without).any(axis=(1, 2)).tolist() == [True] + [False] * 7
    assert_close("ngram_gate", native(call), run_plain(call))


def test_gates_by_half_where_key_and_stream_are_orthogonal():
    # sign(0) is 0, so the gate is sigmoid(0); without it the root's floor would show.
    call = small_call()
    key_value = call.operands[0].copy()
    key_value[:, :1024] = 0
    call = changed(call, _0=key_value, _4=np.zeros_like(call.operands[4]))

    streams, _, _ = native(call)

    expected = call.operands[5] + 0.5 * key_value[:, None, 1024:]
    np.testing.assert_allclose(streams, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("place", "shape"),
    [
        (0, (8, 1264)),
        (0, (7, 1280)),
        (1, (4, 240)),
        (2, (3, 256)),
        (3, (4, 272)),
        (4, (4, 1008)),
        (4, (0, 1024)),
        (5, (8, 4, 240)),
        (6, (8, 1024)),
        (6, (9, 1008)),
    ],
)
def test_refuses_shapes_that_do_not_belong_together(place, shape):
    with pytest.raises(OP_ERRORS, match="ngram_gate: shapes of key_value, the norms, conv_weight"):
        native(changed(small_call(), **{f"_{place}": np.zeros(shape, np.float32)}))


@pytest.mark.parametrize("dilation", [0, -1, 2])
def test_refuses_a_dilation_that_does_not_fit_the_state(dilation):
    call = small_call()
    call = dataclasses.replace(call, attributes={**call.attributes, "dilation": dilation})

    with pytest.raises(OP_ERRORS, match="ngram_gate: shapes of key_value"):
        native(call)


@pytest.mark.parametrize("windows", ACCEPTANCES)
def test_leaves_what_certain_rows_leave_when_drafts_come_true(windows):
    call = small_call()

    rows, states = run_windows(call, native, windows)

    expected, expected_states = run_certain(call, native, count_rows(windows))
    assert_same_bits((rows, *states), (expected, *expected_states))


@pytest.mark.parametrize(("kept", "certain", "live"), [(0, 1, 4), (3, 1, 8), (7, 2, 2), (2, 0, 0)])
def test_equals_its_twin_with_drafts(kept, certain, live):
    call = drafted(small_call(), kept, certain, live)

    assert_close("ngram_gate", native(call), run_plain(call))


@pytest.mark.parametrize(("kept", "certain"), [(8, 8), (-1, 8), (0, -1)])
def test_refuses_more_drafts_than_there_is_room_for(kept, certain):
    with pytest.raises(OP_ERRORS, match=r"ngram_gate: .* drafts expected"):
        native(drafted(small_call(), kept, certain, 8))
