import dataclasses

import numpy as np
import pytest

from strata_jax.ops.case_inputs import make_call
from strata_jax.ops.cases import CASES
from strata_jax.ops.roles import Role
from tests.ops_maker import (
    OP_ERRORS,
    assert_close,
    assert_same_bits,
    changed,
    guarded_store,
    native,
    poisoned_memory,
    run_native,
    run_plain,
    small_cases,
)
from tests.ops_rules import InPlaceRules, RowRules
from tests.ops_weights import matrix_of

F32, Q8_0 = 0, 8


def small_call(seed=0):
    return make_call("hyper_read", CASES["hyper_read"][1], seed=seed)  # 4 rows


def with_roles(call, *roles):
    return dataclasses.replace(call, attributes={**call.attributes, "roles": roles})


def float_call():
    """Matrices that are not quantised, so that native op and twin differ in rounding only."""
    call = small_call()
    matrices = {
        role: dataclasses.replace(m, type_id=F32, data=m.values().view(np.uint8).reshape(-1))
        for role, m in call.matrices.items()
    }
    return dataclasses.replace(call, matrices=matrices)


class TestRules(RowRules, InPlaceRules):
    op = "hyper_read"


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("case", small_cases("hyper_read"), ids=lambda case: case.name)
def test_is_near_its_twin(case, seed):
    call = make_call("hyper_read", case, seed=seed)

    assert_close("hyper_read", native(call), run_plain(call))


def test_equals_its_twin_where_matrices_are_floats():
    call = float_call()

    for got, expected in zip(native(call), run_plain(call)):
        np.testing.assert_allclose(got, expected, rtol=0, atol=2e-6)


def test_reads_without_writing_where_beta_is_zero():
    call = small_call()
    call = changed(call, _2=np.zeros_like(call.operands[2]))

    streams, *_ = native(call)

    assert_same_bits((streams,), (call.operands[0],))


def test_gives_no_next_beta_without_an_inject_matrix():
    call = with_roles(small_call(), Role.HC_ATTN_DOWN, None, Role.HC_ATTN_UP)
    with poisoned_memory():
        streams, x, next_beta = native(call)

    assert not next_beta.any()
    assert_same_bits((streams, x), native(small_call())[:2])
    assert_close("hyper_read", (streams, x, next_beta), run_plain(call))


def test_takes_rows_of_zeros():
    call = small_call()
    call = changed(call, _0=np.zeros_like(call.operands[0]), _1=np.zeros_like(call.operands[1]))

    streams, x, next_beta = native(call)

    assert not streams.any()
    assert not x.any()
    np.testing.assert_array_equal(next_beta, 1)


def test_keeps_a_nan_in_its_row():
    call = small_call()
    y = call.operands[1].copy()
    y[2, 5] = np.nan

    streams, x, next_beta = native(changed(call, _1=y))

    clean = native(call)
    others = [0, 1, 3]
    assert np.isnan(x[2]).any()
    assert np.isnan(next_beta[2]).all()
    got = (streams[others], x[others], next_beta[others])
    assert_same_bits(got, [result[others] for result in clean])


class TestErrors:
    call = small_call()

    def test_name_a_closed_store(self):
        with guarded_store(self.call.matrices) as store:
            slot = store.slot
        with pytest.raises(OP_ERRORS, match=f"hyper_read: store {slot} is closed"):
            run_native(self.call, slot)

    @pytest.mark.parametrize(
        "roles",
        [
            (Role.HC_FFN_DOWN, Role.HC_ATTN_INJECT, Role.HC_ATTN_UP),
            (Role.HC_ATTN_DOWN, Role.HC_FFN_INJECT, Role.HC_ATTN_UP),
            (Role.HC_ATTN_DOWN, Role.HC_ATTN_INJECT, Role.HC_FFN_UP),
            (Role.HC_ATTN_UP, Role.HC_ATTN_INJECT, Role.HC_ATTN_DOWN),
            (Role.HC_ATTN_DOWN, Role.HC_ATTN_DOWN, Role.HC_ATTN_UP),
        ],
    )
    def test_name_the_layer_of_a_wrong_role(self, roles):
        with pytest.raises(OP_ERRORS, match="hyper_read: the matrices of layer 0 do not fit 4 str"):
            native(with_roles(self.call, *roles))

    def test_name_a_number_of_roles(self):
        call = dataclasses.replace(self.call)
        with guarded_store(call.matrices) as store, pytest.raises(ValueError, match="unpack"):
            run_native(with_roles(call, Role.HC_ATTN_DOWN), store.slot)

    @pytest.mark.parametrize(
        ("place", "shape"), [(1, (3, 256)), (1, (4, 240)), (2, (3, 4)), (2, (4, 3)), (3, (3, 256))]
    )
    def test_name_operands_that_do_not_belong_together(self, place, shape):
        # The next beta takes its shape from beta: no row of it may be missing.
        with pytest.raises(OP_ERRORS, match="hyper_read: shapes of streams, y, beta and norm"):
            native(changed(self.call, **{f"_{place}": np.zeros(shape, np.float32)}))

    def test_name_streams_that_are_not_whole_vectors(self):
        rng = np.random.default_rng(0)
        narrow = {
            Role.HC_ATTN_DOWN: matrix_of(F32, 32, 32, rng),
            Role.HC_ATTN_INJECT: matrix_of(F32, 4, 32, rng),
            Role.HC_ATTN_UP: matrix_of(F32, 32, 32, rng),
        }
        call = dataclasses.replace(self.call, matrices=narrow)
        streams, y, norm = np.zeros((4, 4, 8)), np.zeros((4, 8)), np.zeros((4, 8))
        call = changed(
            call, _0=streams.astype(np.float32), _1=y.astype(np.float32), _3=norm.astype(np.float32)
        )

        with pytest.raises(OP_ERRORS, match="hyper_read: the matrices of layer 0 do not fit 4 str"):
            native(call)
