"""The feed-forward half of every layer: routed experts and a shared one."""

from jaxtyping import Array, Float32, Int32

from strata_jax.config import ModelConfig
from strata_jax.ops.roles import Role
from strata_jax.ops.sets import OpSet


def moe_block(
    ops: OpSet,
    config: ModelConfig,
    x: Float32[Array, "T D"],
    live: Int32[Array, ""],
    *,
    layer: int,
) -> Float32[Array, "T D"]:
    """Routes each row to its experts and sums them. Source: model.md, section 6."""
    logits = ops.quant_matmul(
        x,
        live,
        layer=layer,
        roles=(Role.FFN_ROUTER, Role.FFN_SHARED_ROUTER),
        num_columns=config.num_experts + 1,
    )
    ids, weights, shared = ops.router_topk(logits, live, num_active=config.num_experts_active)
    return ops.expert_ffn(x, ids, weights, shared, live, layer=layer)
