"""The device's kernels against the CPU's: contract T bit for bit, the dense part closely.

Without a GPU the same sources run emulated; with `-m gpu` they run where they belong.
"""

import dataclasses
import functools
import importlib.util
from typing import Any

import jax
import numpy as np
import pytest

from strata_jax.config import KvType
from strata_jax.ops.case_inputs import Call, make_call
from strata_jax.ops.case_matrices import make_matrix, random_rows
from strata_jax.ops.cases import CASES, EMBEDDED, POSITIONED, ROW_OPERANDS, STATES, Case
from strata_jax.ops.native import Backend
from strata_jax.ops.roles import Role
from strata_jax.ops.unpack_layouts_ref import LAYOUTS
from tests.ops_device import device_store, emulating, on_device, run_device
from tests.ops_drafts import ACCEPTANCES, count_rows, drafted, run_certain, run_windows
from tests.ops_maker import assert_a_step_apart, assert_same_bits, bits, changed, native
from tests.ops_rules import poison, with_rows

OPS = [op for op in CASES if op not in ("gdn_chunk", "ngram_ask")]
EXACT = {"quant_matmul", "expert_ffn", "embed_rows", "ngram_rows"}
"""Ops under contract T: the same bits on every device."""
CLOSE = {
    # The same sums in another order, and the other library's exp, cos and sin.
    "router_topk": 1e-6,
    "route": 1e-6,
    "hyper_read": 2e-3,  # a product rounds its input to int8 again
    "gdn_window": 2e-5,
    "ngram_gate": 5e-4,  # near z = 0 the gate's signed root makes 1e-6 a step of 1e-3
    "qsa_append": 2e-5,
    "qsa_select": 0.0,
    "qsa_attend": 2e-5,
}
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


def on_cpu(call: Call) -> tuple[np.ndarray, ...]:
    """What the CPU's own kernels give, wherever JAX would compute by default."""
    with jax.default_device(jax.devices("cpu")[0]):
        return native(call)


def small(op: str, rows: int, position: int | None = None, **changes: Any) -> Call:
    """A call at the embedded model's sizes, far enough into a context that blocks are selected."""
    at = position if position is not None else (1003 if op in POSITIONED else 0)
    case = dataclasses.replace(CASES[op][0], rows=rows, position=at, **changes)
    return make_call(op, case, seed=rows)


def assert_agrees(op: str, got: tuple[np.ndarray, ...], expected: tuple[np.ndarray, ...]) -> None:
    if op in EXACT:
        return assert_same_bits(got, expected)
    assert len(got) == len(expected)
    for place, (g, e) in enumerate(zip(got, expected)):
        if e.dtype in (np.float16, np.int8):
            assert_a_step_apart(g, e)
            continue
        if e.dtype != np.float32:
            np.testing.assert_array_equal(g, e, err_msg=f"result {place}")
            continue
        np.testing.assert_array_equal(np.isnan(g), np.isnan(e))
        largest = np.nanmax(np.abs(e), initial=0.0)
        np.testing.assert_allclose(g, e, rtol=0, atol=CLOSE[op] * largest, err_msg=str(place))


@pytest.mark.parametrize("rows", [1, 3, 8, 13])
@pytest.mark.parametrize("op", OPS)
def test_gives_what_the_cpu_gives(op: str, rows: int, backend: Backend):
    call = small(op, rows)

    assert_agrees(op, on_device(call, backend), on_cpu(call))


@pytest.mark.parametrize("op", OPS)
def test_leaves_dead_rows_alone_and_reads_none(op: str, backend: Backend):
    call = with_rows(small(op, 8), 0, 3, 8)

    assert_agrees(op, on_device(call, backend), on_cpu(call))


@pytest.mark.parametrize("kv", ["fp16", "int8"])
@pytest.mark.parametrize("op", ["qsa_append", "qsa_attend"])
def test_gives_what_the_cpu_gives_over_rounded_cells(op: str, kv: KvType, backend: Backend):
    call = with_rows(small(op, 13, kv=kv), 0, 9, 13)

    assert_agrees(op, on_device(call, backend), on_cpu(call))


@pytest.mark.parametrize("op", [op for op in OPS if op not in STATES and op not in POSITIONED])
def test_gives_a_row_the_same_bits_wherever_it_stands(op: str, backend: Backend):
    call = small(op, 8)
    places = ROW_OPERANDS[op]
    order = np.random.default_rng(3).permutation(8)
    moved = changed(call, **{f"_{place}": call.operands[place][order] for place in places})
    with device_store(backend, call.matrices) as store:
        straight = run_device(call, backend, store)
        shuffled = run_device(moved, backend, store)

    assert_same_bits(shuffled, tuple(part[order] for part in straight))


@pytest.mark.parametrize("kept", [{}, {"default_type": 30, "types": {}}])
@pytest.mark.parametrize("op", ["hyper_read", "quant_matmul"])
def test_gives_a_row_the_same_bits_in_blocks_of_its_own(op: str, kept, backend: Backend):
    """Which rows have where the card has a multiprocessor for each: 11 of 13 live, then all by themselves."""
    call = changed(small(op, 13, **kept), live=np.int32(11))
    with device_store(backend, call.matrices) as store:
        together = run_device(call, backend, store)
        with emulating(backend, multiprocessors=132):
            apart = run_device(call, backend, store)

    assert_same_bits(apart, together)
    assert_agrees(op, apart, on_cpu(call))


@pytest.mark.parametrize(
    ("op", "kv"),
    [(op, "f32") for op in OPS]
    + [(op, kv) for op in ("qsa_append", "qsa_attend") for kv in ("fp16", "int8")],
)
def test_gives_a_window_the_bits_of_its_rows_alone(op: str, kv: KvType, backend: Backend):
    """Contract W, states and caches included: one window of 5 rows, then five of one row."""
    call = small(op, 5, kv=kv)
    with device_store(backend, call.matrices) as store:
        together = run_device(call, backend, store)
        alone, step = [], call
        for row in range(5):
            step = one_row(step, call, row)
            alone.append(run_device(step, backend, store))
            step = carried(step, alone[-1])
    carriers = set(STATES.get(op, {}).values())
    for place, part in enumerate(together):
        if place in carriers:
            np.testing.assert_array_equal(bits(alone[-1][place]), bits(part), err_msg=str(place))
        else:
            rows = np.concatenate([each[place][:1] for each in alone])
            np.testing.assert_array_equal(bits(rows), bits(part), err_msg=str(place))


@pytest.mark.parametrize("windows", ACCEPTANCES)
@pytest.mark.parametrize("op", ["gdn_window", "ngram_gate"])
def test_leaves_what_certain_rows_leave_when_drafts_come_true(
    op: str, windows: list[tuple[int, int, int]], backend: Backend
):
    call = small(op, 8)
    with device_store(backend, call.matrices) as store:
        run = functools.partial(run_device, backend=backend, store=store)
        rows, states = run_windows(call, run, windows)
        expected, expected_states = run_certain(call, run, count_rows(windows))

    assert_same_bits((rows, *states), (expected, *expected_states))


@pytest.mark.parametrize("op", ["gdn_window", "ngram_gate"])
def test_keeps_drafts_as_the_cpu_does(op: str, backend: Backend):
    call = drafted(small(op, 8), 3, 2, 7)

    assert_agrees(op, on_device(call, backend), on_cpu(call))


def one_row(state: Call, call: Call, row: int) -> Call:
    """Row `row` of `call` alone in a window of as many, from the state that `state` carries."""
    new: dict[str, object] = {"live": np.int32(1)}
    for place in ROW_OPERANDS[call.op]:
        x = call.operands[place]
        new[f"_{place}"] = np.concatenate([x[row : row + 1], poison(x, len(x) - 1)])
    if call.op in POSITIONED:
        new["pos"] = np.int32(call.operands[-2] + row)
    return changed(state, **new)


def carried(call: Call, results: tuple[np.ndarray, ...]) -> Call:
    """The call with its state replaced by the results that carry it on."""
    states = STATES.get(call.op, {})
    return changed(call, **{f"_{operand}": results[place] for operand, place in states.items()})


def typed(
    op: str, roles: tuple[Role, ...], types: tuple[int, ...], config=EMBEDDED, rows: int = 3
) -> Call:
    case = Case(
        name="typed",
        origin="this test",
        config=config,
        types=dict(zip(roles, types)),
        default_type=8,
        rows=rows,
        roles=roles,
    )
    return make_call(op, case, seed=sum(types))


@pytest.mark.parametrize("type_id", LAYOUTS)
def test_multiplies_every_type_as_the_cpu_does(type_id: int, backend: Backend):
    call = typed("quant_matmul", (Role.ATTN_Q, Role.ATTN_K), (type_id, type_id))

    assert_same_bits(on_device(call, backend), on_cpu(call))


@pytest.mark.parametrize("type_id", [8, 20, 42, 2, 6, 39, 1])
def test_multiplies_rows_that_end_in_half_a_segment(type_id: int, backend: Backend):
    rng = np.random.default_rng(type_id)
    case = CASES["quant_matmul"][0]
    matrix = dataclasses.replace(
        make_matrix(case, Role.ATTN_QKV, rng),
        type_id=type_id,
        rows=45,
        cols=640,
        data=random_rows(type_id, 45, 640, rng),
    )
    call = Call(
        op="quant_matmul",
        operands=(rng.standard_normal((4, 640), np.float32), np.int32(4)),
        attributes={"layer": 0, "roles": (Role.ATTN_Q,), "num_columns": 45},
        matrices={Role.ATTN_Q: matrix},
        macs=0,
        num_bytes=0,
    )

    assert_same_bits(on_device(call, backend), on_cpu(call))


@pytest.mark.parametrize("live", [0, 1, 2, 3, 7, 8])
@pytest.mark.parametrize("cols", [512, 2560, 6144])
@pytest.mark.parametrize("types", [(8, 8, 30), (0, 14, 1), (20, 30, 20), (0, 1, 30), (8, 14, 0)])
def test_multiplies_windows_of_several_types_as_the_cpu_does(
    types: tuple[int, int, int], cols: int, live: int, backend: Backend
):
    """Long rows go in two groups; of a window's last group often no row is live."""
    rng = np.random.default_rng(live)
    case = CASES["quant_matmul"][0]
    roles = (Role.ATTN_Q, Role.ATTN_K, Role.ATTN_V)
    matrices = {
        role: dataclasses.replace(
            make_matrix(case, Role.ATTN_QKV, rng),
            type_id=type_id,
            rows=rows,
            cols=cols,
            data=random_rows(type_id, rows, cols, rng),
        )
        for role, type_id, rows in zip(roles, types, (167, 1, 70))
    }
    call = Call(
        op="quant_matmul",
        operands=(rng.standard_normal((8, cols), np.float32), np.int32(live)),
        attributes={"layer": 0, "roles": roles, "num_columns": 238},
        matrices=matrices,
        macs=0,
        num_bytes=0,
    )

    assert_same_bits(on_device(call, backend), on_cpu(call))


@pytest.mark.parametrize("type_id", [21, 8, 12, 14, 10, 0, 42])
def test_computes_experts_of_every_form_as_the_cpu_does(type_id: int, backend: Backend):
    roles = (Role.FFN_GATE_EXPS, Role.FFN_UP_EXPS, Role.FFN_DOWN_EXPS)
    call = typed("expert_ffn", roles, (type_id, 8, type_id))

    assert_same_bits(on_device(call, backend), on_cpu(call))


def test_counts_every_routed_entry_once(backend: Backend):
    call = small("expert_ffn", 6)
    with device_store(backend, call.matrices) as store:
        run_device(changed(call, live=np.int32(4)), backend, store)
        usage = store.usage()

    ids = call.operands[1][:4]
    assert usage == np.bincount(ids.ravel(), minlength=EMBEDDED.num_experts).tolist()
    assert set(np.asarray(usage).nonzero()[0] % 2) == {0, 1}, "both memories were to be read"


def test_passes_nan_on_as_the_cpu_does(backend: Backend):
    call = small("quant_matmul", 4)
    x = call.operands[0].copy()
    x[1, 5], x[2, 40] = np.nan, np.inf

    call = changed(call, _0=x)
    assert_same_bits(on_device(call, backend), on_cpu(call))


@pytest.mark.parametrize("types", [(30, 30, 30), (0, 0, 0), (30, 0, 30), (0, 30, 8), (8, 8, 8)])
@pytest.mark.parametrize(("hidden", "low_rank"), [(256, 64), (288, 352), (2592, 32)])
@pytest.mark.parametrize("live", [1, 8])
def test_mixes_streams_as_the_cpu_does(
    types: tuple[int, int, int], hidden: int, low_rank: int, live: int, backend: Backend
):
    """Sizes: whole segments of a stream each; segments across streams; more of them than 40."""
    roles = (Role.HC_ATTN_DOWN, Role.HC_ATTN_INJECT, Role.HC_ATTN_UP)
    config = dataclasses.replace(EMBEDDED, hidden=hidden, low_rank=low_rank)
    call = changed(typed("hyper_read", roles, types, config, rows=8), live=np.int32(live))
    with device_store(backend, call.matrices) as store:
        together = run_device(call, backend, store)
        alone = run_device(one_row(call, call, live - 1), backend, store)

    assert_agrees("hyper_read", together, on_cpu(call))
    assert_same_bits(
        tuple(part[:1] for part in alone), tuple(part[live - 1 : live] for part in together)
    )
