"""The hashed n-gram embedding, added to the residual streams before one layer."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from strata_jax.config import ModelConfig, NgramConfig
from strata_jax.model.params import NgramParams
from strata_jax.model.state import Drafts, NgramState
from strata_jax.ops.roles import Role
from strata_jax.ops.sets import OpSet


def contexts(
    ngram: NgramConfig, before: Int32[Array, " N-1"], ids: Int32[Array, " T"]
) -> Int32[Array, "T N"]:
    """Each row's token and those before it in its segment, newest first.

    An EOS closes its segment: it sees its predecessors itself, its successor sees EOS only.
    """
    T = ids.shape[0]
    history = jnp.concatenate([before, ids])
    places = [history[ngram.ngram_size - 1 - s :][:T] for s in range(ngram.ngram_size)]
    closed = jnp.zeros((T,), bool)
    for s in range(1, ngram.ngram_size):
        closed = closed | (places[s] == ngram.eos_id)
        places[s] = jnp.where(closed, ngram.eos_id, places[s])
    return jnp.stack(places, axis=1)


def tokens_before(
    ngram: NgramConfig, state: NgramState, drafts: Drafts | None
) -> Int32[Array, " N-1"]:
    """The tokens in front of a step's first row; drafts that were kept are among them."""
    kept = jnp.int32(0) if drafts is None else drafts.kept
    return jax.lax.dynamic_slice_in_dim(state.tokens, kept, ngram.ngram_size - 1)


def ngram_block(
    ops: OpSet,
    config: ModelConfig,
    params: NgramParams,
    state: NgramState,
    streams: Float32[Array, "T J D"],
    ids: Int32[Array, " T"],
    tokens: Int32[Array, "T N"],
    live: Int32[Array, ""],
    drafts: Drafts | None,
) -> tuple[Float32[Array, "T J D"], NgramState]:
    """The streams with the embedding added, and the state after the rows that are no drafts.

    `tokens` are the contexts of the ids, with which the host was asked for rows at the step's beginning.
    A tile has no drafts (`drafts` is None). Source: model.md, section 7.
    """
    ngram = config.ngram
    assert ngram is not None
    _, J, D = streams.shape
    kept, certain = (jnp.int32(0), live) if drafts is None else (drafts.kept, drafts.certain)
    num_drafts = state.pending.shape[0]
    before = tokens_before(ngram, state, drafts)
    e = ops.ngram_rows(tokens, streams, live, ngram=ngram)
    key_value = ops.quant_matmul(
        e,
        live,
        layer=ngram.layer,
        roles=(Role.PLE_KEY, Role.PLE_VALUE),
        num_columns=(J + 1) * D,
    )
    streams, conv, pending = ops.ngram_gate(
        key_value,
        params.norm_key,
        params.norm_query,
        params.norm_conv,
        params.conv_weight,
        streams,
        state.conv,
        state.pending,
        kept,
        certain,
        live,
        dilation=ngram.ngram_size,
        eps=config.eps,
    )
    # What stands behind the last draft is of no meaning.
    places = jnp.minimum(certain, live) + jnp.arange(before.shape[0] + num_drafts)
    last = jnp.concatenate([before, ids]).at[places].get(mode="clip")
    return streams, NgramState(tokens=last, conv=conv, pending=pending)
