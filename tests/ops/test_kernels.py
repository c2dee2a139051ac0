"""The scalar, AVX2 and AVX-512 kernels against each other and, one operation at a time, their twins."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_jax.ops.case_inputs import Call
from strata_jax.ops.case_matrices import Matrix
from strata_jax.ops.expert_ffn import ROLES
from strata_jax.ops.numerics_ref import fma_rn, quantize_rows_ref, silu_mul_ref
from strata_jax.ops.roles import Role
from strata_jax.ops.unpack_layouts_ref import LAYOUTS
from tests.ops_maker import KERNELS, assert_same_bits, kernels, native
from tests.ops_weights import any_bytes, columns_of, matrix_of

F32, Q8_0 = 0, 8


def any_floats(rng, shape):
    return rng.integers(0, 2**32, shape, np.uint32).view(np.float32)


def matmul_call(x, matrix):
    return Call(
        op="quant_matmul",
        operands=(x, np.int32(len(x))),
        attributes={"layer": 0, "roles": (Role.ATTN_Q,), "num_columns": matrix.rows},
        matrices={Role.ATTN_Q: matrix},
        macs=0,
        num_bytes=0,
    )


def test_run_on_the_cpu_they_are_meant_for():
    assert "scalar" in KERNELS
    missing = {"avx2", "avx512"} - set(KERNELS)
    if missing:
        pytest.skip(f"this CPU has no {', '.join(sorted(missing))}: those kernels are UNTESTED")


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_agree_on_any_bits(data):
    type_id = data.draw(st.sampled_from(sorted(LAYOUTS)))
    num_cols = data.draw(st.sampled_from(columns_of(type_id)))
    num_rows = data.draw(st.integers(1, 70))
    columns = data.draw(st.integers(1, 50))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    raw = any_bytes(type_id, columns, num_cols, rng)
    shape = (num_rows, num_cols)
    wild = rng.random((num_rows, 1)) < 0.5
    x = np.where(wild, any_floats(rng, shape), rng.standard_normal(shape, np.float32))
    call = matmul_call(x, matrix_of(type_id, columns, num_cols, rng, raw))
    with kernels("scalar"):
        expected = native(call)
    for name in KERNELS[1:]:
        with kernels(name):
            assert_same_bits(native(call), expected, f"{name}, {LAYOUTS[type_id].name}")


def unit_rows(num_cols):
    """Row i picks value i: Q8_0 blocks of scale 1."""
    blocks = np.zeros((num_cols, num_cols // 32, 34), np.uint8)
    blocks[:, :, 1] = 0x3C
    place = np.arange(num_cols)
    blocks[place, place // 32, 2 + place % 32] = 1
    return Matrix(type_id=Q8_0, count=1, rows=num_cols, cols=num_cols, data=blocks.reshape(-1))


@pytest.mark.parametrize("name", KERNELS)
def test_quantise_like_the_twin(name):
    rng = np.random.default_rng(0)
    scale = np.float32(2.0) ** rng.integers(-130, 127, (300, 2)).astype(np.float32)
    x = rng.uniform(-1, 1, (300, 2, 32)).astype(np.float32) * scale[:, :, None]
    x[:20] = np.rint(x[:20] / scale[:20, :, None] * 254) / 2  # codes that are ties
    x[20:22, 0, 7] = [np.nan, np.inf]
    x = x.reshape(300, 64)
    codes, scales = quantize_rows_ref(x)
    expected = fma_rn(codes, np.repeat(scales, 32, axis=1), np.float32(0))
    bad = np.isnan(scales)  # a bad block spoils the whole product

    with kernels(name):
        (got,) = native(matmul_call(x, unit_rows(64)))

    rows = ~bad.any(axis=1)
    np.testing.assert_array_equal(got[rows] + 0, expected[rows] + 0)
    assert np.isnan(got[~rows]).all()


def silu_through(name, gate, up):
    """silu(gate) * up as `expert_ffn` computes it: the matrices do nothing."""
    T, D = gate.shape
    unit = np.eye(2 * D, dtype=np.float32)
    first, second = unit[:D], unit[D:]  # gate reads the first half of a row, up the second
    parts = [first, second, np.concatenate([np.eye(D), np.zeros((D, D))])]
    matrices = {}
    for role, part in zip(ROLES, parts * 2):
        values = np.ascontiguousarray(part, np.float32)
        rows, cols = values.shape
        data = values.view(np.uint8).reshape(-1)
        matrices[role] = Matrix(type_id=F32, count=1, rows=rows, cols=cols, data=data)
    call = Call(
        op="expert_ffn",
        operands=(
            np.concatenate([gate, up], axis=1),
            np.zeros((T, 1), np.int32),
            np.ones((T, 1), np.float32),
            np.zeros(T, np.float32),
            np.int32(T),
        ),
        attributes={"layer": 0},
        matrices=matrices,
        macs=0,
        num_bytes=0,
    )
    with kernels(name):
        return native(call)[0][:, :D]


@pytest.mark.parametrize("name", KERNELS)
def test_compute_silu_like_the_twin(name):
    rng = np.random.default_rng(0)
    D = 16
    edges = [0.0, -0.0, 87, -87, 87.00001, -87.00001, 88, -104, 1e30, -1e30, 1e-45, -1e-45]
    halves = np.arange(-126, 127) * np.float32(np.log(2) / 2)  # where n rounds from one to the next
    gate = np.concatenate([edges, halves, rng.uniform(-90, 90, 4000), rng.normal(0, 1, 4000)])
    gate = np.resize(gate.astype(np.float32), (len(gate) // D, D))
    up = rng.standard_normal(gate.shape).astype(np.float32)

    got = silu_through(name, gate, up)

    np.testing.assert_array_equal(got + 0, silu_mul_ref(gate, up) + 0)


@pytest.mark.parametrize("name", KERNELS)
def test_pass_a_nan_gate_and_a_nan_factor_on(name):
    gate, up = np.ones((4, 16), np.float32), np.ones((4, 16), np.float32)
    gate[1, 3] = np.nan
    up[2, 5] = np.nan
    gate[3, 7] = -np.inf

    rows = np.isnan(silu_through(name, gate, up)).any(axis=1)

    assert rows.tolist() == [False, True, True, True]  # 0 * NaN and 0 * inf in the unit products
