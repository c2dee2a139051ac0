"""The feed-forward half of every layer: routed experts and a shared one."""

from jaxtyping import Array, Float32, Int32

from strata_jax.config import ModelConfig
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
    ids, weights, shared = ops.route(
        x,
        live,
        layer=layer,
        num_experts=config.num_experts,
        num_active=config.num_experts_active,
    )
    return ops.expert_ffn(x, ids, weights, shared, live, layer=layer)
