"""The experts of each row. Native side: `ffi/ops/router_topk.h`."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

from strata_jax.ops.native import target


def router_topk(
    logits: Float32[Array, "T N"],
    live: Int32[Array, ""],
    *,
    num_experts: int,
    num_active: int,
) -> tuple[Int32[Array, "T A"], Float32[Array, "T A"]]:
    """The `num_active` best of the first `num_experts` columns and their renormalised weights.

    Descending, ties to the lower id. Rows at and past `live` get ids 0 and weights 0.
    Source: model.md, section 6.
    """
    shape = (logits.shape[0], num_active)
    out = (jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(shape, jnp.float32))
    call = jax.ffi.ffi_call(target("router_topk"), out)
    ids, weights = call(logits, live, num_experts=np.int64(num_experts))
    return ids, weights


def router_topk_ref(
    logits: Float32[Array, "T N"],
    live: Int32[Array, ""],
    *,
    num_experts: int,
    num_active: int,
) -> tuple[Int32[Array, "T A"], Float32[Array, "T A"]]:
    """What `router_topk` must equal, in plain jnp."""
    probabilities = jax.nn.softmax(logits[:, :num_experts], axis=-1)
    top, ids = jax.lax.top_k(probabilities, num_active)
    rows = jnp.arange(logits.shape[0])[:, None] < live
    weights = top / jnp.sum(top, axis=-1, keepdims=True)
    return jnp.where(rows, ids, 0).astype(jnp.int32), jnp.where(rows, weights, 0.0)
