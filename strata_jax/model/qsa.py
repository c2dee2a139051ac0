"""The token mixer of attention layers: sparse attention over blocks that an indexer selects."""

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from strata_jax.config import ModelConfig
from strata_jax.model.params import AttentionParams
from strata_jax.model.state import AttentionCells
from strata_jax.ops.roles import Role
from strata_jax.ops.sets import OpSet

PROJECTIONS = (Role.ATTN_Q, Role.ATTN_K, Role.ATTN_V)
INDEXER = (Role.INDEXER_Q, Role.INDEXER_K)


def attention_block(
    ops: OpSet,
    config: ModelConfig,
    params: AttentionParams,
    cells: AttentionCells,
    x: Float32[Array, "T D"],
    pos: Int32[Array, ""],
    live: Int32[Array, ""],
    *,
    layer: int,
    origin: Int32[Array, ""] | int = 0,
) -> tuple[Float32[Array, "T D"], AttentionCells]:
    """One block; dense where the file has no indexer budget. Source: model.md, sections 4 and 5.

    Args:
        ops: the op set.
        config: sizes.
        params: the block's vectors.
        cells: updated in place.
        x: what the mixer read.
        pos: cell of row 0.
        live: rows that count.
        layer: whose matrices.
        origin: position of cell 0, a multiple of the indexer's ratio.
    """
    indexed = config.index_budget > 0
    index_heads = config.index_heads if indexed else 0
    ratio = config.index_ratio if indexed else 0
    columns = 2 * (config.num_heads + config.num_kv_heads) * config.head_dim
    columns += (index_heads + 1) * config.index_dim if indexed else 0
    roles = PROJECTIONS + (INDEXER if indexed else ())
    proj = ops.quant_matmul(x, live, layer=layer, roles=roles, num_columns=columns)
    q, index_q, *new = ops.qsa_append(
        proj,
        params.q_norm,
        params.k_norm,
        params.index_q_norm,
        params.index_k_norm,
        params.inv_freq,
        cells.keys,
        cells.values,
        cells.index_raw,
        cells.index_keys,
        cells.scales,
        jnp.asarray(origin, jnp.int32),
        pos,
        live,
        num_heads=config.num_heads,
        index_heads=index_heads,
        ratio=ratio,
        eps=config.eps,
    )
    names = ("keys", "values", "index_raw", "index_keys", "scales")
    cells = AttentionCells(**dict(zip(names, new, strict=True)))
    if indexed:
        # A budget past the cache is dense attention: no list is longer than the cache.
        num_blocks = min(config.index_budget, cells.keys.shape[0]) // ratio
        blocks = ops.qsa_select(
            index_q, cells.index_keys, pos, live, ratio=ratio, num_blocks=num_blocks
        )
    else:
        blocks = jnp.full((x.shape[0], 1), -1, jnp.int32)
    y = ops.qsa_attend(
        q, proj, cells.keys, cells.values, blocks, cells.scales, pos, live, ratio=ratio
    )
    y = ops.quant_matmul(y, live, layer=layer, roles=(Role.ATTN_OUTPUT,), num_columns=config.hidden)
    return y, cells
