"""The ring of slots that prompts stream the host's experts through (`ffi/cuda/expert_ring.h`): its size."""

from collections.abc import Iterable

import numpy as np

from strata_jax.errors import UsageError
from strata_jax.ops.roles import EXPERT_ROLES, Role
from strata_jax.weights.budget import StepSizes
from strata_jax.weights.gguf_types import GgmlType
from strata_jax.weights.matrices import MatrixAt

PATIENCE_MS = 2000
"""Without a copy that arrives: then a layer reads its experts over the link."""
_MEMORY_SHARE = 16
"""Auto takes at most this part of a GPU's memory."""
_MOST_GROUPS = 16
"""Of a layer's experts: with more, launches of few products would take longer than the copies."""
_STAGER_BUFFERS = 32
"""`ExpertStager::kBuffers` of ffi/cuda/expert_stager.h."""
_UNQUANTISED = {GgmlType.F32, GgmlType.F16, GgmlType.BF16}
_STREAMED = EXPERT_ROLES | {Role.FFN_GATE_SHARED, Role.FFN_UP_SHARED, Role.FFN_DOWN_SHARED}


def min_rows(steps: StepSizes) -> int:
    """Live rows from which on a program streams what is not resident: 32 of a GPU's tile, which has 64.

    Kernels that read experts over the link themselves get less out of it than the copy engine, which also
    leaves out what no row has chosen: 64 rows took 221 ms, streamed 150 ms, 512 rows 321 and 201.
    """
    return steps.tile_rows // 64


def can_stream(matrices: Iterable[MatrixAt]) -> bool:
    """Whether tiles go through matrix units: float experts are computed a few rows at a time."""
    return not any(m.role in _STREAMED and GgmlType(m.type) in _UNQUANTISED for m in matrices)


def ring_slots(asked: int | None, away: np.ndarray, slot_bytes: int, room_bytes: int) -> int:
    """Slots of the ring; 0 for none.

    Args:
        asked: by a flag; None = auto.
        away: bool [L, E], experts that no device holds.
        slot_bytes: of the largest expert.
        room_bytes: memory that auto may take.

    Raises:
        UsageError: for a ring that holds too little of a layer.
    """
    if asked == 0 or not away.any():
        return 0
    most, num_experts = int(away.sum(axis=1).max()), away.shape[1]
    least = least_slots(away)
    if asked is None:
        slots = min(2 * most, room_bytes // slot_bytes)
        return slots if slots >= least else 0
    if asked < least:
        raise UsageError(
            f"--prefill_ring={asked}: 0 or at least {least} slots expected for {most} of {num_experts} "
            "experts of a layer off the GPU"
        )
    return min(asked, max(2 * most, least))


def stager_bytes(ring_slots: int, slot_bytes: int) -> int:
    """Page-locked bytes for experts of the file on their way to the ring, if there is one.

    Args:
        ring_slots: of the ring.
        slot_bytes: of the largest expert.
    """
    return _STAGER_BUFFERS * slot_bytes if ring_slots else 0


def least_slots(away: np.ndarray) -> int:
    """Slots of the smallest ring for experts `away`, bool [L, E]."""
    most, num_experts = int(away.sum(axis=1).max()), away.shape[1]
    return 2 * min(most, -(-num_experts // _MOST_GROUPS))


def auto_room(memory_bytes: int | None, left_bytes: int | None) -> int:
    """Memory for a ring that nobody asked for: a part of what the GPU has, but no more than is left."""
    if memory_bytes is None:
        return 0
    room = memory_bytes // _MEMORY_SHARE
    return room if left_bytes is None else max(0, min(room, left_bytes))
