"""hyper_read of many rows on a device, where its mixers are BF16."""

import dataclasses
import importlib.util
from collections.abc import Iterator

import jax
import numpy as np
import pytest

from strata_jax.ops.case_inputs import Call, make_call
from strata_jax.ops.cases import EMBEDDED, Case
from strata_jax.ops.native import Backend
from strata_jax.ops.roles import Role
from tests.ops_device import device_store, emulating, on_device, run_device
from tests.ops_maker import assert_same_bits, changed, native
from tests.ops_rules import with_rows

BACKENDS = [
    pytest.param(Backend("emulated"), id="emulated"),
    pytest.param(Backend("cuda"), id="cuda", marks=pytest.mark.gpu),
]
BF16 = 30
ROLES = (Role.HC_ATTN_DOWN, Role.HC_ATTN_INJECT, Role.HC_ATTN_UP)
CLOSE = 2e-5
"""Of the largest value: the activations lose what two bfloat16 do not hold."""


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    chosen = request.param
    if chosen.name == "emulated" and not importlib.util.find_spec("strata_jax._native_emulated"):
        pytest.fail("this build has no emulated library: tools/test builds one (STRATA_EMULATE=ON)")
    return chosen


@pytest.fixture(params=[8, 9], autouse=True)
def capability(request: pytest.FixtureRequest, backend: Backend) -> Iterator[None]:
    """A kind of device; or a kind, an order of threads and a number of processors (`emulating`)."""
    kind = request.param if isinstance(request.param, tuple) else (request.param,)
    with emulating(backend, *kind):
        yield


def make(rows: int, hidden: int = 64, low_rank: int = 64) -> Call:
    config = dataclasses.replace(EMBEDDED, hidden=hidden, low_rank=low_rank)
    case = Case(
        name="tile",
        origin="this test",
        config=config,
        types={},
        default_type=BF16,
        rows=rows,
        roles=ROLES,
    )
    return make_call("hyper_read", case, seed=rows)


def on_cpu(call: Call) -> tuple[np.ndarray, ...]:
    with jax.default_device(jax.devices("cpu")[0]):
        return native(call)


def assert_agrees(got: tuple[np.ndarray, ...], expected: tuple[np.ndarray, ...]) -> None:
    for place, (g, e) in enumerate(zip(got, expected, strict=True)):
        largest = np.abs(e).max(initial=0.0)
        np.testing.assert_allclose(g, e, rtol=0, atol=CLOSE * largest, err_msg=str(place))


@pytest.mark.parametrize(
    ("hidden", "low_rank", "capability"),
    [
        (256, 64, 8),
        (64, 320, 8),
        (192, 96, 8),
        (64, 352, 8),
        (96, 64, 8),
        (320, 64, 9),
        (320, 320, (9, 5)),
        (320, 64, (9, 0, 1)),
        (192, 96, 9),
    ],
    indirect=["capability"],
)
def test_gives_what_the_cpu_gives(hidden: int, low_rank: int, backend: Backend):
    """A rank of 352 and a width of 96 go to the kernels for windows, ranks of 64 and 320 to those of
    capability 9, whose blocks then have tiles of two columns."""
    call = make(128, hidden, low_rank)

    assert_agrees(on_device(call, backend), on_cpu(call))


def test_reads_without_a_next_write(backend: Backend):
    call = make(128)
    call = dataclasses.replace(
        call,
        attributes={**call.attributes, "roles": (ROLES[0], None, ROLES[2])},
        matrices={role: m for role, m in call.matrices.items() if role is not ROLES[1]},
    )

    got = on_device(call, backend)

    assert_agrees(got, on_cpu(call))
    assert not got[2].any()


@pytest.mark.parametrize("live", [0, 1, 64, 100, 129])
def test_leaves_dead_rows_alone_and_reads_none(live: int, backend: Backend):
    call = with_rows(make(256), 0, live, 256)

    got = on_device(call, backend)

    assert_agrees(tuple(part[:live] for part in got), tuple(part[:live] for part in on_cpu(call)))
    np.testing.assert_array_equal(got[0][live:], call.operands[0][live:])
    assert not got[1][live:].any()
    assert not got[2][live:].any()


@pytest.mark.parametrize(
    ("hidden", "low_rank", "capability"),
    [(64, 64, 8), (64, 64, 9), (320, 320, 9)],
    indirect=["capability"],
)
def test_gives_a_row_the_same_bits_wherever_it_stands(hidden: int, low_rank: int, backend: Backend):
    call = make(256, hidden, low_rank)
    order = np.random.default_rng(3).permutation(256)
    moved = changed(call, **{f"_{place}": call.operands[place][order] for place in range(3)})
    with device_store(backend, call.matrices) as store:
        straight = run_device(call, backend, store)
        shuffled = run_device(moved, backend, store)
        half = run_device(with_rows(call, 64, 128, 128), backend, store)

    assert_same_bits(shuffled, tuple(part[order] for part in straight))
    assert_same_bits(half, tuple(part[64:192] for part in straight))
