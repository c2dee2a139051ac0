"""The router as one op: the bits of the two ops that it stands for."""

import dataclasses
import importlib.util

import numpy as np
import pytest

from strata_jax.ops import route
from strata_jax.ops.case_inputs import Call, make_call
from strata_jax.ops.case_matrices import make_matrix
from strata_jax.ops.cases import CASES, EMBEDDED
from strata_jax.ops.native import Backend
from strata_jax.ops.sets import native_ops
from tests.ops_device import device_store
from tests.ops_maker import assert_same_bits, changed, native, small_cases

F32, F16, Q8_0, BF16 = 0, 1, 8, 30
BACKENDS = [
    pytest.param(Backend("emulated"), id="emulated"),
    pytest.param(Backend("cuda"), id="cuda", marks=pytest.mark.gpu),
]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    chosen = request.param
    if chosen.name == "emulated" and not importlib.util.find_spec("strata_jax._native_emulated"):
        pytest.fail("this build has no emulated library: tools/test builds one (STRATA_EMULATE=ON)")
    return chosen


def call_of(rows: int, type_id: int = F32, **sizes: int) -> Call:
    config = dataclasses.replace(EMBEDDED, **sizes)
    types = {**CASES["route"][0].types, **dict.fromkeys(route.ROLES, type_id)}
    case = dataclasses.replace(CASES["route"][0], rows=rows, config=config, types=types)
    return make_call("route", case, seed=rows)


def apart(backend: Backend, store: int, call: Call) -> tuple[np.ndarray, ...]:
    """Products, then the choice, by the device's kernels for each."""
    ops = native_ops(store, backend=backend)
    x, live = call.operands
    columns = call.attributes["num_experts"] + 1
    logits = ops.quant_matmul(x, live, layer=0, roles=route.ROLES, num_columns=columns)
    chosen = ops.router_topk(logits, live, num_active=call.attributes["num_active"])
    return tuple(np.array(part) for part in chosen)


def as_one(backend: Backend, store: int, call: Call) -> tuple[np.ndarray, ...]:
    found = native_ops(store, backend=backend).route(*call.operands, **call.attributes)
    return tuple(np.array(part) for part in found)


@pytest.mark.parametrize("rows", [1, 2, 5, 8, 9])
@pytest.mark.parametrize("type_id", [F32, F16, BF16, Q8_0])
def test_gives_the_bits_of_the_two_ops(backend: Backend, rows: int, type_id: int):
    call = call_of(rows, type_id)
    with device_store(backend, call.matrices) as store:
        for live in {0, 1, rows - 1, rows}:
            some = changed(call, _1=np.int32(live))
            assert_same_bits(as_one(backend, store.slot, some), apart(backend, store.slot, some))


@pytest.mark.parametrize("sizes", [{"num_experts": 37}, {"num_experts": 512, "hidden": 2560}])
def test_gives_them_for_other_sizes(backend: Backend, sizes: dict):
    call = call_of(2, **sizes)
    with device_store(backend, call.matrices) as store:
        assert_same_bits(as_one(backend, store.slot, call), apart(backend, store.slot, call))


def test_gives_them_again_and_again(backend: Backend):
    """A launch leaves its counter as it found it."""
    calls = [call_of(rows) for rows in (1, 8, 3)]
    with device_store(backend, calls[0].matrices) as store:
        for call in calls * 2:
            assert_same_bits(as_one(backend, store.slot, call), apart(backend, store.slot, call))


def test_takes_a_value_that_is_no_number_as_the_two_do(backend: Backend):
    call = call_of(3)
    x = call.operands[0].copy()
    x[1, 5] = np.nan
    call = changed(call, _0=x)
    with device_store(backend, call.matrices) as store:
        assert_same_bits(as_one(backend, store.slot, call), apart(backend, store.slot, call))


@pytest.mark.parametrize("case", small_cases("route"), ids=lambda case: case.name)
def test_is_the_two_ops_on_the_cpu(case):
    call = make_call("route", case)
    roles = {role: make_matrix(case, role, np.random.default_rng(0)) for role in route.ROLES}

    ids, weights, shared = native(dataclasses.replace(call, matrices=call.matrices or roles))

    assert ids.shape == weights.shape == (case.rows, case.config.num_experts_active)
    np.testing.assert_allclose(weights.sum(axis=1), 1, rtol=1e-5)
    assert ((shared > 0) & (shared < 1)).all()
