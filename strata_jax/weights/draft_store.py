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
from strata_jax.weights.draft_layer import DraftLayer, draft_matrices, store_bytes
from strata_jax.weights.matrices import MatrixAt
from strata_jax.weights.panels import EXPERT_PARTS, expert_slot_bytes
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
