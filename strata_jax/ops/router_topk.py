"""The experts of each row. Native side: `ffi/ops/router_topk.h`."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from strata_jax.ops.native import CPU, Backend


def router_topk(
    logits: Float32[Array, "T E+1"],
    live: Int32[Array, ""],
    *,
    num_active: int,
    backend: Backend = CPU,
) -> tuple[Int32[Array, "T A"], Float32[Array, "T A"], Float32[Array, " T"]]:
    """The `num_active` best experts of each row, their renormalised weights, and the shared expert's.

    Descending, ties to the lower id. Rows at and past `live` get ids 0 and weights 0.

    Args:
        logits: of the experts, then the shared expert's gate.
        live: rows that count.
        num_active: A.
        backend: whose kernels.

    Source: model.md, section 6.
    """
    shape = (logits.shape[0], num_active)
    out = (
        jax.ShapeDtypeStruct(shape, jnp.int32),
        jax.ShapeDtypeStruct(shape, jnp.float32),
        jax.ShapeDtypeStruct(shape[:1], jnp.float32),
    )
    ids, weights, shared = backend.call("router_topk", out)(logits, live)
    return ids, weights, shared


def router_topk_ref(
    logits: Float32[Array, "T E+1"], live: Int32[Array, ""], *, num_active: int
) -> tuple[Int32[Array, "T A"], Float32[Array, "T A"], Float32[Array, " T"]]:
    """What `router_topk` must equal, in plain jnp."""
    top, ids = jax.lax.top_k(jax.nn.softmax(logits[:, :-1], axis=-1), num_active)
    rows = jnp.arange(logits.shape[0]) < live
    weights = jnp.where(rows[:, None], top / jnp.sum(top, axis=-1, keepdims=True), 0.0)
    shared = jnp.where(rows, jax.nn.sigmoid(logits[:, -1]), 0.0)
    return jnp.where(rows[:, None], ids, 0).astype(jnp.int32), weights, shared
