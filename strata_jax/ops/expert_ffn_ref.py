"""The experts of a layer in numpy: the bits that the native `expert_ffn` and every tier must give.

Written to be read, not to be fast. Source: numerics.md, contract T.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from strata_jax.ops.numerics_ref import fma_rn, silu_mul_ref
from strata_jax.ops.quant_matmul_ref import quant_matmul_exact


class GgufStack(NamedTuple):
    """Matrices of one GGUF type and shape; the shared expert is a stack of one."""

    type_id: int
    rows: int
    data: np.ndarray
    """uint8 [count, bytes of one matrix]."""


def expert_ffn_exact(
    x: np.ndarray,
    ids: np.ndarray,
    weights: np.ndarray,
    shared_weights: np.ndarray,
    *,
    matrices: Sequence[GgufStack],
) -> np.ndarray:
    """Sums each row's experts in router order, then the shared one.

    Args:
        x: float32 [T, D].
        ids: int [T, A], experts in router order.
        weights: float32 [T, A].
        shared_weights: float32 [T].
        matrices: gate, up and down of the routed experts, then of the shared one; gate and up
            [F, D], down [D, F].

    Returns:
        float32 [T, D].
    """
    routed, shared = matrices[:3], matrices[3:]
    y = np.zeros_like(x, np.float32)
    rows = np.zeros((*ids.shape, x.shape[1]), np.float32)
    for expert in np.unique(ids):
        chosen = ids == expert  # rows of one expert together: their number changes no bit
        rows[chosen] = _expert_rows(x[np.nonzero(chosen)[0]], routed, expert)
    for place in range(ids.shape[1]):
        y = fma_rn(weights[:, place, None], rows[:, place], y)
    return fma_rn(shared_weights[:, None], _expert_rows(x, shared, 0), y)


def _expert_rows(x: np.ndarray, matrices: Sequence[GgufStack], expert: int) -> np.ndarray:
    """One expert's rows: down (silu(gate x) * (up x)), the hidden values quantised again."""
    gate, up, down = (
        (stack.type_id, np.ascontiguousarray(stack.data[expert]), stack.rows) for stack in matrices
    )
    hidden = silu_mul_ref(quant_matmul_exact(x, *gate), quant_matmul_exact(x, *up))
    return quant_matmul_exact(hidden, *down)
