"""The hashed n-gram embedding, added to the residual streams before one layer."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from strata_jax.config import ModelConfig, NgramConfig
from strata_jax.model.hyper import grouped_norm
from strata_jax.model.params import NgramParams
from strata_jax.model.state import NgramState
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


def ngram_block(
    ops: OpSet,
    config: ModelConfig,
    params: NgramParams,
    state: NgramState,
    streams: Float32[Array, "T J D"],
    ids: Int32[Array, " T"],
    live: Int32[Array, ""],
) -> tuple[Float32[Array, "T J D"], NgramState]:
    """The streams with the embedding added, and the state after the live rows.

    Source: model.md, section 7.
    """
    ngram = config.ngram
    assert ngram is not None
    T, J, D = streams.shape
    e = ops.ngram_rows(contexts(ngram, state.tokens, ids), live, ngram=ngram)
    key_value = ops.quant_matmul(
        e,
        live,
        layer=ngram.layer,
        roles=(Role.PLE_KEY, Role.PLE_VALUE),
        num_columns=(J + 1) * D,
    )
    key = grouped_norm(key_value[:, : J * D].reshape(T, J, D), params.norm_key, config.eps)
    value = key_value[:, J * D :]
    query = grouped_norm(streams, params.norm_query, config.eps)
    s = jnp.sum(key * query, axis=-1) * D**-0.5  # [T, J]
    s = jnp.sign(s) * jnp.sqrt(jnp.maximum(jnp.abs(s), 1e-6))
    gated = jax.nn.sigmoid(s)[:, :, None] * value[:, None, :]  # [T, J, D]
    normed = grouped_norm(gated, params.norm_conv, config.eps).reshape(T, J * D)
    rows = jnp.arange(T)[:, None] < live
    inputs = jnp.concatenate([state.conv, jnp.where(rows, normed, 0.0)])
    step = ngram.ngram_size
    mixed = sum(params.conv_weight[j] * inputs[j * step : j * step + T] for j in range(ngram.conv_kernel))
    streams = streams + gated + jax.nn.silu(mixed).reshape(T, J, D)
    new_state = NgramState(
        tokens=jax.lax.dynamic_slice_in_dim(
            jnp.concatenate([state.tokens, ids]), live, state.tokens.shape[0]
        ),
        conv=jax.lax.dynamic_slice_in_dim(inputs, live, state.conv.shape[0]),
    )
    return streams, new_state
