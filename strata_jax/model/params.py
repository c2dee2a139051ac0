"""The model's vectors: everything that is an operand of the compiled programs.

Matrices are not here: the native store knows where they lie (`ops/roles.py`).
"""

from jaxtyping import Array, Float32, Int32

from strata_jax.types import pytree


@pytree
class MixerParams:
    """Vectors of one hyper-connection mixer."""

    norm: Float32[Array, "J D"]
    """Gamma of the grouped norm, as the file stores it (1 + w)."""


@pytree
class LinearParams:
    """Vectors of a gated-delta-net block."""

    conv_weight: Float32[Array, "K N"]
    decay: Float32[Array, " Vh"]
    """-exp(A_log), as the file stores it."""
    dt_bias: Float32[Array, " Vh"]
    norm: Float32[Array, " C"]


@pytree
class AttentionParams:
    """Vectors of a sparse-attention block."""

    q_norm: Float32[Array, " C"]
    k_norm: Float32[Array, " C"]
    index_q_norm: Float32[Array, " IC"]
    index_k_norm: Float32[Array, " IC"]
    inv_freq: Float32[Array, " R/2"]


@pytree
class NgramParams:
    """Vectors of the n-gram embedding's gate."""

    norm_key: Float32[Array, "J D"]
    norm_query: Float32[Array, "J D"]
    norm_conv: Float32[Array, "J D"]
    conv_weight: Float32[Array, "K J*D"]


@pytree
class LayerParams:
    """One layer."""

    attn_mixer: MixerParams
    ffn_mixer: MixerParams
    mixer: LinearParams | AttentionParams


@pytree
class Params:
    """The whole model."""

    layers: tuple[LayerParams, ...]
    ngram: NgramParams | None
    output_mixer: MixerParams


@pytree
class DraftParams:
    """The draft layer."""

    token_norm: Float32[Array, " D"]
    hidden_norm: Float32[Array, "J D"]
    layer: LayerParams
    output_mixer: MixerParams
    head_ids: Int32[Array, " V"] | None
    """The ids that the drafter scores, ascending; None = all."""
