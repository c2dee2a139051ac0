"""The device's kernels for tiles of a prompt, whose rows are more than a window's.

Quantised products equal the CPU's bit for bit (contract T); others are close to float64, and a row's
bits depend on that row alone.
"""

import dataclasses

import numpy as np
import pytest

from strata_jax.ops.case_inputs import Call
from strata_jax.ops.case_matrices import make_matrix, random_rows
from strata_jax.ops.cases import CASES, Q8_0
from strata_jax.ops.native import Backend
from strata_jax.ops.roles import Role
from strata_jax.ops.unpack_layouts_ref import LAYOUTS
from tests.ops.test_device import BACKENDS, on_cpu
from tests.ops_device import device_store, on_device, run_device
from tests.ops_maker import assert_same_bits, changed
from tests.ops_rules import poison

F32, F16, BF16 = 0, 1, 30
QUANTISED = [type_id for type_id in LAYOUTS if LAYOUTS[type_id].form != "float"]
SIDE_BY_SIDE = (Role.ATTN_Q, Role.ATTN_K, Role.ATTN_V)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    return request.param


def products(
    types: tuple[int, ...], columns: tuple[int, ...], width: int, rows: int, live: int
) -> Call:
    """Random rows, poisoned behind the last that is live, times random matrices side by side."""
    rng = np.random.default_rng(sum(types) + rows)
    roles = SIDE_BY_SIDE[: len(types)]
    case = CASES["quant_matmul"][0]
    matrices = {
        role: dataclasses.replace(
            make_matrix(case, Role.ATTN_QKV, rng),
            type_id=type_id,
            rows=count,
            cols=width,
            data=random_rows(type_id, count, width, rng),
        )
        for role, type_id, count in zip(roles, types, columns)
    }
    x = rng.standard_normal((live, width), np.float32)
    return Call(
        op="quant_matmul",
        operands=(np.concatenate([x, poison(x, rows - live)]), np.int32(live)),
        attributes={"layer": 0, "roles": roles, "num_columns": sum(columns)},
        matrices=matrices,
        macs=0,
        num_bytes=0,
    )


@pytest.mark.parametrize("type_id", QUANTISED)
def test_multiplies_every_type_as_the_cpu_does(type_id: int, backend: Backend):
    call = products((type_id, type_id), (45, 130), width=512, rows=70, live=67)

    assert_same_bits(on_device(call, backend), on_cpu(call))


@pytest.mark.parametrize("width", [96, 640, 1120])
@pytest.mark.parametrize("type_id", [8, 20, 2, 6, 7])
def test_multiplies_rows_that_end_inside_a_segment(type_id: int, width: int, backend: Backend):
    call = products((type_id,), (45,), width, rows=131, live=131)

    assert_same_bits(on_device(call, backend), on_cpu(call))


def test_multiplies_matrices_of_several_forms_side_by_side(backend: Backend):
    call = products((14, 8, 12), (40, 300, 33), width=256, rows=80, live=80)

    assert_same_bits(on_device(call, backend), on_cpu(call))


@pytest.mark.parametrize("live", [0, 1, 64, 129, 300])
def test_gives_zeros_for_rows_that_do_not_count(live: int, backend: Backend):
    call = products((8, BF16), (64, 70), width=256, rows=300, live=live)
    (got,) = on_device(call, backend)
    (expected,) = on_cpu(call)

    assert_same_bits((got[:, :64],), (expected[:, :64],))
    np.testing.assert_array_equal(got[live:], 0.0)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-4)


def test_passes_nan_on_as_the_cpu_does(backend: Backend):
    call = products((8, 14, 12), (32, 32, 32), width=256, rows=70, live=70)
    x = call.operands[0].copy()
    x[1, 5], x[2, 40], x[3] = np.nan, np.inf, 0.0

    call = changed(call, _0=x)
    assert_same_bits(on_device(call, backend), on_cpu(call))


@pytest.mark.parametrize("width", [96, 640, 2560])
@pytest.mark.parametrize("type_id", [F32, F16, BF16])
def test_multiplies_unquantised_matrices_closely(type_id: int, width: int, backend: Backend):
    call = products((type_id, type_id), (48, 70), width, rows=70, live=66)
    (got,) = on_device(call, backend)
    x = call.operands[0][:66].astype(np.float64)
    weights = [call.matrices[role].values().astype(np.float64) for role in SIDE_BY_SIDE[:2]]
    exact = np.concatenate([x @ w.T for w in weights], axis=1)

    # Two parts of a float leave 2^-18 of it out, and low * low is left out.
    assert np.linalg.norm(got[:66] - exact) < 6e-6 * np.linalg.norm(exact)
    size = np.concatenate([np.abs(x) @ np.abs(w).T for w in weights], axis=1)
    assert (np.abs(got[:66] - exact) < 2**-17 * size).all()


@pytest.mark.parametrize("type_id", [F32, F16, BF16, Q8_0])
def test_gives_a_row_the_same_bits_wherever_it_stands(type_id: int, backend: Backend):
    call = products((type_id,), (70,), width=640, rows=300, live=300)
    order = np.random.default_rng(5).permutation(300)
    few = [7, 250, *range(20, 88)]
    with device_store(backend, call.matrices) as store:
        (straight,) = run_device(call, backend, store)
        (shuffled,) = run_device(changed(call, _0=call.operands[0][order]), backend, store)
        alone = changed(call, _0=call.operands[0][few], live=np.int32(2))
        (two,) = run_device(alone, backend, store)

    assert_same_bits((shuffled,), (straight[order],))
    assert_same_bits((two[:2],), (straight[few[:2]],))
