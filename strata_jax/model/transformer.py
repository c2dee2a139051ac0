"""The whole model: ids in, residual streams and logits out."""

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from strata_jax.config import ModelConfig
from strata_jax.model.gdn import linear_block
from strata_jax.model.moe import moe_block
from strata_jax.model.ngram import contexts, ngram_block, tokens_before
from strata_jax.model.params import LinearParams, Params
from strata_jax.model.qsa import attention_block
from strata_jax.model.state import DecodeState, Drafts, RecurrentState
from strata_jax.ops.roles import Role
from strata_jax.ops.sets import OpSet

ATTN_MIXER = (Role.HC_ATTN_DOWN, Role.HC_ATTN_INJECT, Role.HC_ATTN_UP)
FFN_MIXER = (Role.HC_FFN_DOWN, Role.HC_FFN_INJECT, Role.HC_FFN_UP)
OUTPUT_MIXER = (Role.OUTPUT_HC_DOWN, None, Role.OUTPUT_HC_UP)


class Residual(NamedTuple):
    """The residual streams and the last block's write, which the next reader makes."""

    streams: Float32[Array, "T J D"]
    y: Float32[Array, "T D"]
    beta: Float32[Array, "T J"]

    def written(self) -> Float32[Array, "T J D"]:
        """The streams with that write made."""
        return self.streams + self.beta[:, :, None] * self.y[:, None, :]


def forward(
    ops: OpSet,
    config: ModelConfig,
    params: Params,
    state: DecodeState,
    ids: Int32[Array, " T"],
    pos: Int32[Array, ""],
    live: Int32[Array, ""],
    drafts: Drafts | None = None,
) -> tuple[Residual, DecodeState]:
    """Reads rows 0..live-1 at positions pos.. through every layer.

    Layers are unrolled: a layer is some ten native calls and a few fusions, and with a state leaf per layer
    every cache is updated in place.

    Args:
        ops: the op set.
        config: sizes.
        params: the model's vectors.
        state: donated.
        ids: tokens; those at and past `live` are not read.
        pos: position of row 0.
        live: rows that count.
        drafts: of a window; None for a tile, whose rows are all certain, as those before it were.

    Returns:
        the residual after the last layer (rows past `live` hold no meaning), and the new state.
    """
    ngram, tokens = state.recurrent.ngram, None
    if config.ngram is not None:
        assert ngram is not None
        tokens = contexts(config.ngram, tokens_before(config.ngram, ngram, drafts), ids)
        ids = ops.ngram_ask(ids, tokens, live, ngram=config.ngram)
    x = ops.embed_rows(ids, live, width=config.hidden)
    streams = jnp.repeat(x[:, None, :], config.num_streams, axis=1)
    y, beta = jnp.zeros_like(x), jnp.zeros((ids.shape[0], config.num_streams), jnp.float32)
    cells, linear = list(state.cells), list(state.recurrent.linear)
    num_attention = num_linear = 0
    for layer, layer_params in enumerate(params.layers):
        if config.ngram is not None and layer == config.ngram.layer:
            assert params.ngram is not None
            assert ngram is not None
            assert tokens is not None
            streams = Residual(streams, y, beta).written()
            y, beta = jnp.zeros_like(y), jnp.zeros_like(beta)
            streams, ngram = ngram_block(
                ops, config, params.ngram, ngram, streams, ids, tokens, live, drafts
            )
        read = functools.partial(ops.hyper_read, layer=layer, eps=config.eps)
        norm = layer_params.attn_mixer.norm
        streams, x, beta = read(streams, y, beta, norm, live, roles=ATTN_MIXER)
        mixer = layer_params.mixer
        if isinstance(mixer, LinearParams):
            y, linear[num_linear] = linear_block(
                ops, config, mixer, linear[num_linear], x, live, drafts, layer=layer
            )
            num_linear += 1
        else:
            y, cells[num_attention] = attention_block(
                ops, config, mixer, cells[num_attention], x, pos, live, layer=layer
            )
            num_attention += 1
        norm = layer_params.ffn_mixer.norm
        streams, x, beta = read(streams, y, beta, norm, live, roles=FFN_MIXER)
        y = moe_block(ops, config, x, live, layer=layer)
    recurrent = RecurrentState(linear=tuple(linear), ngram=ngram)
    return Residual(streams, y, beta), DecodeState(cells=tuple(cells), recurrent=recurrent)


def head(
    ops: OpSet,
    config: ModelConfig,
    params: Params,
    residual: Residual,
    live: Int32[Array, ""],
) -> Float32[Array, "T V"]:
    """Logits of the live rows; there is no other final norm. Source: model.md, section 2."""
    norm = params.output_mixer.norm
    _, x, _ = ops.hyper_read(*residual, norm, live, layer=0, roles=OUTPUT_MIXER, eps=config.eps)
    return ops.quant_matmul(x, live, layer=0, roles=(Role.OUTPUT,), num_columns=config.vocab_size)
