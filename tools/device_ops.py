"""What bench_ops.py needs to run, check and time an op on a GPU.

Calls of an op are unrolled into one program, which XLA captures as one graph: no launch from the host is in
the figure. Weights would stay in the card's second-level cache from call to call: a program goes round copies of
them that no cache holds together, and round the experts.
"""

import functools
import math
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from strata_jax.ops.case_inputs import Call
from strata_jax.ops.case_matrices import Matrix
from strata_jax.ops.cases import IN_PLACE_ROWS, STATES
from strata_jax.ops.native import Backend
from strata_jax.ops.roles import EXPERT_ROLES, Role
from strata_jax.ops.sets import native_ops
from strata_jax.weights.panels import EXPERT_PARTS, matrix_bytes

CALLS = 24
RUNS = 8
"""Of the program, one behind the other: while the device works the host has the next one ready."""
LOOPS = 5
CACHE_BYTES = 192 << 20
"""More than any second-level cache."""
_COPY_BYTES = 2 << 30
_MATRIX_ROWS = 8192


class DeviceMatrices:
    """A device's store with several copies of a call's matrices, one a layer; experts are there once."""

    def __init__(self, backend: Backend, matrices: Mapping[Role, Matrix]):
        fixed = {
            role: m
            for role, m in matrices.items()
            if role not in EXPERT_ROLES and role is not Role.NGRAM_TABLE
        }
        experts = [matrices[role] for role in EXPERT_PARTS if role in matrices]
        size = sum(m.count * matrix_bytes(m.type_id, m.rows, m.cols) for m in fixed.values())
        self.copies = 1
        if size and not experts:
            self.copies = min(CALLS, math.ceil(CACHE_BYTES / size))
        slot = sum(matrix_bytes(m.type_id, m.rows, m.cols) for m in experts)
        count = experts[0].count if experts else 0
        self._native = backend.library.DeviceStore(
            len(Role), self.copies, count, self.copies * size, count * slot, 0
        )
        for layer in range(self.copies):
            for role, m in fixed.items():
                address = m.data.ctypes.data
                self._native.put(role, layer, m.type_id, m.count, m.rows, m.cols, m.rows, address)
        if experts:
            gate, up, down = experts
            types = (gate.type_id, up.type_id, down.type_id)
            self._native.put_expert_shape(0, types, gate.rows, gate.cols)
            for e in range(count):
                raw = tuple(m.data.ctypes.data + m.data.nbytes // count * e for m in experts)
                self._native.put_expert(0, e, True, e * slot, raw)
        self._native.publish_experts()
        self._table = _open_table(backend, matrices.get(Role.NGRAM_TABLE))
        slot_of_table = -1 if self._table is None else self._table.slot
        self.ops = native_ops(self._native.slot, table=slot_of_table, backend=backend)
        """The op set over the store."""

    def close(self) -> None:
        """Frees the device's memory."""
        self._native.close()
        if self._table is not None:
            self._table.close()


def _open_table(backend: Backend, m: Matrix | None) -> Any:
    if m is None:
        return None
    table = backend.library.DeviceTable(
        place="device",
        type=m.type_id,
        num_rows=m.rows,
        num_cols=m.cols,
        address=m.data.ctypes.data,
    )
    while table.load(1.0) < m.data.nbytes:
        pass
    return table


def _once(call: Call, held: DeviceMatrices, turn: int, operands: list[Any]) -> tuple[Any, ...]:
    """Results of the call with the matrices whose turn it is."""
    attributes = dict(call.attributes)
    if "layer" in attributes:
        attributes["layer"] = turn % held.copies
    return getattr(held.ops, call.op)(*operands, **attributes)


def _own_operands(call: Call) -> list[dict[int, Any]]:
    """Of each call of a program: the first operand, copied, for the compiler would make equal calls once;
    and other experts, so that these do not stay in the cache."""
    own = [{0: jnp.array(call.operands[0], copy=True)} for _ in range(CALLS)]
    if call.op == "expert_ffn":
        count = next(m.count for role, m in call.matrices.items() if role in EXPERT_ROLES)
        for turn, operands in enumerate(own):
            operands[1] = jnp.array((call.operands[1] + 41 * turn) % count)
    return own


def seconds_on_device(call: Call, held: DeviceMatrices) -> float:
    """Seconds of one call in a graph of `CALLS` that runs `RUNS` times, the best of five such loops."""
    in_place = STATES.get(call.op, {}) | IN_PLACE_ROWS.get(call.op, {})

    def program(state, own, operands):
        ends = []
        for turn in range(CALLS):
            filled = [own[turn].get(i, operand) for i, operand in enumerate(operands)]
            for place, value in zip(in_place, state):
                filled[place] = value
            results = jax.tree.leaves(_once(call, held, turn, filled))
            state = [results[place] for place in in_place.values()]
            # All are results of the program: nothing is left out, and no kernel is added.
            ends += [leaf for i, leaf in enumerate(results) if i not in in_place.values()]
        return ends, state

    compiled = jax.jit(program, donate_argnums=0)
    operands = jax.device_put(call.operands)
    own = _own_operands(call)
    state = [jnp.array(call.operands[place], copy=True) for place in in_place]
    ends, best = [], math.inf
    for loop in range(LOOPS + 3):  # the first run compiles, the second and third may capture
        jax.block_until_ready(state)
        begin = time.perf_counter()
        for _ in range(RUNS):
            ends, state = compiled(state, own, operands)
        jax.block_until_ready(ends)
        if loop >= 3:
            best = min(best, time.perf_counter() - begin)
    return best / CALLS / RUNS


@functools.cache
def device_peaks() -> tuple[float, float]:
    """Bytes a second of a copy (read and written), and multiply-adds a second of bfloat16 products."""
    ones = jnp.ones(_COPY_BYTES // 8, jnp.float32)
    square = jnp.ones((_MATRIX_ROWS, _MATRIX_ROWS), jnp.bfloat16)
    copy = jax.jit(lambda x: x + 1)
    product = jax.jit(lambda a: a @ a)
    rates = []
    for run, amount in (
        (lambda: copy(ones), _COPY_BYTES),
        (lambda: product(square), _MATRIX_ROWS**3),
    ):
        best = math.inf
        for _ in range(LOOPS + 1):
            begin = time.perf_counter()
            jax.block_until_ready([run() for _ in range(8)])
            best = min(best, (time.perf_counter() - begin) / 8)
        rates.append(amount / best)
    return rates[0], rates[1]


def results_on_device(call: Call, held: DeviceMatrices) -> list[np.ndarray]:
    """The results, copied."""
    program = jax.jit(lambda operands: _once(call, held, 0, list(operands)))
    return [np.array(leaf) for leaf in jax.tree.leaves(program(call.operands))]
