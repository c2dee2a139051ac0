"""The gated delta rule over chunks of rows at once: the same function as `gdn_window`, as matrix products.

Native on devices only, `ffi/cuda/ops/gdn_chunk.h`: on the CPU the row-by-row op is faster (EXPERIMENTS.md),
so tiles run that there. The plain form serves the plain op set, and its equality to the recurrence is a test.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

from strata_jax.ops.gdn_window import gated_norm_ref, gdn_inputs_ref, gdn_window
from strata_jax.ops.native import CPU, Backend

BLOCK = 64
"""Rows of one block: the grain on which tiles and checkpoints lie (numerics.md, contract C)."""


def gdn_chunk(
    proj: Float32[Array, "T P"],
    conv_weight: Float32[Array, "K N"],
    decay: Float32[Array, " Vh"],
    dt_bias: Float32[Array, " Vh"],
    norm_weight: Float32[Array, " C"],
    conv_state: Float32[Array, "K-1 N"],
    state: Float32[Array, "Vh C C"],
    live: Int32[Array, ""],
    *,
    key_heads: int,
    eps: float,
    backend: Backend = CPU,
) -> tuple[Float32[Array, "T Vh*C"], Float32[Array, "K-1 N"], Float32[Array, "Vh C C"]]:
    """`gdn_window` for a tile: T is a multiple of 64, and so is row 0's position.

    Arguments and results are those of `gdn_window`, but no row of a tile is a draft. Dead rows change no bit of the others, and a tile
    may begin at any multiple of 64 rows: its bits are those of one that began earlier.

    Source: Yang et al. 2024, "Gated Delta Networks"; model.md, section 3, chunk form.
    """
    value_heads, dim, _ = state.shape
    if not backend.is_device:
        vectors, states = (conv_weight, decay, dt_bias, norm_weight), (conv_state, state)
        none = jnp.zeros((0, conv_weight.shape[1] + 2 * value_heads), jnp.float32)
        numbers = (none, jnp.int32(0), live, live)
        by_row = gdn_window(proj, *vectors, *states, *numbers, key_heads=key_heads, eps=eps)
        return by_row[:3]
    out = (
        jax.ShapeDtypeStruct((proj.shape[0], value_heads * dim), jnp.float32),
        jax.ShapeDtypeStruct(conv_state.shape, jnp.float32),
        jax.ShapeDtypeStruct(state.shape, jnp.float32),
    )
    workspace = backend.workspace("gdn_chunk", proj.shape[0], key_heads, value_heads, dim)
    call = backend.call("gdn_chunk", out, workspace=workspace, aliases={5: 1, 6: 2})
    y, new_conv_state, new_state = call(
        proj,
        conv_weight,
        decay,
        dt_bias,
        norm_weight,
        conv_state,
        state,
        live,
        key_heads=np.int64(key_heads),
        eps=np.float32(eps),
    )
    return y, new_conv_state, new_state


def _block(S, rows):
    """One block [BLOCK, Vh, C] from state S [Vh, C, C]; source: model.md, section 3, chunk form."""
    q, k, v, g, beta = (jnp.moveaxis(x, 1, 0) for x in rows)  # [Vh, BLOCK, ...]
    c = jnp.cumsum(g, axis=-1)
    lower = jnp.tril(jnp.ones((BLOCK, BLOCK), bool))
    # Masked before exp: above the diagonal the difference is positive and may overflow.
    L = jnp.where(lower, jnp.exp(jnp.where(lower, c[:, :, None] - c[:, None, :], 0.0)), 0.0)
    kb = beta[..., None] * k
    A = jnp.tril(kb @ jnp.swapaxes(k, 1, 2) * L, -1) + jnp.eye(BLOCK)
    right = jnp.concatenate([beta[..., None] * v, jnp.exp(c)[..., None] * kb], axis=-1)
    U, W = jnp.split(
        jax.scipy.linalg.solve_triangular(A, right, lower=True, unit_diagonal=True), 2, axis=-1
    )
    new_v = U - W @ S
    o = (jnp.exp(c)[..., None] * q) @ S + (q @ jnp.swapaxes(k, 1, 2) * L) @ new_v
    last = c[:, -1:, None]
    S = jnp.exp(last) * S + jnp.swapaxes(jnp.exp(last - c[..., None]) * k, 1, 2) @ new_v
    return S, jnp.moveaxis(o, 0, 1)


def gdn_chunk_ref(
    proj, conv_weight, decay, dt_bias, norm_weight, conv_state, state, live, *, key_heads, eps
):
    """`gdn_window_ref` for T a multiple of 64 rows; arguments and results are the same."""
    dim = state.shape[1]
    q, k, v, g, beta, z, new_conv_state = gdn_inputs_ref(
        proj, conv_weight, decay, dt_bias, conv_state, live, key_heads=key_heads, dim=dim
    )
    blocks = jax.tree.map(lambda x: x.reshape(-1, BLOCK, *x.shape[1:]), (q, k, v, g, beta))
    new_state, o = jax.lax.scan(_block, state, blocks)
    o = o.reshape(q.shape)
    return gated_norm_ref(o, z, norm_weight, live, eps=eps), new_conv_state, new_state
