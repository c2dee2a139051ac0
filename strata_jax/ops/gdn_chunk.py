"""The gated delta rule over blocks of rows at once: the same function as `gdn_window`, as matrix products.

Plain jnp; on the CPU the native row-by-row op is faster (EXPERIMENTS.md), so tiles of the plain op set use
this form and its equality to the recurrence is a test.
"""

import jax
import jax.numpy as jnp

from strata_jax.ops.gdn_window import gated_norm_ref, gdn_inputs_ref

BLOCK = 64
"""Rows of one block: the grain on which tiles and checkpoints lie (numerics.md, contract C)."""


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


def gdn_chunk(
    proj, conv_weight, decay, dt_bias, norm_weight, conv_state, state, live, *, key_heads, eps
):
    """`gdn_window` for T a multiple of 64 rows; arguments and results are the same."""
    dim = state.shape[1]
    q, k, v, g, beta, z, new_conv_state = gdn_inputs_ref(
        proj, conv_weight, decay, dt_bias, conv_state, live, key_heads=key_heads, dim=dim
    )
    blocks = jax.tree.map(lambda x: x.reshape(-1, BLOCK, *x.shape[1:]), (q, k, v, g, beta))
    new_state, o = jax.lax.scan(_block, state, blocks)
    o = o.reshape(q.shape)
    return gated_norm_ref(o, z, norm_weight, live, eps=eps), new_conv_state, new_state
