"""Norm, rotation and cache cells of a window. Native side: `ffi/ops/qsa_append.h`."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

from strata_jax.ops.cells import Cells, store_ref
from strata_jax.ops.native import CPU, Backend

GROUP = 16
"""Blocks that lie side by side in `index_keys`."""


def qsa_append(
    proj: Float32[Array, "T P"],
    q_norm: Float32[Array, " C"],
    k_norm: Float32[Array, " C"],
    index_q_norm: Float32[Array, " IC"],
    index_k_norm: Float32[Array, " IC"],
    inv_freq: Float32[Array, " R/2"],
    keys: Cells,
    values: Cells,
    index_raw: Float32[Array, "S IC"],
    index_keys: Float32[Array, "M/16 IC 16"],
    scales: Float32[Array, "S K 2G"],
    origin: Int32[Array, ""],
    pos: Int32[Array, ""],
    live: Int32[Array, ""],
    *,
    num_heads: int,
    index_heads: int,
    ratio: int,
    eps: float,
    backend: Backend = CPU,
):
    """Writes the live rows' cells and returns the rows' queries.

    Args:
        proj: per row q with its gate (H times C and C), k, v (K*C each), then, with an indexer, its
            queries (IH*IC) and raw key (IC).
        q_norm: gamma of the query norm.
        k_norm: likewise of the keys.
        index_q_norm: likewise of the indexer's queries.
        index_k_norm: likewise of the indexer's pooled keys.
        inv_freq: theta^(-2j/R) of the R rotated values.
        keys: key cells [S, K, C], normed and rotated; float32, float16 or int8 (`ops/cells.py`).
            This and the next four are updated in place.
        values: value cells, of the same type.
        index_raw: raw indexer keys of every cell.
        index_keys: pooled, normed and rotated keys of complete blocks, 16 blocks side by side.
        scales: of int8 cells, a head's key's before its value's; any S else.
        origin: position of cell 0; more than 0 where the oldest blocks were dropped.
        pos: cell of row 0.
        live: rows that count; the others write nothing and give zero queries.
        num_heads: H.
        index_heads: IH; 0 without an indexer.
        ratio: cells per block.
        eps: of the norms.
        backend: whose kernels.

    Returns:
        q [T, H, C], index_q [T, IH, IC], and the five caches.

    Source: model.md, sections 4 and 5.
    """
    T = proj.shape[0]
    caches = (keys, values, index_raw, index_keys, scales)
    queries = [(T, num_heads, keys.shape[2]), (T, index_heads, index_raw.shape[1])]
    out = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in queries]
    out += [jax.ShapeDtypeStruct(cache.shape, cache.dtype) for cache in caches]
    call = backend.call("qsa_append", out, aliases={6 + n: 2 + n for n in range(len(caches))})
    norms = (q_norm, k_norm, index_q_norm, index_k_norm)
    attributes = {"ratio": np.int64(ratio), "eps": np.float32(eps)}
    return tuple(call(proj, *norms, inv_freq, *caches, origin, pos, live, **attributes))


def norm_rotate_ref(x, weight, positions, inv_freq, eps):
    """RMS norm over the last axis, then rotation of its first values; x is [T, heads, C]."""
    x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * weight
    half = inv_freq.shape[0]
    angle = positions.astype(jnp.float32)[:, None, None] * inv_freq
    low, high, rest = jnp.split(x, [half, 2 * half], axis=-1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin, rest], axis=-1)


def _write(cells, rows, pos, live):
    """Rows 0..live-1 into cells pos.., the other cells untouched."""
    old = jax.lax.dynamic_slice_in_dim(cells, pos, rows.shape[0])
    keep = (jnp.arange(rows.shape[0]) < live).reshape(-1, *[1] * (rows.ndim - 1))
    return jax.lax.dynamic_update_slice_in_dim(cells, jnp.where(keep, rows, old), pos, 0)


def qsa_append_ref(
    proj,
    q_norm,
    k_norm,
    index_q_norm,
    index_k_norm,
    inv_freq,
    keys,
    values,
    index_raw,
    index_keys,
    scales,
    origin,
    pos,
    live,
    *,
    num_heads,
    index_heads,
    ratio,
    eps,
):
    """What `qsa_append` must equal, in plain jnp.

    Pools every block of the cache anew and keeps those that the window completed. The caches must have T
    cells to spare past the last live one, as `DecodeState` gives them.
    """
    T = proj.shape[0]
    _, kv_heads, dim = keys.shape
    index_dim = index_raw.shape[1]
    widths = [num_heads * 2 * dim, kv_heads * dim, kv_heads * dim, index_heads * index_dim]
    q, k, v, iq, ik = jnp.split(proj, np.cumsum(widths), axis=1)
    positions = origin + pos + jnp.arange(T)
    rows = (jnp.arange(T) < live)[:, None, None]
    q = q.reshape(T, num_heads, 2 * dim)[..., :dim]
    q = jnp.where(rows, norm_rotate_ref(q, q_norm, positions, inv_freq, eps), 0.0)
    k = norm_rotate_ref(k.reshape(T, kv_heads, dim), k_norm, positions, inv_freq, eps)
    k, k_scales = store_ref(k, keys)
    v, v_scales = store_ref(v.reshape(T, kv_heads, dim), values)
    keys, values = _write(keys, k, pos, live), _write(values, v, pos, live)
    if keys.dtype == jnp.int8:
        scales = _write(scales, jnp.concatenate([k_scales, v_scales], axis=-1), pos, live)
    iq = iq.reshape(T, index_heads, index_dim)
    if index_heads == 0:
        return q, iq, keys, values, index_raw, index_keys, scales
    iq = jnp.where(rows, norm_rotate_ref(iq, index_q_norm, positions, inv_freq, eps), 0.0)
    index_raw = _write(index_raw, ik, pos, live)
    blocks = index_raw.shape[0] // ratio
    pooled = jnp.mean(index_raw[: blocks * ratio].reshape(blocks, ratio, index_dim), axis=1)
    first = origin + jnp.arange(blocks) * ratio
    pooled = norm_rotate_ref(pooled[:, None], index_k_norm, first, inv_freq, eps)[:, 0]
    old = jnp.swapaxes(index_keys, 1, 2).reshape(-1, index_dim)
    done = (jnp.arange(blocks) >= pos // ratio) & (jnp.arange(blocks) < (pos + live) // ratio)
    new = old.at[:blocks].set(jnp.where(done[:, None], pooled, old[:blocks]))
    new = jnp.swapaxes(new.reshape(-1, GROUP, index_dim), 1, 2)
    return q, iq, keys, values, index_raw, new, scales
