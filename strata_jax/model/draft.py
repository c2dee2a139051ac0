"""The draft layer (MTP): from an id and the model's last residual to a guess at the id after next.

Row p stands for the token at position p and takes the residual of position p - 1; it predicts the token at
p + 1. The layer is one attention block with caches of its own. Source: gguf.md, "MTP".
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from strata_jax.config import HiddenNorm, ModelConfig
from strata_jax.model.moe import moe_block
from strata_jax.model.params import AttentionParams, DraftParams
from strata_jax.model.qsa import attention_block
from strata_jax.model.state import AttentionCells
from strata_jax.model.transformer import ATTN_MIXER, FFN_MIXER, OUTPUT_MIXER
from strata_jax.ops.roles import Role
from strata_jax.ops.sets import Op, OpSet

LAYER = 0
"""The draft layer is alone in its store."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftOps:
    """The ops of a draft layer: the embedding and the head may be the model's own."""

    layer: OpSet
    """Over the draft layer's matrices, at `LAYER`."""
    embed_rows: Op
    """(ids, live, *, width) -> [T, D]"""
    head: Op
    """(x, live) -> [T, V'], of the rows that `DraftParams.head_ids` names"""


def draft_streams(
    ops: DraftOps,
    config: ModelConfig,
    reading: HiddenNorm,
    params: DraftParams,
    ids: Int32[Array, " T"],
    hidden: Float32[Array, "T J D"],
    live: Int32[Array, ""],
) -> Float32[Array, "T J D"]:
    """The layer's residual streams: token and hidden state, normed and projected per stream.

    Mixing the streams before the projection instead leaves answers right and drafts useless (reports.md,
    74).
    """
    T, J, D = hidden.shape
    token = _rms(ops.embed_rows(ids, live, width=D), (1,), config.eps) * params.token_norm
    axes = (1, 2) if reading == "whole" else (2,)
    hidden = _rms(hidden, axes, config.eps) * params.hidden_norm
    both = jnp.concatenate([jnp.broadcast_to(token[:, None], hidden.shape), hidden], axis=2)
    flat = both.reshape(T * J, 2 * D)
    flat = ops.layer.quant_matmul(flat, live * J, layer=LAYER, roles=(Role.EH_PROJ,), num_columns=D)
    return flat.reshape(T, J, D)


def append_rows(
    ops: DraftOps,
    config: ModelConfig,
    params: DraftParams,
    cells: AttentionCells,
    streams: Float32[Array, "T J D"],
    origin: Int32[Array, ""],
    pos: Int32[Array, ""],
    live: Int32[Array, ""],
) -> AttentionCells:
    """Writes the rows' cells and nothing else: all that later rows want of a row that is known.

    There is one layer, so cells do not depend on what rows attend to: queries, attention and experts are
    left out. Arguments as those of `draft_rows`.
    """
    _, x, _ = _read(ops, config, params, streams, live)
    roles = (Role.ATTN_K, Role.ATTN_V)
    widths = [2 * config.num_kv_heads * config.head_dim]
    indexed = config.index_budget > 0
    if indexed:
        roles += (Role.INDEXER_K,)
        widths += [config.index_dim]
    new = ops.layer.quant_matmul(x, live, layer=LAYER, roles=roles, num_columns=sum(widths))
    index_heads = config.index_heads if indexed else 0
    queries = jnp.zeros((x.shape[0], 2 * config.num_heads * config.head_dim))
    index_queries = jnp.zeros((x.shape[0], index_heads * config.index_dim))
    proj = jnp.concatenate([queries, new[:, : widths[0]], index_queries, new[:, widths[0] :]], 1)
    mixer = params.layer.mixer
    assert isinstance(mixer, AttentionParams)
    names = ("keys", "values", "index_raw", "index_keys", "scales")
    _, _, *caches = ops.layer.qsa_append(
        proj,
        mixer.q_norm,
        mixer.k_norm,
        mixer.index_q_norm,
        mixer.index_k_norm,
        mixer.inv_freq,
        *(getattr(cells, name) for name in names),
        origin,
        pos,
        live,
        num_heads=config.num_heads,
        index_heads=index_heads,
        ratio=config.index_ratio if indexed else 0,
        eps=config.eps,
    )
    return AttentionCells(**dict(zip(names, caches, strict=True)))


def draft_rows(
    ops: DraftOps,
    config: ModelConfig,
    params: DraftParams,
    cells: AttentionCells,
    streams: Float32[Array, "T J D"],
    origin: Int32[Array, ""],
    pos: Int32[Array, ""],
    live: Int32[Array, ""],
) -> tuple[Float32[Array, "T V"], Float32[Array, "T J D"], AttentionCells]:
    """The whole layer.

    Args:
        ops: of the draft layer.
        config: sizes, those of the model.
        params: vectors.
        cells: the layer's own; updated in place.
        streams: of `draft_streams`.
        origin: position of cell 0, a multiple of the indexer's ratio.
        pos: cell of row 0; the row's position is `origin + pos`.
        live: rows that count.

    Returns:
        logits, the hidden state for the row after each, and the cells.
    """
    layer = params.layer
    assert isinstance(layer.mixer, AttentionParams)
    streams, x, beta = _read(ops, config, params, streams, live)
    y, cells = attention_block(
        ops.layer, config, layer.mixer, cells, x, pos, live, layer=LAYER, origin=origin
    )
    read = ops.layer.hyper_read
    norm, eps = layer.ffn_mixer.norm, config.eps
    streams, x, beta = read(streams, y, beta, norm, live, layer=LAYER, roles=FFN_MIXER, eps=eps)
    y = moe_block(ops.layer, config, x, live, layer=LAYER)
    norm = params.output_mixer.norm
    hidden, x, _ = read(streams, y, beta, norm, live, layer=LAYER, roles=OUTPUT_MIXER, eps=eps)
    return ops.head(x, live), hidden, cells


def best_drafts(
    logits: Float32[Array, "T V"], head_ids: Int32[Array, " V"] | None
) -> tuple[Int32[Array, " T"], Float32[Array, " T"]]:
    """The most probable id of each row, the lowest of equal ones, and its probability among the rows' ids."""
    best = jnp.argmax(logits, axis=1).astype(jnp.int32)
    largest = jnp.max(logits, axis=1, keepdims=True)
    probability = 1.0 / jnp.sum(jnp.exp(logits - largest), axis=1)
    return best if head_ids is None else head_ids[best], probability


def drop_oldest(cells: AttentionCells, count: int, ratio: int) -> AttentionCells:
    """The cells without the first `count`, a multiple of 16 blocks; those at the end hold no meaning."""

    def moved(leaf: jax.Array, by: int) -> jax.Array:
        return leaf if leaf.shape[0] == 1 else jnp.concatenate([leaf[by:], leaf[-by:]])

    return AttentionCells(
        keys=moved(cells.keys, count),
        values=moved(cells.values, count),
        index_raw=moved(cells.index_raw, count),
        index_keys=moved(cells.index_keys, count // (16 * ratio)),
        scales=moved(cells.scales, count),
    )


def _read(
    ops: DraftOps,
    config: ModelConfig,
    params: DraftParams,
    streams: Float32[Array, "T J D"],
    live: Int32[Array, ""],
) -> tuple[Float32[Array, "T J D"], Float32[Array, "T D"], Float32[Array, "T J"]]:
    """The streams, the attention block's input and the strength of its output."""
    T, J, D = streams.shape
    y, beta = jnp.zeros((T, D)), jnp.zeros((T, J))  # no block wrote before
    norm = params.layer.attn_mixer.norm
    return ops.layer.hyper_read(
        streams, y, beta, norm, live, layer=LAYER, roles=ATTN_MIXER, eps=config.eps
    )


def _rms(x: jax.Array, axes: tuple[int, ...], eps: float) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=axes, keepdims=True) + eps)
