"""How many kernels of ours a layer of a window is on a device; XLA's own fusions come on top."""

import dataclasses
import importlib
import importlib.util

import pytest

from strata_jax.cli.files import embedded_model
from strata_jax.ops.case_inputs import make_call
from strata_jax.ops.cases import CASES, EMBEDDED, POSITIONED
from strata_jax.ops.native import Backend
from strata_jax.ops.sets import OpSet
from strata_jax.weights.pack import open_pack
from tests.ops_device import device_store, run_device
from tests.stepper import Stepper

MOST = {"linear": 10, "attention": 14}
"""Attention: reads 4, products 2, cells 1, selection 2, attention 2, router 1, experts 2."""
READ = "hyper_read"


def launches(op: str) -> int:
    """Kernels of one call with one row, far into a context."""
    position = 1003 if op in POSITIONED else 0
    case = dataclasses.replace(CASES[op][0], rows=1, position=position, kv="fp16")
    call, backend = make_call(op, case), Backend("emulated")
    library = importlib.import_module("strata_jax._native_emulated")
    with device_store(backend, call.matrices) as store:
        run_device(call, backend, store)
        before = library.launches()
        run_device(call, backend, store)
    return library.launches() - before


def calls_of_layers(pack) -> list[list[str]]:
    """The ops of every layer, in order; a layer begins with the first of its two reads."""
    called: list[str] = []

    def named(name, op):
        def run(*args, **settings):
            called.append(name)
            return op(*args, **settings)

        return run

    def recorded(ops: OpSet) -> OpSet:
        fields = [field.name for field in dataclasses.fields(ops)]
        return OpSet(**{name: named(name, getattr(ops, name)) for name in fields})

    stepper = Stepper(pack, wrap=recorded)
    stepper.step(stepper.empty(), [5], 0, width=8)
    reads = [place for place, name in enumerate(called) if name == READ]
    starts = reads[0 : 2 * EMBEDDED.num_layers : 2]
    return [called[a:b] for a, b in zip(starts, [*starts[1:], reads[-1]])]


@pytest.mark.skipif(
    not importlib.util.find_spec("strata_jax._native_emulated"),
    reason="LOUD SKIP: this build has no emulated library, so no kernel was counted",
)
def test_a_layer_is_no_more_kernels_than_that():
    with open_pack(embedded_model()) as pack:
        layers = calls_of_layers(pack)
    cost = {op: launches(op) for op in {name for layer in layers for name in layer}}

    assert len(layers) == EMBEDDED.num_layers
    for kind, calls in zip(EMBEDDED.layer_kinds, layers):
        # The n-gram rows come before a layer's first read.
        if "ngram_rows" not in calls:
            assert sum(cost[op] for op in calls) <= MOST[kind], (cost, calls)
