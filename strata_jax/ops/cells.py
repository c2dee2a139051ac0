"""How the KV cache keeps keys and values (`--kv`). Native side: `ffi/common/cells.h`."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int8

SCALE_VALUES = 64
"""Values of a head that share a scale in an int8 cache."""

_FLOOR = 2.0**-100
_INV_127 = float.fromhex("0x1.020408p-7")

Cells = Float[Array, "S K C"] | Int8[Array, "S K C"]
"""float32, float16, or int8 codes."""


def scale_groups(head_dim: int) -> int:
    """Scales of one head's key or value."""
    return -(-head_dim // SCALE_VALUES)


def store_ref(x: Float32[Array, "T K C"], like: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What a cache of the type of `like` keeps of `x`, and its scales [T, K, groups].

    float16 rounds to nearest even. int8 follows contract T's rule (numerics.md) over SCALE_VALUES
    values: code = rint(x * (127 / max|x|)), scale = max|x| / 127, zeros below 2^-100, a NaN for the scale
    of a group that is not finite.
    """
    T, K, C = x.shape
    groups = scale_groups(C)
    if like.dtype != jnp.int8:
        return x.astype(like.dtype), jnp.zeros((T, K, groups), jnp.float32)
    padded = jnp.pad(x, ((0, 0), (0, 0), (0, groups * SCALE_VALUES - C)))
    padded = padded.reshape(T, K, groups, SCALE_VALUES)
    largest = jnp.max(jnp.abs(padded), axis=-1, keepdims=True)
    finite = jnp.isfinite(largest)
    used = finite & (largest >= _FLOOR)
    codes = jnp.where(used, jnp.round(padded * (127 / jnp.where(used, largest, 1.0))), 0.0)
    scales = jnp.where(finite, jnp.where(used, largest * _INV_127, 0.0), jnp.nan)[..., 0]
    return codes.reshape(T, K, -1)[..., :C].astype(jnp.int8), scales


def widen_ref(cells: jax.Array, scales: jax.Array) -> Float32[Array, "S K C"]:
    """What stored keys or values stand for; `scales` [S, K, groups] count for int8 only."""
    x = cells.astype(jnp.float32)
    if cells.dtype != jnp.int8:
        return x
    return x * jnp.repeat(scales, SCALE_VALUES, axis=-1)[..., : x.shape[-1]]
