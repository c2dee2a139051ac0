import dataclasses

import numpy as np
import pytest

from strata_jax.ops.case_inputs import Call, make_call
from tests.ops_maker import (
    OP_ERRORS,
    assert_close,
    native,
    run_plain,
    small_cases,
)
from tests.ops_rules import RowRules


def call_of(logits, num_active=2):
    logits = np.asarray(logits, np.float32)
    return Call(
        op="router_topk",
        operands=(logits, np.int32(len(logits))),
        attributes={"num_active": num_active},
        matrices={},
        macs=0,
        num_bytes=0,
    )


class TestRules(RowRules):
    op = "router_topk"


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("case", small_cases("router_topk"), ids=lambda case: case.name)
def test_equals_its_twin(case, seed):
    call = make_call("router_topk", case, seed=seed)

    assert_close("router_topk", native(call), run_plain(call))


def test_gives_ties_to_the_lower_id():
    ids, weights, _ = native(call_of([[1, 3, 3, 3, 1, 0], [2, 2, 2, 2, 2, 0]], num_active=3))

    assert ids.tolist() == [[1, 2, 3], [0, 1, 2]]
    np.testing.assert_array_equal(weights, np.float32(1 / 3))


def test_takes_both_zeros_as_equal():
    ids, _, _ = native(call_of([[-0.0, 0.0, -0.0, 0.0, 9], [-1.0, -0.0, 0.0, -0.0, 9]]))

    assert ids.tolist() == [[0, 1], [1, 2]]


def test_orders_negative_logits():
    ids, _, _ = native(call_of([[-5.0, -1e-30, -3.0, -1e30, 0]], num_active=4))

    assert ids.tolist() == [[1, 2, 0, 3]]


def test_sums_its_weights_to_one():
    logits = np.random.default_rng(0).standard_normal((50, 17)).astype(np.float32) * 100
    _, weights, _ = native(call_of(logits, num_active=16))

    np.testing.assert_allclose(weights.sum(axis=1), 1, rtol=1e-6)
    assert (weights >= 0).all()


def test_chooses_every_expert_where_all_are_active():
    ids, _, _ = native(call_of([[1, 4, 2, 0]], num_active=3))

    assert ids.tolist() == [[1, 2, 0]]


@pytest.mark.parametrize("nan", [0x7FC00000, 0xFFC00000], ids=["positive", "negative"])
def test_shows_a_nan_in_the_weights(nan):
    # A NaN that hid behind the chosen experts would end no run.
    logits = np.array([[1, 2, 3, 4, 0], [1, 2, 3, 4, 0]], np.float32)
    logits[1, 1] = np.array(nan, np.uint32).view(np.float32)

    ids, weights, _ = native(call_of(logits))

    assert ids[1].tolist() == [1, 3]
    assert np.isnan(weights).tolist() == [[False] * 2, [True] * 2]


def test_shows_a_nan_of_the_shared_expert():
    _, weights, shared = native(call_of([[1, 2, 3, np.nan]]))

    assert np.isnan(shared).all()
    assert np.isfinite(weights).all()


def test_gives_far_experts_next_to_nothing():
    _, weights, shared = native(call_of([[1000, -1000, -2000, -1000]]))

    assert weights[0, 0] == 1
    assert weights[0, 1] < 1e-37
    assert shared[0] == 0


def test_refuses_more_active_experts_than_there_are():
    with pytest.raises(OP_ERRORS, match="router_topk: 4 of 3 experts"):
        native(call_of([[1, 4, 2, 0]], num_active=4))


def test_takes_no_rows():
    call = dataclasses.replace(
        call_of([[1, 2, 3]]), operands=(np.zeros((0, 3), np.float32), np.int32(0))
    )

    assert [result.shape for result in native(call)] == [(0, 2), (0, 2), (0,)]
