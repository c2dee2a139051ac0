"""CASES[op]: the named shapes that tests, benches and gates run every op with.

A case is a model's sizes and the rows of one call; `case_inputs.py` makes operands for it. The sizes
are those of the embedded model's file and of the released model (docs: real_config.json).
"""

import dataclasses
from collections.abc import Mapping

from strata_jax.config import KvType, ModelConfig, NgramConfig
from strata_jax.ops.roles import Role

F32, F16, Q8_0, Q4_K, Q6_K, IQ4_NL, IQ3_S = 0, 1, 8, 12, 14, 20, 21  # ggml type ids

# Rows of each n-gram head: 16 primes in a row. The released table starts at 20,000,003 and has 320
# million rows, more than a bench can make.
# fmt: off
_EMBEDDED_SIZES = (4001, 4003, 4007, 4013, 4019, 4021, 4027, 4049, 4051, 4057, 4073, 4079, 4091,
                   4093, 4099, 4111)
_RELEASED_SIZES = (20011, 20021, 20023, 20029, 20047, 20051, 20063, 20071, 20089, 20101, 20107,
                   20113, 20117, 20123, 20129, 20143)
# fmt: on


def _offsets(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sum(sizes[:head]) for head in range(len(sizes)))


EMBEDDED = ModelConfig(
    hidden=256,
    num_layers=8,
    layer_kinds=("linear", "linear", "linear", "attention") * 2,
    num_draft_layers=1,
    num_streams=4,
    low_rank=64,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    rope_dim=16,
    rope_theta=1e7,
    rope_sections=(3, 3, 2, 0),
    num_experts=16,
    num_experts_active=4,
    expert_width=256,
    shared_width=256,
    conv_kernel=4,
    gdn_head_dim=64,
    gdn_key_heads=4,
    gdn_value_heads=8,
    index_heads=4,
    index_dim=64,
    index_budget=256,
    index_ratio=4,
    vocab_size=4096,
    context_length=8192,
    eps=1e-6,
    ngram=NgramConfig(
        layer=1,
        ngram_size=3,
        heads_per_ngram=8,
        conv_kernel=4,
        eos_id=4087,
        image_id=4092,
        row_width=16,
        num_rows=64896,
        multipliers=(2043359076095531, 1677619451946387, 1270917961443223),
        head_offsets=_offsets(_EMBEDDED_SIZES),
        head_sizes=_EMBEDDED_SIZES,
    ),
    eos_id=4089,
)
"""The model in the package, strata-small/model-IQ3_S.gguf."""

RELEASED = ModelConfig(
    hidden=2560,
    num_layers=48,
    layer_kinds=("linear", "linear", "linear", "attention") * 12,
    num_draft_layers=1,
    num_streams=4,
    low_rank=320,
    num_heads=24,
    num_kv_heads=2,
    head_dim=256,
    rope_dim=64,
    rope_theta=1e7,
    rope_sections=(11, 11, 10, 0),
    num_experts=512,
    num_experts_active=10,
    expert_width=640,
    shared_width=640,
    conv_kernel=4,
    gdn_head_dim=128,
    gdn_key_heads=16,
    gdn_value_heads=48,
    index_heads=4,
    index_dim=128,
    index_budget=2048,
    index_ratio=4,
    vocab_size=248320,
    context_length=262144,
    eps=1e-6,
    ngram=NgramConfig(
        layer=1,
        ngram_size=3,
        heads_per_ngram=8,
        conv_kernel=4,
        eos_id=248044,
        image_id=248056,
        row_width=160,
        num_rows=sum(_RELEASED_SIZES),
        multipliers=(23703573157769, 20109073645365, 8052911324071),
        head_offsets=_offsets(_RELEASED_SIZES),
        head_sizes=_RELEASED_SIZES,
    ),
    eos_id=248044,
)
"""The released model, its n-gram table cut to a thousandth of the rows."""

_EMBEDDED_TYPES = {
    Role.TOKEN_EMBD: IQ3_S,
    Role.OUTPUT: Q6_K,
    Role.NGRAM_TABLE: F16,
    Role.HC_ATTN_UP: IQ4_NL,
    Role.ATTN_QKV: Q4_K,
    Role.ATTN_V: Q4_K,
    Role.INDEXER_Q: F32,
    Role.INDEXER_K: F32,
    Role.FFN_ROUTER: F32,
    Role.FFN_SHARED_ROUTER: F32,
}
_RELEASED_TYPES = {
    Role.NGRAM_TABLE: IQ4_NL,
    Role.OUTPUT: Q6_K,
    Role.INDEXER_Q: F32,
    Role.INDEXER_K: F32,
    Role.FFN_ROUTER: F32,
    Role.FFN_SHARED_ROUTER: F32,
    Role.FFN_GATE_EXPS: IQ3_S,
    Role.FFN_UP_EXPS: IQ3_S,
    Role.FFN_DOWN_EXPS: IQ4_NL,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """The shapes of one call."""

    name: str
    origin: str
    """Whose sizes these are."""
    config: ModelConfig
    types: Mapping[Role, int]
    """ggml types of matrices; `default_type` where a role is not named."""
    default_type: int
    rows: int
    """T."""
    position: int = 0
    """Of row 0."""
    roles: tuple[Role, ...] = ()
    """Which matrices, where an op can take several sets of them."""
    kv: KvType = "f32"
    """How keys and values are cached."""

    def type_of(self, role: Role) -> int:
        """The ggml type of a matrix."""
        return self.types.get(role, self.default_type)


_MODELS = {
    "embedded": Case(
        name="embedded",
        origin="the embedded model, IQ3_S",
        config=EMBEDDED,
        types=_EMBEDDED_TYPES,
        default_type=IQ3_S,
        rows=0,
    ),
    "released": Case(
        name="released",
        origin="the released model, experts IQ3_S and IQ4_NL, dense Q8_0",
        config=RELEASED,
        types=_RELEASED_TYPES,
        default_type=Q8_0,
        rows=0,
    ),
}
_ROWS = {"window_1": 1, "window_4": 4, "window_8": 8, "tile_256": 256}
_FAR = {"embedded": 7000, "released": 32768}
"""Tokens read before a window: far past the indexer's budget."""
_TILE_START = 2048

_PROJECTIONS = {
    "gdn_in": (Role.ATTN_QKV, Role.ATTN_GATE, Role.SSM_ALPHA, Role.SSM_BETA),
    "gdn_out": (Role.SSM_OUT,),
    "qsa_in": (Role.ATTN_Q, Role.ATTN_K, Role.ATTN_V, Role.INDEXER_Q, Role.INDEXER_K),
    "router": (Role.FFN_ROUTER, Role.FFN_SHARED_ROUTER),
    "head": (Role.OUTPUT,),
}


def _cases(part: str = "", roles: tuple[Role, ...] = (), near: bool = True) -> tuple[Case, ...]:
    """Every model and number of rows; `near` = False puts windows far into a context."""
    made = []
    for model, base in _MODELS.items():
        for width, rows in _ROWS.items():
            position = 0
            if not near:
                position = _TILE_START if rows > 8 else _FAR[model]
            name = "/".join(word for word in (model, part, width) if word)
            case = dataclasses.replace(base, name=name, rows=rows, position=position, roles=roles)
            made.append(case)
    return tuple(made)


CASES: dict[str, tuple[Case, ...]] = {
    "quant_matmul": tuple(
        case for part, roles in _PROJECTIONS.items() for case in _cases(part, roles)
    ),
    "expert_ffn": _cases(),
    "embed_rows": _cases(),
    "ngram_ask": _cases(),
    "ngram_rows": _cases(),
    "hyper_read": _cases(),
    "route": _cases(),
    "router_topk": _cases(),
    "ngram_gate": _cases(),
    "gdn_window": _cases(),
    "gdn_chunk": tuple(case for case in _cases() if case.rows % 64 == 0),
    "qsa_append": _cases(near=False),
    "qsa_select": _cases(near=False),
    "qsa_attend": _cases(near=False),
}

ROW_OPERANDS = {
    "quant_matmul": (0,),
    "expert_ffn": (0, 1, 2, 3),
    "embed_rows": (0,),
    "ngram_ask": (0, 1),
    "ngram_rows": (0, 1),
    "hyper_read": (0, 1, 2),
    "route": (0,),
    "router_topk": (0,),
    "ngram_gate": (0, 5),
    "gdn_window": (0,),
    "gdn_chunk": (0,),
    "qsa_append": (0,),
    "qsa_select": (0,),
    "qsa_attend": (0, 1, 4),
}
"""Operands with a row axis; the last operand of every op is the number of live rows."""

STATES = {
    "ngram_gate": {6: 1, 7: 2},
    "gdn_window": {5: 1, 6: 2, 7: 3},
    "gdn_chunk": {5: 1, 6: 2},
    "qsa_append": {6: 2, 7: 3, 8: 4, 9: 5, 10: 6},
}
"""Operands that are state, and the results that carry them on."""

IN_PLACE_ROWS = {"hyper_read": {0: 0}, "ngram_gate": {5: 0}}
"""Operands with a row axis that a result updates in place: dead rows keep them."""

POSITIONED = {"qsa_append", "qsa_select", "qsa_attend"}
"""Ops whose last operand but one is the position of row 0."""

TOLERANCES = {
    # The activation is rounded to 1/254 of the largest of 32 values, the twin's is not.
    "quant_matmul": 0.02,
    # Two products after one another, each on rounded activations.
    "expert_ffn": 0.04,
    "hyper_read": 0.01,
    # float32 sums in another order, and the other side's exp, cos and sin.
    "router_topk": 1e-6,
    # The logits are sums in another order.
    "route": 1e-4,
    "gdn_window": 5e-6,
    "qsa_append": 1e-6,
    "qsa_attend": 5e-6,
    # Near z = 0 the gate's signed root makes a rounding of 1e-6 a step of 1e-3.
    "ngram_gate": 5e-4,
    # The same recurrence as triangular solves over 64 rows.
    "gdn_chunk": 5e-5,
}
"""How far an op may lie from its twin, as a part of the largest value; 0 where it is not named."""
