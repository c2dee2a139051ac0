"""Selection for tiles of a prompt on the device: the CPU's choice, for each row by itself."""

import dataclasses

import numpy as np
import pytest

from strata_jax.ops.case_inputs import Call, make_call
from strata_jax.ops.cases import CASES, EMBEDDED
from strata_jax.ops.native import Backend
from tests.ops.test_device import BACKENDS, on_cpu
from tests.ops_device import on_device
from tests.ops_maker import assert_same_bits, changed
from tests.ops_rules import with_rows

ROWS = 67
"""More than a window has, and no multiple of what a thread block takes."""


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    return request.param


def select(position: int, rows: int, ties: bool = False, index_dim: int = 64) -> Call:
    config = dataclasses.replace(EMBEDDED, index_dim=index_dim, index_budget=64)
    case = dataclasses.replace(CASES["qsa_select"][0], config=config, rows=rows, position=position)
    call = make_call("qsa_select", case, seed=position)
    if not ties:
        return call
    # Small whole numbers: many equal scores, and exact ones in any order of sums.
    rng = np.random.default_rng(3)
    new = {f"_{p}": rng.integers(-1, 2, call.operands[p].shape) for p in (0, 1)}
    return changed(call, **{place: x.astype(np.float32) for place, x in new.items()})


@pytest.mark.parametrize("index_dim", [64, 128])
@pytest.mark.parametrize("position", [0, 64, 640])
def test_selects_as_the_cpu_does(position: int, index_dim: int, backend: Backend):
    call = with_rows(select(position, 75, index_dim=index_dim), 0, 73, 75)

    assert_same_bits(on_device(call, backend), on_cpu(call))


def test_selects_the_lowest_of_equal_blocks(backend: Backend):
    call = select(445, ROWS, ties=True)

    assert_same_bits(on_device(call, backend), on_cpu(call))


def test_selects_the_same_wherever_a_row_stands(backend: Backend):
    call = select(320, 140)
    (alone,) = on_device(with_rows(call, 64, 70, 70), backend)

    (got,) = on_device(call, backend)

    assert_same_bits((alone,), (got[64 : 64 + 70],))
