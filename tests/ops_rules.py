"""The rules that hold for every native op (numerics.md, contracts T and W), as classes of tests to inherit.

class TestRules(RowRules):
    op = "quant_matmul"
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from strata_jax.config import KvType
from strata_jax.ops.case_inputs import Call, make_call
from strata_jax.ops.cases import CASES, IN_PLACE_ROWS, POSITIONED, ROW_OPERANDS, STATES
from strata_jax.ops.sets import native_ops
from tests.ops_maker import (
    KERNELS,
    OP_ERRORS,
    THREADS,
    WIDTHS,
    assert_same_bits,
    bits,
    changed,
    flush_to_zero,
    guarded_store,
    kernels,
    native,
    num_rows,
    poisoned_memory,
    run_native,
    threads,
)

ROWS = 64
POSITION = 1003
"""Past the indexer's budget and inside a block."""


@functools.lru_cache
def base_call(op: str, kv: KvType = "f32") -> Call:
    """64 rows at the embedded model's sizes."""
    case = dataclasses.replace(
        CASES[op][0], rows=ROWS, position=POSITION if op in POSITIONED else 0, kv=kv
    )
    return make_call(op, case, seed=7)


@functools.lru_cache
def base_results(op: str, kv: KvType = "f32") -> tuple[np.ndarray, ...]:
    return native(base_call(op, kv))


def poison(operand: np.ndarray, count: int) -> np.ndarray:
    """Rows that nobody may read: NaN, or ids outside any table."""
    fill = np.nan if operand.dtype == np.float32 else np.iinfo(np.int32).max
    return np.full((count, *operand.shape[1:]), fill, operand.dtype)


def with_rows(call: Call, begin: int, count: int, width: int) -> Call:
    """Rows begin..begin+count-1 of a call in a window of `width`, poisoned rows behind them."""
    new: dict[str, Any] = {"live": np.int32(count)}
    for place in ROW_OPERANDS[call.op]:
        x = call.operands[place]
        new[f"_{place}"] = np.concatenate([x[begin : begin + count], poison(x, width - count)])
    if call.op in POSITIONED:
        new["pos"] = np.int32(call.operands[-2] + begin)
    return changed(call, **new)


def run_in_windows(call: Call, width: int) -> tuple[np.ndarray, ...]:
    """The results of all rows, `width` at a time, each window from the state the last one left."""
    states = STATES.get(call.op, {})
    parts: list[list[np.ndarray]] = []
    with guarded_store(call.matrices) as store:
        for begin in range(0, num_rows(call), width):
            count = min(width, num_rows(call) - begin)
            results = run_native(with_rows(call, begin, count, width), store.slot, store.table)
            call = changed(call, **{f"_{place}": results[r] for place, r in states.items()})
            parts.append([r if i in states.values() else r[:count] for i, r in enumerate(results)])
    return tuple(
        column[-1] if i in states.values() else np.concatenate(column)
        for i, column in enumerate(zip(*parts))
    )


def replaced(x: np.ndarray, keep: slice, others: str) -> np.ndarray:
    """The operand with every row outside `keep` changed."""
    if x.dtype != np.float32:
        new = np.roll(x, 1, axis=0)  # other ids that exist
    elif others == "random":
        new = np.random.default_rng(1).standard_normal(x.shape).astype(np.float32) * 50
    else:
        new = np.full_like(x, {"zero": 0.0, "nan": np.nan, "inf": -np.inf}[others])
    new[keep] = x[keep]
    return new


def with_tiny_values(call: Call) -> Call:
    """Rows whose values, or products of them, are subnormal."""
    new = {}
    for place in ROW_OPERANDS[call.op]:
        x = call.operands[place]
        if x.dtype == np.float32:
            x = x.copy()
            x[0] *= np.float32(1e-38)
            x[1] *= np.float32(1e-20)
            if x.ndim > 1:
                x[2][..., ::2] *= np.float32(1e-41)
            x[3] *= np.float32(2.0**-98)
        new[f"_{place}"] = x
    return changed(call, **new)


class Rules:
    """What every op keeps."""

    op: str
    kv: KvType = "f32"
    later_rows_only = False
    """Whether a row depends on those before it."""

    @property
    def call(self) -> Call:
        return base_call(self.op, self.kv)

    @property
    def results(self) -> tuple[np.ndarray, ...]:
        return base_results(self.op, self.kv)

    @pytest.mark.parametrize("width", WIDTHS)
    def test_gives_a_row_the_same_bits_at_any_width(self, width):
        assert_same_bits(run_in_windows(self.call, width), self.results)

    @pytest.mark.parametrize("others", ["random", "zero", "nan", "inf"])
    @pytest.mark.parametrize("row", [0, 5, ROWS - 1])
    def test_gives_a_row_the_same_bits_whatever_the_others_hold(self, row, others):
        keep = slice(0 if self.later_rows_only else row, row + 1)
        new = {
            f"_{place}": replaced(self.call.operands[place], keep, others)
            for place in ROW_OPERANDS[self.op]
            if self.op != "qsa_attend" or place != 4  # blocks belong to their row's position
        }

        got = native(changed(self.call, **new))

        states = STATES.get(self.op, {}).values()
        for place, (g, e) in enumerate(zip(got, self.results)):
            if place not in states:
                np.testing.assert_array_equal(bits(g[keep]), bits(e[keep]))

    @pytest.mark.parametrize("live", [0, 1, 5, ROWS - 1])
    def test_neither_reads_nor_leaks_dead_rows(self, live):
        call = with_rows(self.call, 0, live, ROWS)
        in_place = {result: place for place, result in IN_PLACE_ROWS.get(self.op, {}).items()}
        states = {result: place for place, result in STATES.get(self.op, {}).items()}
        clean = native(with_rows(self.call, 0, live, live)) if live else None

        with poisoned_memory():
            got = native(call)

        for place, g in enumerate(got):
            if place in states:
                expected = clean[place] if clean else call.operands[states[place]]
                np.testing.assert_array_equal(bits(g), bits(expected))
                continue
            np.testing.assert_array_equal(bits(g[:live]), bits(self.results[place][:live]))
            dead = np.full_like(g[live:], -1 if self.op == "qsa_select" else 0)
            if place in in_place:
                dead = call.operands[in_place[place]][live:]
            np.testing.assert_array_equal(bits(g[live:]), bits(dead))

    @pytest.mark.parametrize("count", THREADS)
    @pytest.mark.parametrize("name", KERNELS)
    def test_does_not_depend_on_threads_or_kernels(self, name, count):
        with kernels(name), threads(count):
            assert_same_bits(native(self.call), self.results)

    def test_does_not_depend_on_the_callers_float_mode(self):
        call = with_tiny_values(self.call)
        expected = native(call)
        smallest = np.array([1, 0], np.uint32).view(np.float32)

        with flush_to_zero(), threads(3):  # threads inherit the mode
            flushed = bool(smallest[0] + smallest[1] == smallest[1])
            got = native(call)

        assert flushed
        assert_same_bits(got, expected)

    def test_does_not_depend_on_the_mode_of_xlas_threads(self):
        call = with_tiny_values(self.call)
        expected = native(call)

        with guarded_store(call.matrices) as store:
            op = functools.partial(
                getattr(native_ops(store.slot, table=store.table), self.op), **call.attributes
            )

            @jax.jit
            def program(operands, square):  # products of this size leave the caller's thread
                return op(*operands), square @ square @ square

            got, _ = program(call.operands, np.eye(512, dtype=np.float32))
            got = tuple(np.array(leaf) for leaf in jax.tree.leaves(got))

        assert_same_bits(got, expected)

    @pytest.mark.parametrize("live", [-1, ROWS + 1, 2**31 - 1, -(2**31)])
    def test_refuses_live_rows_that_are_not_there(self, live):
        where = "position" if self.op in POSITIONED else f"live rows of {ROWS}"
        with pytest.raises(OP_ERRORS, match=f"{native_name(self.op)}: .*{where}"):
            native(changed(self.call, live=np.int32(live)))


class RowRules(Rules):
    """Ops whose rows know nothing of each other."""

    @pytest.mark.parametrize("seed", [0, 1])
    def test_does_not_depend_on_the_order_of_rows(self, seed):
        order = np.random.default_rng(seed).permutation(ROWS)
        new = {f"_{place}": self.call.operands[place][order] for place in ROW_OPERANDS[self.op]}

        got = native(changed(self.call, **new))

        assert_same_bits(got, [result[order] for result in self.results])


class InPlaceRules:
    """Ops that update operands in place."""

    op: str
    kv: KvType = "f32"

    @pytest.mark.parametrize("sharded", [False, True])
    def test_keeps_the_addresses_of_donated_state(self, sharded):
        call = base_call(self.op, self.kv)
        in_place = STATES.get(self.op, {}) | IN_PLACE_ROWS.get(self.op, {})
        options: dict[str, Any] = {}
        where = None
        if sharded:
            mesh = Mesh(np.asarray(jax.devices()[:1]), ("primary",))
            where = NamedSharding(mesh, PartitionSpec())
            options = {"in_shardings": (where,) * len(call.operands), "out_shardings": where}
        operands = [jax.device_put(jnp.array(x, copy=True), where) for x in call.operands]
        addresses = {place: operands[place].unsafe_buffer_pointer() for place in in_place}
        with guarded_store(call.matrices) as store:
            op = functools.partial(
                getattr(native_ops(store.slot, table=store.table), self.op), **call.attributes
            )
            program = jax.jit(op, donate_argnums=tuple(in_place), **options)

            results = jax.tree.leaves(jax.block_until_ready(program(*operands)))

        for place, result in in_place.items():
            assert operands[place].is_deleted()
            assert results[result].unsafe_buffer_pointer() == addresses[place]
        assert_same_bits([np.array(r) for r in results], base_results(self.op, self.kv))

    def test_leaves_state_alone_that_was_not_donated(self):
        call = base_call(self.op, self.kv)
        before = [np.array(x) for x in call.operands]

        native(call)

        assert_same_bits([np.array(x) for x in call.operands], before)


def native_name(op: str) -> str:
    """The op that does the work: tiles of the native set run `gdn_window`."""
    return "gdn_window" if op == "gdn_chunk" else op
