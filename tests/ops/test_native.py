import subprocess
import sys
import threading

import numpy as np
import pytest

from strata_jax import _native
from strata_jax.ops.cases import CASES
from strata_jax.ops.native import CPU
from strata_jax.ops.roles import Role
from tests.ops_maker import (
    OP_ERRORS,
    THREADS,
    assert_same_bits,
    guarded_store,
    native,
    run_native,
    threads,
)
from tests.ops_rules import base_call, base_results

Q8_0, NUM_LAYERS = 8, 3


def put(store, **changes):
    """Two rows of 64 values in a place of a store."""
    data = np.zeros(2 * 68, np.uint8)
    arguments = {
        "role": Role.ATTN_Q,
        "layer": 1,
        "type": Q8_0,
        "count": 1,
        "rows": 2,
        "cols": 64,
        "stride": 2,
        "address": data.ctypes.data,
        "num_bytes": data.nbytes,
    }
    store.put(**{**arguments, **changes})


class TestTargets:
    def test_carry_the_version_of_the_library(self):
        # XLA's persistent cache does not see the library: an old program must not meet a new op.
        assert CPU.target("quant_matmul") == f"strata.quant_matmul.v{_native.TARGET_VERSION}"

    def test_exist_for_every_op_with_cases(self):
        # The native set's tiles run gdn_window, its router is two ops, and nobody reads rows for it.
        assert set(_native.targets()) == set(CASES) - {"gdn_chunk", "route", "ngram_ask"}

    def test_are_registered_once(self):
        assert CPU.target("router_topk") == CPU.target("router_topk")


class TestStore:
    def test_takes_the_lowest_free_slot(self):
        # A slot is part of compiled programs: every process must count alike.
        stores = [_native.WeightStore(1, 1) for _ in range(3)]
        slots = [store.slot for store in stores]
        stores[1].close()
        again = _native.WeightStore(1, 1)

        assert slots == sorted(slots)  # other tests of the process may hold some in between
        assert again.slot == slots[1]

        for store in (*stores, again):
            store.close()

    def test_closes_twice_without_harm_to_others(self):
        first = _native.WeightStore(1, 1)
        first.close()
        second = _native.WeightStore(1, 1)
        first.close()

        third = _native.WeightStore(1, 1)
        assert third.slot != second.slot

        second.close()
        third.close()

    def test_frees_its_slot_when_it_is_forgotten(self):
        store = _native.WeightStore(1, 1)
        slot = store.slot
        del store

        again = _native.WeightStore(1, 1)
        assert again.slot == slot
        again.close()

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"type": 40}, "weight_store: type 40 is unknown"),
            ({"type": -1}, "weight_store: type -1 is unknown"),
            (
                {"role": len(Role)},
                rf"role {len(Role)}, layer 1 outside \[0, {len(Role)}\) x \[0, 3",
            ),
            ({"role": -1}, "role -1, layer 1 outside"),
            ({"layer": NUM_LAYERS}, "role 18, layer 3 outside"),
            ({"layer": -1}, "role 18, layer -1 outside"),
            ({"cols": 48}, "a matrix of 1 x 2 x 48, expected whole blocks of 32 values"),
            ({"cols": 0}, "a matrix of 1 x 2 x 0, expected"),
            ({"rows": 0}, "a matrix of 1 x 0 x 64, expected"),
            ({"count": -1}, "a matrix of -1 x 2 x 64, expected"),
            ({"num_bytes": 135}, "135 bytes, expected 136"),
            ({"count": 2}, "136 bytes, expected 272"),
            ({"stride": 1}, "a stride of 1 rows, expected at least 2"),
            (
                {"count": 2**40, "rows": 2**40, "stride": 2**40},
                r"136 bytes, expected less than 2\^63",
            ),
            ({"cols": 2**62}, r"136 bytes, expected less than 2\^63"),
        ],
    )
    def test_refuses_what_does_not_fit(self, change, message):
        store = _native.WeightStore(len(Role), NUM_LAYERS)
        with pytest.raises(ValueError, match=message):
            put(store, **change)
        put(store)
        store.close()

    @pytest.mark.parametrize("sizes", [(0, 1), (1, 0), (-1, 3), (3, -1), (2**62, 2**62)])
    def test_refuses_sizes_that_are_none(self, sizes):
        with pytest.raises(ValueError, match=r"weight_store: .* roles and .* layers"):
            _native.WeightStore(*sizes)

    def test_serves_calls_that_are_under_way_when_it_closes(self):
        # A call holds the store; the slot only stops new calls.
        call = base_call("router_topk")
        store = _native.WeightStore(1, 1)
        store.close()

        assert_same_bits(run_native(call, store.slot), base_results("router_topk"))


class TestKernels:
    def test_are_chosen_by_name(self):
        try:
            assert _native.select_kernels("scalar")
            assert _native.kernels() == "scalar"
        finally:
            assert _native.select_kernels("auto")
        assert _native.cpu_runs(_native.kernels())

    def test_refuse_an_unknown_name_and_stay(self):
        before = _native.kernels()

        assert not _native.select_kernels("sse9")
        assert not _native.cpu_runs("sse9")
        assert _native.kernels() == before


class TestThreads:
    @pytest.mark.parametrize("count", THREADS)
    def test_are_as_many_as_asked_for(self, count):
        with threads(count):
            assert _native.num_threads() == count

    @pytest.mark.parametrize("count", [0, -1, -(2**31)])
    def test_are_one_at_least(self, count):
        with threads(count):
            assert _native.num_threads() == 1

    def test_finish_many_short_jobs_from_several_callers(self):
        # More threads than cores, jobs shorter than a wake-up: what a lost wake-up would hang.
        call = base_call("embed_rows")
        failures = []

        def work():
            for _ in range(200):
                got = run_native(call, store.slot)
                if not np.array_equal(got[0], expected[0]):
                    failures.append(1)

        expected = native(call)
        with guarded_store(call.matrices) as store, threads(5):
            workers = [threading.Thread(target=work) for _ in range(3)]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join(timeout=60)

        assert not any(worker.is_alive() for worker in workers)
        assert failures == []

    def test_let_the_process_end_while_they_sleep(self):
        script = "from strata_jax import _native as n; n.set_threads(4)"

        done = subprocess.run([sys.executable, "-c", script], timeout=60)

        assert done.returncode == 0


@pytest.mark.parametrize("op", sorted(set(CASES) - {"gdn_chunk", "ngram_ask"}))
def test_names_the_op_where_operands_have_other_axes(op):
    call = base_call(op)
    first = call.operands[0]

    with pytest.raises((*OP_ERRORS, TypeError, IndexError)):
        native(
            type(call)(
                op=op,
                operands=(first[None], *call.operands[1:]),
                attributes=call.attributes,
                matrices=call.matrices,
                macs=0,
                num_bytes=0,
            )
        )
