"""Sizes of matrices in a device's layout: panels of 32 rows (`ffi/cuda/panels.h`).

The bytes are those of the file, permuted; only what pads a segment of 256 values to whole words of four
bytes, and a last panel to 32 rows, comes on top.
"""

from strata_jax.ops.roles import Role
from strata_jax.weights.gguf_types import LAYOUTS, GgmlType
from strata_jax.weights.matrices import MatrixAt

PANEL_ROWS, SEGMENT = 32, 256
ALIGNMENT = 256
"""Bytes; matrices begin at multiples of it."""
EXPERT_PARTS = (Role.FFN_GATE_EXPS, Role.FFN_UP_EXPS, Role.FFN_DOWN_EXPS)
"""In the order in which they lie in a slot."""


def matrix_bytes(type_id: int, rows: int, cols: int) -> int:
    """Bytes of one matrix [rows, cols] as panels, aligned."""
    kind = LAYOUTS[GgmlType(type_id)]

    def unit(values: int) -> int:
        size = values // kind.block_elems * kind.block_bytes
        return -(-size // 4) * 4 * PANEL_ROWS

    whole, tail = divmod(cols, SEGMENT)
    panel = whole * unit(SEGMENT) + (unit(tail) if tail else 0)
    return -(-(-(-rows // PANEL_ROWS) * panel) // ALIGNMENT) * ALIGNMENT


def expert_slot_bytes(matrices: list[MatrixAt], layer: int) -> int:
    """Bytes of a slot for one expert of a layer."""
    parts = [m for m in matrices if m.layer == layer and m.role in EXPERT_PARTS]
    return sum(matrix_bytes(m.type, m.rows, m.cols) for m in parts)
