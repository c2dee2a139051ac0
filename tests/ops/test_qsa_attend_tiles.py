"""Sparse attention for tiles of a prompt on the device: close to the CPU's, each row by itself."""

import dataclasses

import numpy as np
import pytest

from strata_jax.config import KvType
from strata_jax.ops.case_inputs import Call, make_call
from strata_jax.ops.cases import CASES, EMBEDDED
from strata_jax.ops.native import Backend
from tests.ops.test_device import BACKENDS, on_cpu
from tests.ops_device import on_device
from tests.ops_maker import assert_same_bits, changed
from tests.ops_rules import poison, with_rows

ROWS = 67
"""More than a window has, and no multiple of what a thread block takes."""
SMALL = dataclasses.replace(EMBEDDED, index_budget=64)
SIZES = {
    "embedded": SMALL,
    "wide": dataclasses.replace(SMALL, num_heads=12, num_kv_heads=1, head_dim=256),
    "two key heads": dataclasses.replace(SMALL, num_heads=10, head_dim=256),
}
"""Heads of 256 values go by matrix units."""
KEYS, VALUES, BLOCKS, SCALES = 2, 3, 4, 5
TOLERANCES = {"fp16": 1e-3, "int8": 1e-3, "f32": 2e-5}
"""Of the largest result: queries and weights are rounded to halves, as keys and values are."""


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    return request.param


def attend(sizes: str, kv: KvType, position: int, rows: int = ROWS) -> Call:
    case = dataclasses.replace(
        CASES["qsa_attend"][0], config=SIZES[sizes], rows=rows, position=position, kv=kv
    )
    return make_call("qsa_attend", case, seed=position)


@pytest.mark.parametrize("position", [0, 192])
@pytest.mark.parametrize("kv", ["fp16", "int8", "f32"])
@pytest.mark.parametrize("sizes", SIZES)
def test_attends_as_the_cpu_does(sizes: str, kv: KvType, position: int, backend: Backend):
    call = with_rows(attend(sizes, kv, position), 0, ROWS - 2, ROWS)

    (got,), (expected,) = on_device(call, backend), on_cpu(call)

    atol = TOLERANCES[kv] * np.abs(expected).max()
    np.testing.assert_allclose(got, expected, rtol=0, atol=atol)
    assert not got[ROWS - 2 :].any()


@pytest.mark.parametrize("kv", ["fp16", "int8"])
def test_attends_with_the_same_bits_wherever_a_row_stands(kv: KvType, backend: Backend):
    call = attend("wide", kv, 64, ROWS + 64)
    (alone,) = on_device(with_rows(call, 64, ROWS, ROWS), backend)

    (got,) = on_device(call, backend)

    assert_same_bits((alone,), (got[64:],))


@pytest.mark.parametrize("kv", ["fp16", "int8"])
def test_attends_to_listed_cells_alone(kv: KvType, backend: Backend):
    call = attend("wide", kv, 320)
    listed = np.unique(call.operands[BLOCKS][:, :, None] * 4 + np.arange(4))
    used = np.union1d(listed, np.arange(320, 320 + ROWS))
    new = {}
    for place in (KEYS, VALUES) if kv == "fp16" else (SCALES,):
        cells = np.full_like(call.operands[place], np.nan)
        cells[used] = call.operands[place][used]
        new[f"_{place}"] = cells

    assert_same_bits(on_device(changed(call, **new), backend), on_device(call, backend))


@pytest.mark.parametrize("others", ["zero", "nan"])
def test_attends_with_the_same_bits_whatever_the_others_hold(others: str, backend: Backend):
    call = attend("wide", "fp16", 320)
    new = {}
    for place in (0, 1):
        x = call.operands[place]
        fill = poison(x, ROWS) if others == "nan" else np.zeros_like(x)
        fill[40] = x[40]
        new[f"_{place}"] = fill

    (got,) = on_device(changed(call, **new), backend)

    assert_same_bits((got[40],), (on_device(call, backend)[0][40],))
