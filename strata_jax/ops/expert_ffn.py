"""Routed and shared experts of a layer. Native side: `ffi/ops/expert_ffn.h`."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

from strata_jax.ops.native import CPU, Backend, int64s
from strata_jax.ops.roles import Role

ROLES = (
    Role.FFN_GATE_EXPS,
    Role.FFN_UP_EXPS,
    Role.FFN_DOWN_EXPS,
    Role.FFN_GATE_SHARED,
    Role.FFN_UP_SHARED,
    Role.FFN_DOWN_SHARED,
)


def expert_ffn(
    x: Float32[Array, "T D"],
    ids: Int32[Array, "T A"],
    weights: Float32[Array, "T A"],
    shared_weights: Float32[Array, " T"],
    live: Int32[Array, ""],
    *,
    store: int,
    tiers: int = -1,
    layer: int,
    backend: Backend = CPU,
) -> Float32[Array, "T D"]:
    """The weighted sum of each row's experts and of the shared expert.

    The experts' bytes are read where the store says they lie; they are no operand, so moving one never
    recompiles. A row's result depends on that row and its experts' bytes alone (contract T); the sum runs
    in router order, the shared expert last.

    Args:
        x: activations.
        ids: experts of each row in router order; rows at and past `live` are not read.
        weights: their weights.
        shared_weights: weight of the shared expert.
        live: rows that count; the others are zero in the result.
        store: slot of the native weight store.
        tiers: slot of the expert tiers; -1 = every expert is read where the file has it.
        layer: whose experts.
        backend: whose kernels.

    Source: model.md, section 6.
    """
    out = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    attributes = {"store": np.int64(store), "tiers": np.int64(tiers), "layer": np.int64(layer)}
    workspace = backend.workspace(
        "expert_ffn", store, layer, Role.FFN_GATE_SHARED, x.shape[0], ids.shape[1]
    )
    (y,) = backend.call("expert_ffn", [out], workspace=workspace)(
        x, ids, weights, shared_weights, live, **attributes, roles=int64s(ROLES)
    )
    return y


def expert_ffn_ref(
    x: Float32[Array, "T D"],
    ids: Int32[Array, "T A"],
    weights: Float32[Array, "T A"],
    shared_weights: Float32[Array, " T"],
    live: Int32[Array, ""],
    *,
    matrices: Sequence[Float32[Array, "..."]],
) -> Float32[Array, "T D"]:
    """What `expert_ffn` approximates, on dequantised matrices (in the order of `ROLES`).

    Bits are specified by `expert_ffn_exact` (expert_ffn_ref.py, numpy) and the scalar kernels.
    """
    gate, up, down, shared_gate, shared_up, shared_down = matrices

    def ffn(rows, gate, up, down):  # [K] through one expert each
        return down @ (jax.nn.silu(gate @ rows) * (up @ rows))

    routed = jax.vmap(  # over rows, then over a row's experts
        lambda row, chosen: jax.vmap(lambda e: ffn(row, gate[e], up[e], down[e]))(chosen)
    )(x, ids)
    shared = jax.vmap(lambda row: ffn(row, shared_gate, shared_up, shared_down))(x)
    y = jnp.einsum("ta,tad->td", weights, routed) + shared_weights[:, None] * shared
    return jnp.where(jnp.arange(x.shape[0])[:, None] < live, y, 0.0)
