"""Matrices for the cases of `cases.py`: random GGUF blocks with sane values, and a store of them."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from strata_jax import _native
from strata_jax.config import ModelConfig
from strata_jax.ops.cases import Case
from strata_jax.ops.roles import EXPERT_ROLES, Role
from strata_jax.ops.unpack_ref import dequantize_ref, layout_of

_SCALES_AT = {
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}
"""Bytes where a block's float16 scales lie, for types that do not start with their only one."""

_POOL_BLOCKS = 1 << 17


@dataclasses.dataclass(frozen=True, kw_only=True)
class Matrix:
    """`count` matrices [rows, cols] of GGUF blocks, one after the other."""

    type_id: int
    count: int
    rows: int
    cols: int
    data: np.ndarray
    """uint8, contiguous."""

    def values(self) -> np.ndarray:
        """Float32 [rows, cols], or [count, rows, cols] for more than one."""
        flat = dequantize_ref(self.type_id, self.data, self.count * self.rows, self.cols)
        return flat if self.count == 1 else flat.reshape(self.count, self.rows, self.cols)


def open_store(matrices: Mapping[Role, Matrix]) -> _native.WeightStore:
    """A native store that points at the matrices; they must stay alive until it is closed."""
    store = _native.WeightStore(len(Role), 1)
    for role, m in matrices.items():
        address, num_bytes = m.data.ctypes.data, m.data.nbytes
        store.put(role, 0, m.type_id, m.count, m.rows, m.cols, m.rows, address, num_bytes)
    return store


def random_rows(
    type_id: int, num_rows: int, num_cols: int, rng: np.random.Generator, rms: float = 0.05
) -> np.ndarray:
    """Rows of a GGUF type whose values have about the given root mean square, as uint8 bytes."""
    layout = layout_of(type_id)
    if layout.form == "float":
        noise = rng.standard_normal((num_rows, num_cols), np.float32) * np.float32(rms)
        if layout.name == "BF16":
            return (noise.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(-1)
        return (
            noise.astype(np.float16 if layout.name == "F16" else np.float32).view(np.uint8).ravel()
        )
    num_blocks = num_rows * num_cols // layout.block_values
    # Large matrices repeat a pool of blocks: speed does not depend on what they say.
    pool = rng.integers(0, 256, (min(num_blocks, _POOL_BLOCKS), layout.block_bytes), np.uint8)
    _set_scales(layout.name, pool, np.ones(len(pool)))
    values = dequantize_ref(type_id, pool[:256], len(pool[:256]), layout.block_values)
    scale = rms / np.sqrt(np.mean(values.astype(np.float64) ** 2))
    _set_scales(layout.name, pool, scale * rng.uniform(0.5, 1.5, len(pool)))
    return np.resize(pool, (num_blocks, layout.block_bytes)).reshape(-1)


def _set_scales(name: str, blocks: np.ndarray, scales: np.ndarray) -> None:
    """Writes each block's scale where its type keeps it."""
    halves = scales.astype(np.float16).view(np.uint16)
    if name == "MXFP4":  # a power of two, 2^(byte - 127)
        blocks[:, 0] = np.rint(np.log2(scales)) + 127
    elif name == "IQ1_M":  # a nibble at the top of each of the four last words
        for word in range(4):
            nibble = (halves >> (4 * word)) & 15
            blocks[:, 49 + 2 * word] = (blocks[:, 49 + 2 * word] & 15) | (nibble << 4)
    else:
        for at in _SCALES_AT.get(name, (0,)):
            blocks[:, at : at + 2] = halves.view(np.uint8).reshape(-1, 2)


def matrix_shape(config: ModelConfig, role: Role) -> tuple[int, int]:
    """Rows and columns of a role's matrix, those of one expert for a stack."""
    c, wide = config, config.num_streams * config.hidden
    values = c.gdn_value_heads * c.gdn_head_dim
    queries, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    shapes = {
        Role.TOKEN_EMBD: (c.vocab_size, c.hidden),
        Role.OUTPUT: (c.vocab_size, c.hidden),
        Role.HC_ATTN_DOWN: (c.low_rank, wide),
        Role.HC_ATTN_INJECT: (c.num_streams, wide),
        Role.HC_ATTN_UP: (wide, c.low_rank),
        Role.ATTN_QKV: (2 * c.gdn_key_heads * c.gdn_head_dim + values, c.hidden),
        Role.ATTN_GATE: (values, c.hidden),
        Role.SSM_ALPHA: (c.gdn_value_heads, c.hidden),
        Role.SSM_BETA: (c.gdn_value_heads, c.hidden),
        Role.SSM_OUT: (c.hidden, values),
        Role.ATTN_Q: (2 * queries, c.hidden),
        Role.ATTN_K: (keys, c.hidden),
        Role.ATTN_V: (keys, c.hidden),
        Role.INDEXER_Q: (c.index_heads * c.index_dim, c.hidden),
        Role.INDEXER_K: (c.index_dim, c.hidden),
        Role.FFN_ROUTER: (c.num_experts, c.hidden),
        Role.FFN_SHARED_ROUTER: (1, c.hidden),
        Role.FFN_GATE_EXPS: (c.expert_width, c.hidden),
        Role.FFN_UP_EXPS: (c.expert_width, c.hidden),
        Role.FFN_DOWN_EXPS: (c.hidden, c.expert_width),
        Role.FFN_GATE_SHARED: (c.shared_width, c.hidden),
        Role.FFN_UP_SHARED: (c.shared_width, c.hidden),
        Role.FFN_DOWN_SHARED: (c.hidden, c.shared_width),
    }
    if config.ngram is not None:
        shapes[Role.NGRAM_TABLE] = (config.ngram.num_rows, config.ngram.row_width)
    return shapes[role]


def make_matrix(case: Case, role: Role, rng: np.random.Generator) -> Matrix:
    """A matrix, or a stack of experts, of the role's shape and the case's type."""
    rows, cols = matrix_shape(case.config, role)
    count = case.config.num_experts if role in EXPERT_ROLES else 1
    type_id = case.type_of(role)
    data = random_rows(type_id, count * rows, cols, rng)
    return Matrix(type_id=type_id, count=count, rows=rows, cols=cols, data=data)
