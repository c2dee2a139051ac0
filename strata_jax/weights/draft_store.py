"""The draft layer's matrices where the native ops read them: a store of its own, filled once.

The experts of the tiers never include the draft layer's: those are all in the primary's memory and stay
there, so a draft waits for nobody and nothing it does counts as use.
"""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from strata_jax import _native
from strata_jax.errors import CapacityError
from strata_jax.ops.native import Backend
from strata_jax.ops.roles import EXPERT_ROLES, Role
from strata_jax.weights.draft_layer import DraftLayer
from strata_jax.weights.matrices import MatrixAt, matrix_at
from strata_jax.weights.panels import EXPERT_PARTS, expert_slot_bytes, matrix_bytes
from strata_jax.weights.placement import Tier


class DraftStore(Protocol):
    """What holds a slot in the native registry until it is closed."""

    @property
    def slot(self) -> int:
        """Number in the registry, an attribute of the compiled programs."""
        ...

    def close(self) -> None:
        """Frees it; after the last step that used it."""
        ...


def head_matrix(draft: DraftLayer, head_ids: np.ndarray) -> tuple[MatrixAt, np.ndarray]:
    """The rows `head_ids` of the head that the drafter uses, copied.

    Returns:
        the matrix, and the bytes that it lies in: keep them as long as it.
    """
    pack, name = draft.pack, draft.prefix + "nextn.shared_head_head.weight"
    if not draft.has(Role.OUTPUT):
        pack = draft.trunk
        name = "output.weight" if pack.has("output.weight") else "token_embd.weight"
    whole = matrix_at(pack, Role.OUTPUT, 0, name)
    rows = pack.view(name).reshape(whole.rows, -1)[head_ids]
    return MatrixAt(
        role=Role.OUTPUT,
        layer=0,
        type=whole.type,
        count=1,
        rows=len(head_ids),
        cols=whole.cols,
        stride=len(head_ids),
        address=rows.ctypes.data,
        num_bytes=rows.nbytes,
    ), rows


def draft_matrices(
    draft: DraftLayer, head_ids: np.ndarray | None
) -> tuple[list[MatrixAt], np.ndarray | None]:
    """All matrices of a draft layer's store, and the bytes of those that are no part of a file."""
    matrices, rows = list(draft.matrices()), None
    if head_ids is not None:
        matrices = [m for m in matrices if m.role is not Role.OUTPUT]
        head, rows = head_matrix(draft, head_ids)
        matrices.append(head)
    return matrices, rows


def store_bytes(matrices: list[MatrixAt]) -> tuple[int, int]:
    """Bytes of a device that the matrices and the experts take."""
    fixed = [m for m in matrices if m.role not in EXPERT_ROLES]
    count = max((m.count for m in matrices), default=0)
    return (
        sum(m.count * matrix_bytes(m.type, m.rows, m.cols) for m in fixed),
        count * expert_slot_bytes(matrices, 0),
    )


def open_draft_store(
    draft: DraftLayer,
    head_ids: np.ndarray | None,
    backend: Backend,
    report: Callable[[str], None],
) -> DraftStore:
    """Fills a store: addresses into the files on the CPU, copies on a device.

    Args:
        draft: the layer; open as long as the store.
        head_ids: rows of the head that the drafter scores; None = all.
        backend: whose ops read it.
        report: takes lines on progress.

    Raises:
        CapacityError: if a device's memory is not to be had.
    """
    matrices, rows = draft_matrices(draft, head_ids)
    if backend.is_device:
        return _device_store(matrices, backend, report)
    store = _native.WeightStore(len(Role), 1)
    for m in matrices:
        store.put(
            m.role, m.layer, m.type, m.count, m.rows, m.cols, m.stride, m.address, m.num_bytes
        )
    return _HostStore(store, rows)


class _HostStore:
    """A store of addresses, with the copied rows that some of them point to."""

    def __init__(self, store: _native.WeightStore, rows: np.ndarray | None):
        self._store = store
        self._rows = rows

    @property
    def slot(self) -> int:
        return self._store.slot

    def close(self) -> None:
        self._store.close()
        self._rows = None


def _device_store(matrices: list[MatrixAt], backend: Backend, report: Callable[[str], None]) -> Any:
    by_role = {m.role: m for m in matrices}
    parts = [by_role[role] for role in EXPERT_PARTS]
    experts, slot = parts[0].count, expert_slot_bytes(matrices, 0)
    matrix_arena, expert_arena = store_bytes(matrices)
    report(f"copying the draft layer: {(matrix_arena + expert_arena) >> 20} MiB")
    native = None
    try:
        native = backend.library.DeviceStore(len(Role), 1, experts, matrix_arena, expert_arena, 0)
        for m in matrices:
            if m.role not in EXPERT_ROLES:
                native.put(m.role, m.layer, m.type, m.count, m.rows, m.cols, m.stride, m.address)
        gate = parts[0]
        native.put_expert_shape(0, tuple(m.type for m in parts), gate.rows, gate.cols)
        for expert in range(experts):
            addresses = tuple(m.address_of(expert) for m in parts)
            native.put_expert(0, expert, Tier.PRIMARY, expert * slot, addresses)
        native.publish_experts()  # all is in place: the copied rows of the head may go
    except BaseException as error:
        if native is not None:
            native.close()
        if isinstance(error, RuntimeError):
            raise CapacityError(f"draft layer: {error}; --mtp=off leaves it out") from None
        raise
    return native
