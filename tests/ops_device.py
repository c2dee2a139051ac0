"""Running a call on the device's kernels: on a GPU, or emulated on the CPU."""

import contextlib
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from strata_jax.ops.case_inputs import Call
from strata_jax.ops.case_matrices import Matrix
from strata_jax.ops.native import Backend
from strata_jax.ops.roles import EXPERT_ROLES, Role
from strata_jax.ops.sets import native_ops
from strata_jax.weights.panels import EXPERT_PARTS, matrix_bytes

_ON_HOST = (Role.NGRAM_TABLE,)


@contextlib.contextmanager
def emulating(
    backend: Backend, capability: int = 8, order: int = 0, multiprocessors: int = 4
) -> Iterator[None]:
    """An emulated device of a capability's major number, its threads in some order; a real one as it is.

    Capability 8 has matrix units of warps, 9 of groups of warps. `order` as `set_order` takes it.
    """
    if backend.name != "emulated":
        yield
        return
    library = backend.library
    library.set_capability(capability)
    library.set_order(order)
    library.set_multiprocessors(multiprocessors)
    try:
        yield
    finally:
        library.set_capability(8)
        library.set_order(0)
        library.set_multiprocessors(4)


class Held(Protocol):
    """A store and its table, by their numbers in the library's registry."""

    @property
    def slot(self) -> int: ...

    @property
    def table(self) -> int: ...


class DeviceStore:
    """A device's store with the matrices of a call; every other expert lies in the host's memory."""

    def __init__(self, backend: Backend, matrices: Mapping[Role, Matrix]):
        library = backend.library
        fixed = {
            role: m
            for role, m in matrices.items()
            if role not in EXPERT_ROLES and role not in _ON_HOST
        }
        size = sum(m.count * matrix_bytes(m.type_id, m.rows, m.cols) for m in fixed.values())
        experts = [matrices[role] for role in EXPERT_PARTS if role in matrices]
        slot = sum(matrix_bytes(m.type_id, m.rows, m.cols) for m in experts)
        count = experts[0].count if experts else 0
        half = slot * (-(-count // 2))
        self._native = library.DeviceStore(len(Role), 1, count, size, half, half)
        for role, m in fixed.items():
            address = m.data.ctypes.data
            self._native.put(role, 0, m.type_id, m.count, m.rows, m.cols, m.rows, address)
        if experts:
            self._put_experts(experts, slot)
        self._native.publish_experts()
        self._table: Any = None
        if Role.NGRAM_TABLE in matrices:
            m = matrices[Role.NGRAM_TABLE]
            self._table = library.DeviceTable(
                place="device",
                type=m.type_id,
                num_rows=m.rows,
                num_cols=m.cols,
                address=m.data.ctypes.data,
            )
            while self._table.load(1.0) < m.data.nbytes:
                pass

    def _put_experts(self, experts: list[Matrix], slot: int) -> None:
        gate, up, down = experts
        types = (gate.type_id, up.type_id, down.type_id)
        self._native.put_expert_shape(0, types, gate.rows, gate.cols)
        for expert in range(gate.count):
            raw = tuple(m.data.ctypes.data + m.data.nbytes // m.count * expert for m in experts)
            self._native.put_expert(0, expert, expert % 2 == 0, expert // 2 * slot, raw)

    @property
    def slot(self) -> int:
        return self._native.slot

    @property
    def table(self) -> int:
        return -1 if self._table is None else self._table.slot

    def usage(self) -> list[int]:
        return self._native.take_usage()

    def close(self) -> None:
        self._native.close()
        if self._table is not None:
            self._table.close()


@contextlib.contextmanager
def host_read_table(
    backend: Backend, matrix: Matrix, folder: Path, mode: str, *, most_rows: int
) -> Iterator[int]:
    """Slot of a table in a file that a thread of the host reads for the device."""
    path = folder / "table"
    path.write_bytes(matrix.data.tobytes())
    table = backend.library.NgramTable(
        mode=mode,
        type=matrix.type_id,
        num_rows=matrix.rows,
        num_cols=matrix.cols,
        address=matrix.data.ctypes.data,
        path=str(path),
        offset=0,
    )
    read = backend.library.DeviceTable.read_by_host(
        table=table.slot, most_rows=most_rows, timeout_ms=10_000
    )
    try:
        yield read.slot
        assert read.problem() == ""
    finally:
        read.close()
        table.close()


@contextlib.contextmanager
def device_store(backend: Backend, matrices: Mapping[Role, Matrix]) -> Iterator[DeviceStore]:
    store = DeviceStore(backend, matrices)
    try:
        yield store
    finally:
        store.close()


@functools.lru_cache(maxsize=256)
def _program(
    backend: Backend, op: str, slot: int, table: int, attributes: tuple[tuple[str, Any], ...]
):
    ops = native_ops(slot, table=table, backend=backend)
    return jax.jit(functools.partial(getattr(ops, op), **dict(attributes)))


def run_device(call: Call, backend: Backend, store: Held) -> tuple[np.ndarray, ...]:
    """The results of the device's op, copied."""
    # A workspace's size depends on the store's matrices, so a program belongs to one store.
    _program.cache_clear()
    program = _program(backend, call.op, store.slot, store.table, tuple(call.attributes.items()))
    return tuple(np.array(leaf) for leaf in jax.tree.leaves(program(*call.operands)))


def on_device(call: Call, backend: Backend) -> tuple[np.ndarray, ...]:
    """`run_device` with a store of the call's own."""
    with device_store(backend, call.matrices) as store:
        return run_device(call, backend, store)
