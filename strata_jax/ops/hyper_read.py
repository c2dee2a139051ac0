"""Residual streams: a block's write and the next block's read. Native side: `ffi/ops/hyper_read.h`."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

from strata_jax.ops.native import CPU, Backend, int64s
from strata_jax.ops.roles import Role


def hyper_read(
    streams: Float32[Array, "T J D"],
    y: Float32[Array, "T D"],
    beta: Float32[Array, "T J"],
    norm: Float32[Array, "J D"],
    live: Int32[Array, ""],
    *,
    store: int,
    layer: int,
    roles: tuple[Role, Role | None, Role],
    eps: float,
    backend: Backend = CPU,
) -> tuple[Float32[Array, "T J D"], Float32[Array, "T D"], Float32[Array, "T J"]]:
    """Adds beta * y to the streams, then reads a block's input from them.

    Args:
        streams: the residual streams; updated in place.
        y: output of the block before (zeros at the start).
        beta: how strongly it goes to each stream.
        norm: gamma of the grouped norm.
        live: rows that count; the others keep their streams and give zeros.
        store: slot of the native weight store.
        layer: whose matrices.
        roles: down, inject (None for the final mixer) and up.
        eps: of the norm.
        backend: whose kernels.

    Returns:
        the new streams, the block's input, and beta of its output (without inject: zero).

    Source: model.md, section 2.
    """
    out = (
        jax.ShapeDtypeStruct(streams.shape, jnp.float32),
        jax.ShapeDtypeStruct(y.shape, jnp.float32),
        jax.ShapeDtypeStruct(beta.shape, jnp.float32),
    )
    down, inject, up = roles
    numbers = int64s([down, -1 if inject is None else inject, up])
    T, J, _ = streams.shape
    workspace = backend.workspace("hyper_read", store, layer, down, T, J)
    new_streams, x, next_beta = backend.call(
        "hyper_read", out, workspace=workspace, aliases={0: 0}
    )(
        streams,
        y,
        beta,
        norm,
        live,
        store=np.int64(store),
        layer=np.int64(layer),
        roles=numbers,
        eps=np.float32(eps),
    )
    return new_streams, x, next_beta


def grouped_norm_ref(
    x: Float32[Array, "T J D"], weight: Float32[Array, "J D"], eps: float
) -> Float32[Array, "T J D"]:
    """RMS norm within each stream, times gamma. Source: model.md, section 1."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def hyper_read_ref(
    streams: Float32[Array, "T J D"],
    y: Float32[Array, "T D"],
    beta: Float32[Array, "T J"],
    norm: Float32[Array, "J D"],
    live: Int32[Array, ""],
    *,
    matrices: Sequence[Float32[Array, "N K"] | None],
    eps: float,
) -> tuple[Float32[Array, "T J D"], Float32[Array, "T D"], Float32[Array, "T J"]]:
    """What `hyper_read` approximates, on dequantised matrices (down, inject, up)."""
    down, inject, up = matrices
    assert down is not None
    assert up is not None
    T, J, D = streams.shape
    rows = jnp.arange(T)[:, None] < live
    streams = jnp.where(rows[:, :, None], streams + beta[:, :, None] * y[:, None, :], streams)
    normed = grouped_norm_ref(streams, norm, eps)
    flat = normed.reshape(T, J * D)
    gates = jax.nn.sigmoid(jax.nn.silu(flat @ down.T / J) @ up.T).reshape(T, J, D)
    x = jnp.mean(gates * normed, axis=1)
    next_beta = jnp.zeros((T, J)) if inject is None else 2.0 * jax.nn.sigmoid(flat @ inject.T / J)
    return streams, jnp.where(rows, x, 0.0), jnp.where(rows, next_beta, 0.0)
