"""The token mixer of linear layers: a gated delta net."""

from jaxtyping import Array, Float32, Int32

from strata_jax.config import ModelConfig
from strata_jax.model.params import LinearParams
from strata_jax.model.state import Drafts, LinearState
from strata_jax.ops.roles import Role
from strata_jax.ops.sets import OpSet

PROJECTIONS = (Role.ATTN_QKV, Role.ATTN_GATE, Role.SSM_ALPHA, Role.SSM_BETA)


def linear_block(
    ops: OpSet,
    config: ModelConfig,
    params: LinearParams,
    state: LinearState,
    x: Float32[Array, "T D"],
    live: Int32[Array, ""],
    drafts: Drafts | None,
    *,
    layer: int,
) -> tuple[Float32[Array, "T D"], LinearState]:
    """One block of a window, or of a tile (`drafts` is None). Source: model.md, section 3."""
    dim = config.gdn_head_dim
    values = config.gdn_value_heads * dim
    columns = 2 * config.gdn_key_heads * dim + 2 * values + 2 * config.gdn_value_heads
    proj = ops.quant_matmul(x, live, layer=layer, roles=PROJECTIONS, num_columns=columns)
    vectors = (params.conv_weight, params.decay, params.dt_bias, params.norm)
    settings = {"key_heads": config.gdn_key_heads, "eps": config.eps}
    pending = state.pending
    if drafts is None:
        y, conv, delta = ops.gdn_chunk(proj, *vectors, state.conv, state.delta, live, **settings)
    else:
        states = (state.conv, state.delta, pending)
        y, conv, delta, pending = ops.gdn_window(
            proj, *vectors, *states, drafts.kept, drafts.certain, live, **settings
        )
    y = ops.quant_matmul(y, live, layer=layer, roles=(Role.SSM_OUT,), num_columns=config.hidden)
    return y, LinearState(conv=conv, delta=delta, pending=pending)
