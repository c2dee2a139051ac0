"""Roles of the weight matrices: how programs and the native store name a matrix of a layer.

The numbers are part of the compiled programs; the names are those of the file format (gguf.md).
"""

import enum


class Role(enum.IntEnum):
    """One matrix, or one stack of experts, of a layer. Global matrices lie at layer 0."""

    TOKEN_EMBD = 0
    OUTPUT = 1
    OUTPUT_HC_DOWN = 2
    OUTPUT_HC_UP = 3
    NGRAM_TABLE = 4
    PLE_KEY = 5
    PLE_VALUE = 6
    HC_ATTN_DOWN = 7
    HC_ATTN_INJECT = 8
    HC_ATTN_UP = 9
    HC_FFN_DOWN = 10
    HC_FFN_INJECT = 11
    HC_FFN_UP = 12
    ATTN_QKV = 13
    ATTN_GATE = 14
    SSM_ALPHA = 15
    SSM_BETA = 16
    SSM_OUT = 17
    ATTN_Q = 18
    ATTN_K = 19
    ATTN_V = 20
    INDEXER_Q = 21
    INDEXER_K = 22
    ATTN_OUTPUT = 23
    FFN_ROUTER = 24
    FFN_SHARED_ROUTER = 25
    FFN_GATE_EXPS = 26
    FFN_UP_EXPS = 27
    FFN_DOWN_EXPS = 28
    FFN_GATE_SHARED = 29
    FFN_UP_SHARED = 30
    FFN_DOWN_SHARED = 31
    EH_PROJ = 32
    """Of a draft layer."""


GLOBAL_TENSORS: dict[Role, str] = {
    Role.TOKEN_EMBD: "token_embd.weight",
    Role.OUTPUT: "output.weight",
    Role.OUTPUT_HC_DOWN: "output_hc_down.weight",
    Role.OUTPUT_HC_UP: "output_hc_up.weight",
    Role.NGRAM_TABLE: "per_layer_token_embd.weight",
}

LAYER_TENSORS: dict[Role, str] = {
    Role.PLE_KEY: "ple_key.weight",
    Role.PLE_VALUE: "ple_value.weight",
    Role.HC_ATTN_DOWN: "hc_attn_down.weight",
    Role.HC_ATTN_INJECT: "hc_attn_inject.weight",
    Role.HC_ATTN_UP: "hc_attn_up.weight",
    Role.HC_FFN_DOWN: "hc_ffn_down.weight",
    Role.HC_FFN_INJECT: "hc_ffn_inject.weight",
    Role.HC_FFN_UP: "hc_ffn_up.weight",
    Role.ATTN_QKV: "attn_qkv.weight",
    Role.ATTN_GATE: "attn_gate.weight",
    Role.SSM_ALPHA: "ssm_alpha.weight",
    Role.SSM_BETA: "ssm_beta.weight",
    Role.SSM_OUT: "ssm_out.weight",
    Role.ATTN_Q: "attn_q.weight",
    Role.ATTN_K: "attn_k.weight",
    Role.ATTN_V: "attn_v.weight",
    Role.INDEXER_Q: "indexer.q_proj.weight",
    Role.INDEXER_K: "indexer.k_proj.weight",
    Role.ATTN_OUTPUT: "attn_output.weight",
    Role.FFN_ROUTER: "ffn_gate_inp.weight",
    Role.FFN_SHARED_ROUTER: "ffn_gate_inp_shexp.weight",
    Role.FFN_GATE_EXPS: "ffn_gate_exps.weight",
    Role.FFN_UP_EXPS: "ffn_up_exps.weight",
    Role.FFN_DOWN_EXPS: "ffn_down_exps.weight",
    Role.FFN_GATE_SHARED: "ffn_gate_shexp.weight",
    Role.FFN_UP_SHARED: "ffn_up_shexp.weight",
    Role.FFN_DOWN_SHARED: "ffn_down_shexp.weight",
}

DRAFT_TENSORS: dict[Role, str] = {
    Role.EH_PROJ: "nextn.eh_proj.weight",
    Role.OUTPUT_HC_DOWN: "nextn.hc_head_down.weight",
    Role.OUTPUT_HC_UP: "nextn.hc_head_up.weight",
    Role.TOKEN_EMBD: "nextn.embed_tokens.weight",
    Role.OUTPUT: "nextn.shared_head_head.weight",
}
"""What a draft layer has beside `LAYER_TENSORS`; in a store of its own, with a final mixer of its own. The
last two are the model's where a file has none."""

EXPERT_ROLES = frozenset({Role.FFN_GATE_EXPS, Role.FFN_UP_EXPS, Role.FFN_DOWN_EXPS})
