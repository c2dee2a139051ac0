"""The n-gram embedding's gate and convolution. Native side: `ffi/ops/ngram_gate.h`."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

from strata_jax.ops.hyper_read import grouped_norm_ref
from strata_jax.ops.native import CPU, Backend


def ngram_gate(
    key_value: Float32[Array, "T J*D+D"],
    norm_key: Float32[Array, "J D"],
    norm_query: Float32[Array, "J D"],
    norm_conv: Float32[Array, "J D"],
    conv_weight: Float32[Array, "taps J*D"],
    streams: Float32[Array, "T J D"],
    conv_state: Float32[Array, "history J*D"],
    pending: Float32[Array, "R J*D"],
    kept: Int32[Array, ""],
    certain: Int32[Array, ""],
    live: Int32[Array, ""],
    *,
    dilation: int,
    eps: float,
    backend: Backend = CPU,
) -> tuple[Float32[Array, "T J D"], Float32[Array, "history J*D"], Float32[Array, "R J*D"]]:
    """Adds the gated, convolved n-gram embedding to the streams; all results are in place.

    Args:
        key_value: the projected embedding: a key per stream, then one value.
        norm_key: gamma of the keys' norm; likewise norm_query (streams) and norm_conv.
        norm_query: see norm_key.
        norm_conv: see norm_key.
        conv_weight: taps of the causal convolution, the row itself last.
        streams: the residual streams.
        conv_state: the (taps-1) * dilation inputs before row 0, oldest first.
        pending: inputs of the last call's drafts.
        kept: how many of those came true; as in `gdn_window`, like the next.
        certain: rows that are no drafts.
        live: rows that count; the others change nothing.
        dilation: rows between two taps.
        eps: of the norms.
        backend: whose kernels.

    Source: model.md, section 7.
    """
    out = (
        jax.ShapeDtypeStruct(streams.shape, jnp.float32),
        jax.ShapeDtypeStruct(conv_state.shape, jnp.float32),
        jax.ShapeDtypeStruct(pending.shape, jnp.float32),
    )
    workspace = backend.workspace("ngram_gate", *streams.shape[:2])
    call = backend.call("ngram_gate", out, workspace=workspace, aliases={5: 0, 6: 1, 7: 2})
    new_streams, new_conv_state, new_pending = call(
        key_value,
        norm_key,
        norm_query,
        norm_conv,
        conv_weight,
        streams,
        conv_state,
        pending,
        kept,
        certain,
        live,
        dilation=np.int64(dilation),
        eps=np.float32(eps),
    )
    return new_streams, new_conv_state, new_pending


def ngram_gate_ref(
    key_value,
    norm_key,
    norm_query,
    norm_conv,
    conv_weight,
    streams,
    conv_state,
    pending,
    kept,
    certain,
    live,
    *,
    dilation,
    eps,
):
    """What `ngram_gate` must equal, in plain jnp."""
    T, J, D = streams.shape
    R, history = pending.shape[0], conv_state.shape[0]
    certain = jnp.minimum(certain, live)
    before = jnp.concatenate([conv_state, pending])
    before = jax.lax.dynamic_slice_in_dim(before, kept, history)
    rows = jnp.arange(T)[:, None] < live
    key = grouped_norm_ref(key_value[:, : J * D].reshape(T, J, D), norm_key, eps)
    value = key_value[:, J * D :]
    query = grouped_norm_ref(streams, norm_query, eps)
    z = jnp.sum(key * query, axis=-1) * D**-0.5  # [T, J]
    z = jnp.sign(z) * jnp.sqrt(jnp.maximum(jnp.abs(z), 1e-6))
    gated = jax.nn.sigmoid(z)[:, :, None] * value[:, None, :]  # [T, J, D]
    normed = grouped_norm_ref(gated, norm_conv, eps).reshape(T, J * D)
    inputs = jnp.concatenate([before, jnp.where(rows, normed, 0.0), jnp.zeros_like(pending)])
    taps = conv_weight.shape[0]
    mixed = sum(conv_weight[j] * inputs[j * dilation : j * dilation + T] for j in range(taps))
    added = gated + jax.nn.silu(mixed).reshape(T, J, D)
    new_state = jax.lax.dynamic_slice_in_dim(inputs, certain, history)
    drafts = jax.lax.dynamic_slice_in_dim(inputs, history + certain, R)
    new_pending = jnp.where(jnp.arange(R)[:, None] < live - certain, drafts, pending)
    return streams + jnp.where(rows[:, :, None], added, 0.0), new_state, new_pending
