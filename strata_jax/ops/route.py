"""The router of a layer: products and the choice of experts. Native side: `ffi/cuda/ops/route.h`.

Native on devices only, where both are one kernel; the CPU calls `quant_matmul` and `router_topk`.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

from strata_jax.ops.native import Backend, int64s
from strata_jax.ops.quant_matmul import quant_matmul_ref
from strata_jax.ops.roles import Role
from strata_jax.ops.router_topk import router_topk_ref

ROLES = (Role.FFN_ROUTER, Role.FFN_SHARED_ROUTER)


def route(
    x: Float32[Array, "T D"],
    live: Int32[Array, ""],
    *,
    store: int,
    layer: int,
    num_experts: int,
    num_active: int,
    backend: Backend,
) -> tuple[Int32[Array, "T A"], Float32[Array, "T A"], Float32[Array, " T"]]:
    """What `router_topk` makes of the logits that `quant_matmul` gives, bit for bit.

    Args:
        x: activations.
        live: rows that count; the others get ids 0 and weights 0.
        store: slot of the device's store.
        layer: whose router.
        num_experts: rows of its matrix.
        num_active: A.
        backend: whose kernels.

    Source: model.md, section 6.
    """
    shape = (x.shape[0], num_active)
    out = (
        jax.ShapeDtypeStruct(shape, jnp.int32),
        jax.ShapeDtypeStruct(shape, jnp.float32),
        jax.ShapeDtypeStruct(shape[:1], jnp.float32),
    )
    workspace = backend.workspace("route", store, layer, list(ROLES), x.shape[0])
    call = backend.call("route", out, workspace=workspace)
    ids, weights, shared = call(
        x,
        live,
        store=np.int64(store),
        layer=np.int64(layer),
        num_experts=np.int64(num_experts),
        roles=int64s(ROLES),
    )
    return ids, weights, shared


def route_ref(
    x: Float32[Array, "T D"],
    live: Int32[Array, ""],
    *,
    matrices: Sequence[Float32[Array, "N D"]],
    num_active: int,
) -> tuple[Int32[Array, "T A"], Float32[Array, "T A"], Float32[Array, " T"]]:
    """What `route` must equal, in plain jnp. `matrices`: the router's and the shared expert's."""
    logits = quant_matmul_ref(x, live, matrices=matrices)
    return router_topk_ref(logits, live, num_active=num_active)
