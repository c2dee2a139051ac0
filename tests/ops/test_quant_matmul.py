import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_jax.ops.case_inputs import Call, make_call
from strata_jax.ops.case_matrices import random_rows
from strata_jax.ops.quant_matmul import quant_matmul
from strata_jax.ops.quant_matmul_ref import quant_matmul_exact
from strata_jax.ops.roles import Role
from strata_jax.ops.unpack_layouts_ref import LAYOUTS
from tests.ops_maker import (
    KERNELS,
    OP_ERRORS,
    THREADS,
    assert_close,
    assert_same_bits,
    flush_to_zero,
    guarded_store,
    kernels,
    native,
    run_native,
    run_plain,
    small_cases,
    threads,
)
from tests.ops_rules import RowRules
from tests.ops_weights import any_bytes, columns_of, hard_rows, matrix_of, name_of

F32, F16, BF16, Q4_0, Q8_0, Q2_K, Q4_K, Q6_K, IQ3_S, MXFP4 = 0, 1, 30, 2, 8, 10, 12, 14, 21, 39
FORMS = [Q8_0, IQ3_S, Q4_K, Q6_K, Q2_K, F32]
"""One type of every form that the kernels tell apart."""
ROLES = (Role.ATTN_Q, Role.ATTN_K, Role.ATTN_V, Role.ATTN_OUTPUT)


def subnormal_rows(type_id, num_rows, num_cols, rng):
    """Rows whose scales, or values where there are no scales, are subnormal."""
    raw = random_rows(type_id, num_rows, num_cols, rng)
    if type_id == F32:
        return (raw.view(np.uint32) & 0x807FFFFF).view(np.uint8)
    if type_id in (F16, BF16):
        return (raw.view(np.uint16) & (0x83FF if type_id == F16 else 0x807F)).view(np.uint8)
    blocks = raw.reshape(-1, LAYOUTS[type_id].block_bytes)
    if type_id == MXFP4:
        blocks[:, 0] = 0  # 2^-128
    else:  # the smallest half, 2^-24: times a scale of 2^-103 it is subnormal
        at = {Q6_K: 208, Q2_K: 80}.get(type_id, 0)
        blocks[:, at : at + 2] = (1, 0)
    return raw


def call_of(x, matrices, live=None):
    roles = ROLES[: len(matrices)]
    return Call(
        op="quant_matmul",
        operands=(x, np.int32(len(x) if live is None else live)),
        attributes={
            "layer": 0,
            "roles": roles,
            "num_columns": sum(matrix.rows for matrix in matrices),
        },
        matrices=dict(zip(roles, matrices)),
        macs=0,
        num_bytes=0,
    )


def exact(x, matrices):
    """The specification's result."""
    parts = [quant_matmul_exact(x, m.type_id, m.data, m.rows) for m in matrices]
    return (np.concatenate(parts, axis=1),)


class TestRules(RowRules):
    op = "quant_matmul"


class TestBits:
    @pytest.mark.parametrize("type_id", LAYOUTS, ids=name_of)
    def test_are_those_of_the_specification(self, type_id):
        rng = np.random.default_rng(type_id)
        for num_cols in columns_of(type_id):
            matrices = [matrix_of(type_id, rows, num_cols, rng) for rows in (17, 1, 15)]
            x = hard_rows(num_cols, rng)
            expected = exact(x, matrices)
            for name in KERNELS:
                with kernels(name):
                    got = native(call_of(x, matrices))
                assert_same_bits(got, expected, f"{name}, {num_cols} columns")

    @pytest.mark.parametrize("type_id", LAYOUTS, ids=name_of)
    def test_are_those_of_the_specification_for_any_weights(self, type_id):
        rng = np.random.default_rng(100 + type_id)
        num_cols = columns_of(type_id)[-1]
        matrices = [matrix_of(type_id, 40, num_cols, rng, any_bytes(type_id, 40, num_cols, rng))]
        x = hard_rows(num_cols, rng)
        expected = exact(x, matrices)
        for name in KERNELS:
            with kernels(name):
                assert_same_bits(native(call_of(x, matrices)), expected, name)

    @pytest.mark.parametrize("type_id", FORMS, ids=name_of)
    def test_are_those_of_the_specification_at_every_number_of_rows(self, type_id):
        rng = np.random.default_rng(type_id)
        matrices = [matrix_of(type_id, 20, 256, rng)]
        x = np.concatenate([hard_rows(256, rng), rng.standard_normal((247, 256), np.float32)])
        (expected,) = exact(x, matrices)
        for name in KERNELS:
            for num_rows in (*range(1, 10), 64, 256):
                with kernels(name):
                    got = native(call_of(x[:num_rows], matrices))
                assert_same_bits(got, (expected[:num_rows],), f"{name}, {num_rows} rows")

    @pytest.mark.parametrize("count", THREADS)
    def test_are_those_of_the_specification_on_any_number_of_threads(self, count):
        rng = np.random.default_rng(0)
        matrices = [matrix_of(type_id, 100, 256, rng) for type_id in (IQ3_S, Q6_K, F16, Q4_0)]
        x = np.concatenate([hard_rows(256, rng)] * 9)  # enough to be quantised by the pool
        with threads(count):
            assert_same_bits(native(call_of(x, matrices)), exact(x, matrices))

    @pytest.mark.parametrize("type_id", [Q8_0, Q6_K, Q2_K, MXFP4, F32, F16, BF16], ids=name_of)
    def test_keep_subnormals_whatever_the_callers_mode(self, type_id):
        rng = np.random.default_rng(type_id)
        num_cols = columns_of(type_id)[-1]
        raw = subnormal_rows(type_id, 20, num_cols, rng)
        matrices = [matrix_of(type_id, 20, num_cols, rng, raw)]
        x = np.concatenate([hard_rows(num_cols, rng) * np.float32(2.0**e) for e in (0, -98, -115)])
        expected = exact(x, matrices)

        with flush_to_zero(), threads(2):
            got = native(call_of(x, matrices))

        assert np.count_nonzero(expected[0]) > 40
        assert_same_bits(got, expected)

    def test_are_those_of_the_specification_for_short_rows_of_floats(self):
        rng = np.random.default_rng(0)
        for num_cols in (1, 16, 40, 272):
            matrices = [matrix_of(type_id, 18, num_cols, rng) for type_id in (F32, F16, BF16)]
            x = hard_rows(num_cols, rng)
            for name in KERNELS:
                with kernels(name):
                    got = native(call_of(x, matrices))
                assert_same_bits(got, exact(x, matrices), f"{name}, {num_cols} columns")

    @settings(max_examples=60, deadline=None)
    @given(data=st.data())
    def test_are_those_of_the_specification_for_any_bits(self, data):
        type_id = data.draw(st.sampled_from(sorted(LAYOUTS)))
        num_cols = data.draw(st.sampled_from(columns_of(type_id)))
        num_rows = data.draw(st.integers(1, 9))
        rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
        x = rng.integers(0, 2**32, (num_rows, num_cols), np.uint32).view(np.float32)
        # Random bits hold NaN in nearly every block of 32; most blocks shall be finite.
        x = np.where(np.isfinite(x) | (rng.random(x.shape) < 1e-3), x, np.float32(1e38))
        raw = any_bytes(type_id, 17, num_cols, rng)
        matrices = [matrix_of(type_id, 17, num_cols, rng, raw)]
        expected = exact(x, matrices)
        for name in KERNELS:
            with kernels(name):
                assert_same_bits(native(call_of(x, matrices)), expected, name)

    def test_are_the_same_where_two_programs_run_at_once(self):
        rng = np.random.default_rng(0)
        matrices = [matrix_of(IQ3_S, 200, 256, rng)]
        calls = [call_of(rng.standard_normal((n, 256), np.float32), matrices) for n in (3, 8)]
        expected = [native(call) for call in calls]
        failures = []

        def work(call, result):
            for _ in range(50):
                got = run_native(call, store.slot)
                if not np.array_equal(got[0], result[0]):
                    failures.append(len(call.operands[0]))

        with threads(3), guarded_store(calls[0].matrices) as store:
            workers = [threading.Thread(target=work, args=pair) for pair in zip(calls, expected)]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()

        assert failures == []


class TestTwin:
    @pytest.mark.parametrize("case", small_cases("quant_matmul"), ids=lambda case: case.name)
    def test_is_near(self, case):
        call = make_call("quant_matmul", case, seed=3)

        assert_close("quant_matmul", native(call), run_plain(call))

    def test_names_nan_rows_and_no_others(self):
        rng = np.random.default_rng(0)
        x = hard_rows(256, rng)
        (got,) = native(call_of(x, [matrix_of(IQ3_S, 20, 256, rng)]))

        assert np.isnan(got).all(axis=1).tolist() == [False] * 4 + [True] * 2 + [False] * 3


class TestErrors:
    def run(self, slot, roles=(Role.ATTN_Q,), layer=0, num_columns=20, num_cols=256):
        x = np.zeros((2, num_cols), np.float32)
        result = jax.jit(
            lambda x: quant_matmul(
                x,
                jnp.int32(2),
                store=slot,
                roles=roles,
                layer=layer,
                num_columns=num_columns,
            )
        )(x)
        return result.block_until_ready()

    def test_name_a_closed_store(self):
        with guarded_store({}) as store:
            slot = store.slot
        with pytest.raises(OP_ERRORS, match=f"quant_matmul: store {slot} is closed"):
            self.run(slot)

    @pytest.mark.parametrize("slot", [-1, 10**6, -(2**63), 2**63 - 1])
    def test_name_a_slot_that_never_was(self, slot):
        with pytest.raises(OP_ERRORS, match=f"quant_matmul: store {slot} is closed"):
            self.run(slot)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"roles": (Role.ATTN_K,)}, "role 19 of layer 0 has no matrix of 256 columns"),
            ({"roles": (-1,)}, "role -1 of layer 0 has no matrix"),
            ({"roles": (2**62,)}, f"role {2**62} of layer 0 has no matrix"),
            ({"layer": 1}, "role 18 of layer 1 has no matrix of 256 columns"),
            ({"layer": -1}, "role 18 of layer -1 has no matrix"),
            ({"num_cols": 288}, "role 18 of layer 0 has no matrix of 288 columns"),
            ({"num_columns": 21}, "result of 21 columns, expected 20"),
        ],
    )
    def test_name_what_does_not_fit(self, change, message):
        rng = np.random.default_rng(0)
        with guarded_store({Role.ATTN_Q: matrix_of(Q8_0, 20, 256, rng)}) as store:
            with pytest.raises(OP_ERRORS, match=f"quant_matmul: {message}"):
                self.run(store.slot, **change)
            self.run(store.slot)  # a refusal leaves nothing behind
