"""Hyper-connections: reading a block's input from the residual streams and writing its output back."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from strata_jax.config import ModelConfig
from strata_jax.model.params import MixerParams
from strata_jax.ops.roles import Role
from strata_jax.ops.sets import OpSet


def grouped_norm(
    x: Float32[Array, "T J D"], weight: Float32[Array, "J D"], eps: float
) -> Float32[Array, "T J D"]:
    """RMS norm within each stream, times gamma. Source: model.md, section 1."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def read(
    ops: OpSet,
    config: ModelConfig,
    params: MixerParams,
    streams: Float32[Array, "T J D"],
    live: Int32[Array, ""],
    *,
    layer: int,
    down: tuple[Role, ...],
    up: Role,
) -> tuple[Float32[Array, "T D"], Float32[Array, "T J"]]:
    """A block's input, and how strongly its output goes to each stream.

    Args:
        ops: the op set.
        config: sizes.
        params: gamma of the mixer's norm.
        streams: the residual streams.
        live: rows that count.
        layer: whose matrices.
        down: role of the down projection and, for a block, of the inject matrix after it.
        up: role of the up projection.

    Returns:
        the input, and beta (no columns without an inject matrix: the final mixer).

    Source: model.md, section 2.
    """
    T, J, D = streams.shape
    normed = grouped_norm(streams, params.norm, config.eps)
    columns = config.low_rank + (J if len(down) > 1 else 0)
    mixed = ops.quant_matmul(
        normed.reshape(T, J * D), live, layer=layer, roles=down, num_columns=columns
    )
    a, inject = jnp.split(mixed, [config.low_rank], axis=1)
    gates = ops.quant_matmul(
        jax.nn.silu(a / J), live, layer=layer, roles=(up,), num_columns=J * D
    )
    x = jnp.mean(jax.nn.sigmoid(gates).reshape(T, J, D) * normed, axis=1)
    return x, 2.0 * jax.nn.sigmoid(inject / J)


def write(
    streams: Float32[Array, "T J D"], y: Float32[Array, "T D"], beta: Float32[Array, "T J"]
) -> Float32[Array, "T J D"]:
    """Adds a block's output to every stream. Source: model.md, section 2."""
    return streams + beta[:, :, None] * y[:, None, :]
