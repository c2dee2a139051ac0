"""A gated-delta-net block between its projections. Native side: `ffi/ops/gdn_window.h`."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

from strata_jax.ops.native import CPU, Backend

UNIT_EPS = 1e-6
"""Inside the root of the q and k normalisation; fixed by the model, not its config."""


def gdn_window(
    proj: Float32[Array, "T P"],
    conv_weight: Float32[Array, "K N"],
    decay: Float32[Array, " Vh"],
    dt_bias: Float32[Array, " Vh"],
    norm_weight: Float32[Array, " C"],
    conv_state: Float32[Array, "K-1 N"],
    state: Float32[Array, "Vh C C"],
    pending: Float32[Array, "R N+2*Vh"],
    kept: Int32[Array, ""],
    certain: Int32[Array, ""],
    live: Int32[Array, ""],
    *,
    key_heads: int,
    eps: float,
    backend: Backend = CPU,
) -> tuple[
    Float32[Array, "T Vh*C"],
    Float32[Array, "K-1 N"],
    Float32[Array, "Vh C C"],
    Float32[Array, "R N+2*Vh"],
]:
    """Convolution, delta rule row after row, gated norm; the three states are updated in place.

    Rows from `certain` on are drafts. The states left behind are those after the certain rows; the next
    call first replays the `kept` drafts that came true from `pending`, with the bits that they would have
    left as certain rows.

    Args:
        proj: q|k|v channels (N = (2 Kh + Vh) C), then z (Vh C), alpha and beta (Vh each).
        conv_weight: taps of the causal convolution, the row itself last.
        decay: -exp(A_log) of each value head.
        dt_bias: added to alpha before softplus.
        norm_weight: of the gated norm, not zero-centred.
        conv_state: the K-1 inputs before row 0, oldest first.
        state: S of each value head, key index first.
        pending: inputs of the last call's drafts: their channels, alpha and beta.
        kept: how many of those, from the first on, came true.
        certain: rows that are no drafts, from the first on; `live` and more: all.
        live: rows that count; the others change nothing and give zeros.
        key_heads: Kh; value head n reads key head n mod Kh (order of GGUF files).
        eps: of the gated norm.
        backend: whose kernels.

    Source: Yang et al. 2024, "Gated Delta Networks", eq. 10; model.md, section 3.
    """
    value_heads, dim, _ = state.shape
    out = (
        jax.ShapeDtypeStruct((proj.shape[0], value_heads * dim), jnp.float32),
        jax.ShapeDtypeStruct(conv_state.shape, jnp.float32),
        jax.ShapeDtypeStruct(state.shape, jnp.float32),
        jax.ShapeDtypeStruct(pending.shape, jnp.float32),
    )
    call = backend.call("gdn_window", out, aliases={5: 1, 6: 2, 7: 3})
    y, new_conv_state, new_state, new_pending = call(
        proj,
        conv_weight,
        decay,
        dt_bias,
        norm_weight,
        conv_state,
        state,
        pending,
        kept,
        certain,
        live,
        key_heads=np.int64(key_heads),
        eps=np.float32(eps),
    )
    return y, new_conv_state, new_state, new_pending


def gdn_inputs_ref(proj, conv_weight, decay, dt_bias, conv_state, live, *, key_heads, dim):
    """The delta rule's inputs of each row, in plain jnp.

    Returns:
        q, k [T, Vh, C] normalised and repeated per value head, v [T, Vh, C], log decay g and beta
        [T, Vh], z [T, Vh, C], and the new conv state. Dead rows have k, v, beta and g zero: they leave
        the state alone.
    """
    T = proj.shape[0]
    taps, channels = conv_weight.shape
    value_heads = decay.shape[0]
    rows = jnp.arange(T)[:, None] < live
    inputs = jnp.concatenate([conv_state, jnp.where(rows, proj[:, :channels], 0.0)])
    mixed = jax.nn.silu(sum(conv_weight[j] * inputs[j : j + T] for j in range(taps)))
    new_conv_state = jax.lax.dynamic_slice_in_dim(inputs, live, taps - 1)
    q, k, v = jnp.split(mixed, [key_heads * dim, 2 * key_heads * dim], axis=1)

    def unit(x):
        x = x.reshape(T, key_heads, dim)
        x = x / jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True) + UNIT_EPS)
        return jnp.tile(x, (1, value_heads // key_heads, 1))  # value head n reads n mod Kh

    z, alpha, beta = jnp.split(
        proj[:, channels:], [value_heads * dim, value_heads * (dim + 1)], axis=1
    )
    g = decay * jax.nn.softplus(alpha + dt_bias)
    heads = (T, value_heads, dim)
    return (
        unit(q) * dim**-0.5,
        jnp.where(rows[..., None], unit(k), 0.0),
        jnp.where(rows[..., None], v.reshape(heads), 0.0),
        jnp.where(rows, g, 0.0),
        jnp.where(rows, jax.nn.sigmoid(beta), 0.0),
        z.reshape(heads),
        new_conv_state,
    )


def gated_norm_ref(o, z, norm_weight, live, *, eps):
    """RMS(o) * weight * sigmoid(z) per value head, [T, Vh, C] to [T, Vh*C]; dead rows zero."""
    scale = jax.lax.rsqrt(jnp.mean(o * o, axis=-1, keepdims=True) + eps)
    y = (o * scale * norm_weight * jax.nn.sigmoid(z)).reshape(o.shape[0], -1)
    return jnp.where(jnp.arange(o.shape[0])[:, None] < live, y, 0.0)


def _step(S, row):
    """One row of the recurrence from state S [Vh, C, C]."""
    q, k, v, g, beta = row
    S = jnp.exp(g)[:, None, None] * S
    u = beta[:, None] * (v - jnp.einsum("hk,hkv->hv", k, S))
    S = S + k[:, :, None] * u[:, None, :]
    return S, jnp.einsum("hk,hkv->hv", q, S)


def gdn_window_ref(
    proj,
    conv_weight,
    decay,
    dt_bias,
    norm_weight,
    conv_state,
    state,
    pending,
    kept,
    certain,
    live,
    *,
    key_heads,
    eps,
):
    """What `gdn_window` must equal, in plain jnp: the recurrence of model.md, section 3.

    Drafts that came true and the call's own rows make one sequence, which is walked twice: to its end for
    the results, and over the certain rows for the states.
    """
    value_heads, dim, _ = state.shape
    channels = conv_weight.shape[1]
    certain = jnp.minimum(certain, live)
    R, T = pending.shape[0], proj.shape[0]
    replayed = jnp.zeros((R, proj.shape[1]), proj.dtype)
    replayed = replayed.at[:, :channels].set(pending[:, :channels])
    replayed = replayed.at[:, channels + value_heads * dim :].set(pending[:, channels:])
    place = jnp.arange(R + T)
    rows = jnp.concatenate([replayed, proj])[jnp.where(place < kept, place, R + place - kept)]

    def inputs(count):
        settings = {"key_heads": key_heads, "dim": dim}
        return gdn_inputs_ref(rows, conv_weight, decay, dt_bias, conv_state, count, **settings)

    *row, z, _ = inputs(kept + live)
    _, o = jax.lax.scan(_step, state, tuple(row))
    *row, _, new_conv_state = inputs(kept + certain)
    new_state, _ = jax.lax.scan(_step, state, tuple(row))
    o, z = (jax.lax.dynamic_slice_in_dim(x, kept, T) for x in (o, z))
    y = gated_norm_ref(o, z, norm_weight, live, eps=eps)
    drafts = jnp.delete(proj, np.s_[channels : channels + value_heads * dim], axis=1)
    drafts = jnp.concatenate([drafts, jnp.zeros_like(pending)])
    drafts = jax.lax.dynamic_slice_in_dim(drafts, certain, R)
    new_pending = jnp.where(jnp.arange(R)[:, None] < live - certain, drafts, pending)
    return y, new_conv_state, new_state, new_pending
