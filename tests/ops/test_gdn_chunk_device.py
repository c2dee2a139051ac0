"""The device's chunk form of the delta rule, against the recurrence and against itself."""

import dataclasses
import importlib.util

import jax
import numpy as np
import pytest

from strata_jax.ops.case_inputs import Call, make_call
from strata_jax.ops.cases import CASES, EMBEDDED, TOLERANCES
from strata_jax.ops.native import Backend
from tests.ops_device import on_device
from tests.ops_maker import assert_same_bits, changed, native
from tests.ops_rules import with_rows

BACKENDS = [
    pytest.param(Backend("emulated"), id="emulated"),
    pytest.param(Backend("cuda"), id="cuda", marks=pytest.mark.gpu),
]
CLOSE = TOLERANCES["gdn_chunk"]
"""Of the largest value."""


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    chosen = request.param
    if chosen.name == "emulated" and not importlib.util.find_spec("strata_jax._native_emulated"):
        pytest.fail("this build has no emulated library: tools/test builds one (STRATA_EMULATE=ON)")
    return chosen


def make(rows: int, seed: int = 0, **sizes: int) -> Call:
    config = dataclasses.replace(EMBEDDED, **sizes)
    case = dataclasses.replace(CASES["gdn_chunk"][0], rows=rows, config=config)
    return make_call("gdn_chunk", case, seed=seed)


WIDE = {"gdn_head_dim": 128, "gdn_key_heads": 1, "gdn_value_heads": 4}
"""The released model's dimension, and more value heads of a key head than are solved at once."""
FEW = {"gdn_head_dim": 64, "gdn_key_heads": 1, "gdn_value_heads": 2}
OTHER = {"gdn_head_dim": 32, "gdn_key_heads": 2, "gdn_value_heads": 4}
"""A dimension that only the kernel for windows knows."""


def recurrence(call: Call) -> tuple[np.ndarray, ...]:
    with jax.default_device(jax.devices("cpu")[0]):
        return native(call)  # which goes row by row on the CPU


def assert_agrees(got: tuple[np.ndarray, ...], expected: tuple[np.ndarray, ...]) -> None:
    for place, (g, e) in enumerate(zip(got, expected, strict=True)):
        atol = CLOSE * np.abs(e).max(initial=0.0)
        np.testing.assert_allclose(g, e, rtol=0, atol=atol, err_msg=f"result {place}")


@pytest.mark.parametrize("sizes", [{}, WIDE, OTHER], ids=["embedded", "wide", "other"])
def test_equals_the_recurrence(sizes: dict[str, int], backend: Backend):
    call = make(192, **sizes)

    assert_agrees(on_device(call, backend), recurrence(call))


@pytest.mark.parametrize("live", [0, 1, 2, 63, 64, 65, 127])
def test_leaves_dead_rows_out(live: int, backend: Backend):
    call = make(128, **FEW)
    dead = with_rows(call, 0, live, 128)

    got = on_device(dead, backend)

    assert_agrees(got, recurrence(dead))
    assert not got[0][live:].any()
    assert_same_bits((got[0][:live],), (on_device(call, backend)[0][:live],))


def test_gives_the_same_bits_wherever_a_tile_begins(backend: Backend):
    call = make(256, seed=1, **FEW)

    whole = on_device(call, backend)
    first = on_device(with_rows(call, 0, 64, 256), backend)
    second = on_device(changed(with_rows(call, 64, 190, 192), _5=first[1], _6=first[2]), backend)

    assert_same_bits((first[0][:64],), (whole[0][:64],))
    assert_same_bits((second[0][:190],), (whole[0][64:254],))
    assert_same_bits(second[1:], on_device(with_rows(call, 0, 254, 256), backend)[1:])


@pytest.mark.parametrize("alpha", [-50.0, 50.0])
def test_stays_finite_where_a_chunk_forgets_all_or_nothing(alpha: float, backend: Backend):
    # Decays far apart overflow above the diagonal unless they are masked before exp.
    call = make(128, **FEW)
    heads = FEW["gdn_value_heads"]
    proj = call.operands[0].copy()
    proj[:, -2 * heads : -heads] = alpha
    proj[::7, -2 * heads : -heads] = -alpha
    call = changed(call, _0=proj)

    got = on_device(call, backend)

    assert all(np.isfinite(result).all() for result in got)
    assert_agrees(got, recurrence(call))


def test_keeps_a_long_tile_close_to_the_recurrence(backend: Backend):
    call = make(1024, seed=2, **FEW)

    assert_agrees(on_device(call, backend), recurrence(call))


def test_refuses_rows_that_are_no_whole_chunks(backend: Backend):
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="96 rows, a multiple of 64"):
        on_device(make(96, **FEW), backend)
