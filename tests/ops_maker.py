"""What the op tests share: running a call on either op set, and the rules every native op must keep.

Weights lie at the end of a page with an unreadable one behind it, so that a kernel that reads past a
matrix ends the test run instead of passing by luck.
"""

import contextlib
import ctypes
import dataclasses
import functools
import mmap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from strata_jax import _native
from strata_jax.ops.case_inputs import Call
from strata_jax.ops.case_matrices import Matrix
from strata_jax.ops.cases import CASES, ROW_OPERANDS, TOLERANCES, Case
from strata_jax.ops.roles import Role
from strata_jax.ops.sets import native_ops, plain_ops

KERNELS = [name for name in ("scalar", "avx2", "avx512") if _native.cpu_runs(name)]
THREADS = (1, 2, 3, 5)
WIDTHS = (1, 2, 3, 8, 64)
OP_ERRORS = (ValueError, jax.errors.JaxRuntimeError)
"""What an op's refusal arrives as: JAX makes XLA's INVALID_ARGUMENT a ValueError where it can."""

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
_LIBC.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class GuardedStore:
    """A native weight store whose matrices end where readable memory ends."""

    def __init__(self, matrices: Mapping[Role, Matrix]):
        self._store = _native.WeightStore(len(Role), 1)
        self._table: _native.NgramTable | None = None
        self._mappings: list[tuple[int, int]] = []
        for role, matrix in matrices.items():
            self.put(role, matrix)

    @property
    def slot(self) -> int:
        return self._store.slot

    @property
    def table(self) -> int:
        """Slot of the n-gram table; -1 without one."""
        return -1 if self._table is None else self._table.slot

    def put(self, role: Role, matrix: Matrix) -> int:
        """Copies a matrix in; returns where it lies."""
        address = self._copy(matrix.data)
        self.put_at(role, matrix, matrix.rows, address, matrix.data.nbytes)
        if role is Role.NGRAM_TABLE:
            self._table = mapped_table(matrix.type_id, matrix.rows, matrix.cols, address)
        return address

    def put_at(self, role: Role, matrix: Matrix, stride: int, address: int, num_bytes: int) -> None:
        """A matrix inside bytes that `put` did not copy."""
        shape = (matrix.count, matrix.rows, matrix.cols, stride)
        self._store.put(role, 0, matrix.type_id, *shape, address, num_bytes)

    def _copy(self, data: np.ndarray) -> int:
        pages = -(-data.nbytes // mmap.PAGESIZE)
        size = (pages + 1) * mmap.PAGESIZE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        base = _LIBC.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
        assert base not in (None, ctypes.c_void_p(-1).value)
        guard = base + pages * mmap.PAGESIZE
        address = guard - data.nbytes
        ctypes.memmove(address, np.ascontiguousarray(data).ctypes.data, data.nbytes)
        assert _LIBC.mprotect(guard, mmap.PAGESIZE, 0) == 0
        self._mappings.append((base, size))
        return address

    def close(self) -> None:
        self._store.close()
        if self._table is not None:
            self._table.close()
        for base, size in self._mappings:
            _LIBC.munmap(base, size)
        self._mappings.clear()


def mapped_table(type_id: int, rows: int, cols: int, address: int) -> _native.NgramTable:
    """An n-gram table in memory that is no file's."""
    return _native.NgramTable(
        mode="mmap", type=type_id, num_rows=rows, num_cols=cols, address=address, path="", offset=0
    )


@contextlib.contextmanager
def guarded_store(matrices: Mapping[Role, Matrix]) -> Iterator[GuardedStore]:
    store = GuardedStore(matrices)
    try:
        yield store
    finally:
        store.close()


@contextlib.contextmanager
def kernels(name: str) -> Iterator[None]:
    assert _native.select_kernels(name)
    try:
        yield
    finally:
        _native.select_kernels("auto")


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    before = _native.num_threads()
    _native.set_threads(count)
    try:
        yield
    finally:
        _native.set_threads(before)


@contextlib.contextmanager
def flush_to_zero() -> Iterator[None]:
    """Sets this thread to flush subnormals, as XLA's own threads do.

    glibc's fenv_t on x86-64 is 28 bytes of x87 state, then MXCSR; bits 15 and 6 are FTZ and DAZ.
    """
    saved = (ctypes.c_uint8 * 32)()
    changed = (ctypes.c_uint8 * 32)()
    assert _LIBC.fegetenv(saved) == 0
    ctypes.memmove(changed, saved, 32)
    word = int.from_bytes(bytes(changed[28:32]), "little") | 0x8040
    changed[28:32] = list(word.to_bytes(4, "little"))
    assert _LIBC.fesetenv(changed) == 0
    try:
        yield
    finally:
        assert _LIBC.fesetenv(saved) == 0


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fills memory with 0xA5 when it is allocated: what an op does not write shows."""
    m_perturb = -6  # malloc.h
    # AddressSanitizer has an allocator of its own, and an option of its own for this.
    assert _LIBC.mallopt(m_perturb, 0x5A) == 1 or hasattr(_LIBC, "__asan_init")
    try:
        yield
    finally:
        _LIBC.mallopt(m_perturb, 0)


@functools.lru_cache(maxsize=256)
def _program(op: str, slot: int, table: int, attributes: tuple[tuple[str, Any], ...]):
    return jax.jit(
        functools.partial(getattr(native_ops(slot, table=table), op), **dict(attributes))
    )


def run_native(call: Call, slot: int, table: int = -1) -> tuple[np.ndarray, ...]:
    """The results of the native op, copied."""
    program = _program(call.op, slot, table, tuple(call.attributes.items()))
    return tuple(np.array(leaf) for leaf in jax.tree.leaves(program(*call.operands)))


@functools.lru_cache(maxsize=256)
def _plain_program(op: str, attributes: tuple[tuple[str, Any], ...]):
    def program(matrices, operands):
        return getattr(plain_ops(matrices), op)(*operands, **dict(attributes))

    return program if op == "ngram_rows" else jax.jit(program)  # its twin is numpy


def run_plain(call: Call) -> tuple[np.ndarray, ...]:
    """The results of the op's twin."""
    program = _plain_program(call.op, tuple(call.attributes.items()))
    matrices = {(role, 0): matrix.values() for role, matrix in call.matrices.items()}
    return tuple(np.array(leaf) for leaf in jax.tree.leaves(program(matrices, call.operands)))


def native(call: Call) -> tuple[np.ndarray, ...]:
    """`run_native` with a store of the call's own."""
    with guarded_store(call.matrices) as store:
        return run_native(call, store.slot, store.table)


def num_rows(call: Call) -> int:
    return len(call.operands[ROW_OPERANDS[call.op][0]])


def changed(call: Call, **operands: Any) -> Call:
    """The call with operands replaced by place: changed(call, _0=x, live=3)."""
    new = list(call.operands)
    for name, value in operands.items():
        place = {"live": len(new) - 1, "pos": len(new) - 2}.get(name)
        new[int(name[1:]) if place is None else place] = value
    return dataclasses.replace(call, operands=tuple(new))


def bits(values: np.ndarray) -> np.ndarray:
    """Bit patterns, every NaN as one: payloads are not promised."""
    if values.dtype != np.float32:
        return values
    return np.where(np.isnan(values), np.float32(np.nan), values).view(np.uint32)


def assert_same_bits(got: Sequence[np.ndarray], expected: Sequence[np.ndarray], what: str = ""):
    assert len(got) == len(expected)
    for place, (g, e) in enumerate(zip(got, expected)):
        np.testing.assert_array_equal(bits(g), bits(e), err_msg=f"result {place} {what}")


def assert_close(op: str, got: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> None:
    """Every result within the op's tolerance of its twin's."""
    assert len(got) == len(expected)
    for place, (g, e) in enumerate(zip(got, expected)):
        assert g.shape == e.shape
        assert g.dtype == e.dtype
        if e.dtype in (np.float16, np.int8):  # rounded: a last bit before may be a step here
            assert_a_step_apart(g, e)
            continue
        atol = TOLERANCES.get(op, 0.0) * np.abs(e).max(initial=0.0)
        np.testing.assert_allclose(g, e, rtol=0, atol=atol, err_msg=f"{op}: result {place}")


def assert_a_step_apart(got: np.ndarray, expected: np.ndarray) -> None:
    """Cells of a cache that agree but for the rounding of values that nearly do."""
    g, e = got.astype(np.float32), expected.astype(np.float32)
    rtol, atol = (0, 1) if expected.dtype == np.int8 else (2**-10, 2**-24)
    np.testing.assert_allclose(g, e, rtol=rtol, atol=atol)
    assert (g != e).mean() < 0.01


def small_cases(op: str) -> list[Case]:
    """The cases of the embedded model."""
    return [case for case in CASES[op] if case.name.startswith("embedded/")]
