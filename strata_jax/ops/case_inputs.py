"""Operands for the cases of `cases.py`: what one call of an op takes, random but sane.

A call runs on either op set: `getattr(ops, call.op)(*call.operands, **call.attributes)`.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from strata_jax.ops import expert_ffn, route
from strata_jax.ops.case_matrices import Matrix, make_matrix, matrix_shape
from strata_jax.ops.cases import Case
from strata_jax.ops.cells import scale_groups
from strata_jax.ops.qsa_append import GROUP
from strata_jax.ops.roles import EXPERT_ROLES, Role

_ALIGNMENT = 128
"""Cells of a cache: 16 blocks of at most 8 cells, as `model/state.py` makes them."""


_DRAFTS = 7
"""Drafts that the state of a recurrent op has room for; no row of a case is one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """Everything one call of an op takes."""

    op: str
    operands: tuple[Any, ...]
    attributes: Mapping[str, Any]
    matrices: Mapping[Role, Matrix]
    """All on layer 0."""
    macs: int
    """Multiply-adds of the products; 0 where they are not what an op spends its time on."""
    num_bytes: int
    """Bytes that must move at least once: weights, state read and written, rows in and out."""


def make_call(op: str, case: Case, seed: int = 0) -> Call:
    """Operands of `op` for a case, all of its rows live."""
    return _MAKERS[op](case, np.random.default_rng(seed))


def _normal(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> np.ndarray:
    return rng.standard_normal(shape, np.float32) * np.float32(scale)


def _gamma(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return 1 + _normal(rng, *shape, scale=0.1)


def _quant_matmul(case: Case, rng: np.random.Generator) -> Call:
    matrices = {role: make_matrix(case, role, rng) for role in case.roles}
    x = _normal(rng, case.rows, matrix_shape(case.config, case.roles[0])[1])
    columns = sum(m.rows for m in matrices.values())
    weights = sum(m.data.nbytes for m in matrices.values())
    return Call(
        op="quant_matmul",
        operands=(x, np.int32(case.rows)),
        attributes={"layer": 0, "roles": case.roles, "num_columns": columns},
        matrices=matrices,
        macs=x.size * columns,
        num_bytes=weights + x.nbytes + 4 * case.rows * columns,
    )


def _expert_ffn(case: Case, rng: np.random.Generator) -> Call:
    c = case.config
    matrices = {role: make_matrix(case, role, rng) for role in expert_ffn.ROLES}
    x = _normal(rng, case.rows, c.hidden)
    ids = np.argsort(rng.random((case.rows, c.num_experts)), axis=1)[:, : c.num_experts_active]
    weights = rng.random(ids.shape, np.float32) + np.float32(0.1)
    weights /= weights.sum(axis=1, keepdims=True)
    shared = rng.random(case.rows, np.float32)
    used = len(np.unique(ids))
    num_bytes = 2 * x.nbytes
    for role, m in matrices.items():
        num_bytes += m.data.nbytes // m.count * (used if role in EXPERT_ROLES else 1)
    each = c.num_experts_active * c.expert_width + c.shared_width
    return Call(
        op="expert_ffn",
        operands=(x, ids.astype(np.int32), weights, shared, np.int32(case.rows)),
        attributes={"layer": 0},
        matrices=matrices,
        macs=3 * case.rows * c.hidden * each,
        num_bytes=num_bytes,
    )


def _embed_rows(case: Case, rng: np.random.Generator) -> Call:
    table = make_matrix(case, Role.TOKEN_EMBD, rng)
    row_bytes = table.data.nbytes // table.rows
    return Call(
        op="embed_rows",
        operands=(rng.integers(0, table.rows, case.rows, np.int32), np.int32(case.rows)),
        attributes={"width": table.cols},
        matrices={Role.TOKEN_EMBD: table},
        macs=0,
        num_bytes=case.rows * (row_bytes + 4 * table.cols),
    )


def _route(case: Case, rng: np.random.Generator) -> Call:
    matrices = {role: make_matrix(case, role, rng) for role in route.ROLES}
    c = case.config
    x = _normal(rng, case.rows, c.hidden)
    return Call(
        op="route",
        operands=(x, np.int32(case.rows)),
        attributes={
            "layer": 0,
            "num_experts": c.num_experts,
            "num_active": c.num_experts_active,
        },
        matrices=matrices,
        macs=x.size * (c.num_experts + 1),
        num_bytes=sum(m.data.nbytes for m in matrices.values()) + x.nbytes,
    )


def _streams(case: Case) -> np.ndarray:
    """What the op's rows come after; its values do not matter."""
    return np.zeros((case.rows, case.config.num_streams, case.config.hidden), np.float32)


def _ngram_ask(case: Case, rng: np.random.Generator) -> Call:
    ngram = case.config.ngram
    assert ngram is not None
    tokens = rng.integers(0, case.config.vocab_size, (case.rows, ngram.ngram_size), np.int32)
    return Call(
        op="ngram_ask",
        operands=(tokens[:, 0].copy(), tokens, np.int32(case.rows)),
        attributes={"ngram": ngram},
        matrices={},
        macs=0,
        num_bytes=8 * case.rows * ngram.num_heads,
    )


def _ngram_rows(case: Case, rng: np.random.Generator) -> Call:
    ngram = case.config.ngram
    assert ngram is not None
    table = make_matrix(case, Role.NGRAM_TABLE, rng)
    row_bytes = table.data.nbytes // table.rows
    tokens = rng.integers(0, case.config.vocab_size, (case.rows, ngram.ngram_size), np.int32)
    return Call(
        op="ngram_rows",
        operands=(tokens, _streams(case), np.int32(case.rows)),
        attributes={"ngram": ngram},
        matrices={Role.NGRAM_TABLE: table},
        macs=0,
        num_bytes=case.rows * ngram.num_heads * (row_bytes + 4 * table.cols),
    )


def _hyper_read(case: Case, rng: np.random.Generator) -> Call:
    c, T, J = case.config, case.rows, case.config.num_streams
    roles = (Role.HC_ATTN_DOWN, Role.HC_ATTN_INJECT, Role.HC_ATTN_UP)
    matrices = {role: make_matrix(case, role, rng) for role in roles}
    streams, y = _normal(rng, T, J, c.hidden), _normal(rng, T, c.hidden)
    beta, norm = rng.random((T, J), np.float32) * 2, _gamma(rng, J, c.hidden)
    weights = sum(m.data.nbytes for m in matrices.values())
    return Call(
        op="hyper_read",
        operands=(streams, y, beta, norm, np.int32(T)),
        attributes={"layer": 0, "roles": roles, "eps": c.eps},
        matrices=matrices,
        macs=T * J * c.hidden * (2 * c.low_rank + J),
        num_bytes=weights + 2 * streams.nbytes + 2 * y.nbytes,
    )


def _router_topk(case: Case, rng: np.random.Generator) -> Call:
    c = case.config
    logits = _normal(rng, case.rows, c.num_experts + 1, scale=2.0)
    return Call(
        op="router_topk",
        operands=(logits, np.int32(case.rows)),
        attributes={"num_active": c.num_experts_active},
        matrices={},
        macs=0,
        num_bytes=logits.nbytes,
    )


def _ngram_gate(case: Case, rng: np.random.Generator) -> Call:
    c, J, D = case.config, case.config.num_streams, case.config.hidden
    assert c.ngram is not None
    history = (c.ngram.conv_kernel - 1) * c.ngram.ngram_size
    key_value = _normal(rng, case.rows, (J + 1) * D)
    norms = [_gamma(rng, J, D) for _ in range(3)]
    conv_weight = _normal(rng, c.ngram.conv_kernel, J * D, scale=0.3)
    streams, conv_state = _normal(rng, case.rows, J, D), _normal(rng, history, J * D)
    drafts = (_normal(rng, _DRAFTS, J * D), np.int32(0), np.int32(case.rows))
    return Call(
        op="ngram_gate",
        operands=(
            *(key_value, *norms, conv_weight, streams, conv_state, *drafts),
            np.int32(case.rows),
        ),
        attributes={"dilation": c.ngram.ngram_size, "eps": c.eps},
        matrices={},
        macs=0,
        num_bytes=key_value.nbytes + 2 * streams.nbytes + 2 * conv_state.nbytes,
    )


def _gdn(op: str) -> Callable[[Case, np.random.Generator], Call]:
    def make(case: Case, rng: np.random.Generator) -> Call:
        c, heads, dim = case.config, case.config.gdn_value_heads, case.config.gdn_head_dim
        channels = (2 * c.gdn_key_heads + heads) * dim
        proj = _normal(rng, case.rows, channels + heads * (dim + 2))
        conv_weight = _normal(rng, c.conv_kernel, channels, scale=0.3)
        decay, dt_bias = -np.exp(_normal(rng, heads)), _normal(rng, heads)
        conv_state, state = (
            _normal(rng, c.conv_kernel - 1, channels),
            _normal(rng, heads, dim, dim, scale=0.1),
        )
        vectors = (conv_weight, decay, dt_bias, _gamma(rng, dim))
        drafts = ()
        if op == "gdn_window":
            pending = _normal(rng, _DRAFTS, channels + 2 * heads)
            drafts = (pending, np.int32(0), np.int32(case.rows))
        return Call(
            op=op,
            operands=(proj, *vectors, conv_state, state, *drafts, np.int32(case.rows)),
            attributes={"key_heads": c.gdn_key_heads, "eps": c.eps},
            matrices={},
            macs=3 * case.rows * state.size,
            num_bytes=proj.nbytes + 2 * state.nbytes + 4 * case.rows * heads * dim,
        )

    return make


def num_cells(case: Case) -> int:
    """Cells of a cache for a case: its rows and as many to spare, whole groups of blocks."""
    return -(-(case.position + 2 * case.rows) // _ALIGNMENT) * _ALIGNMENT


def _cells(case: Case, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Keys and values of a cache of the case's type, and their scales."""
    c, cells = case.config, num_cells(case)
    shape = (cells, c.num_kv_heads, c.head_dim)
    groups = 2 * scale_groups(c.head_dim)
    keys, values = _normal(rng, *shape), _normal(rng, *shape)
    no_scales = np.zeros((1, c.num_kv_heads, groups), np.float32)
    if case.kv != "int8":
        dtype = np.float16 if case.kv == "fp16" else np.float32
        return keys.astype(dtype), values.astype(dtype), no_scales
    codes = [rng.integers(-127, 128, shape, np.int8) for _ in range(2)]
    scales = rng.random((cells, c.num_kv_heads, groups), np.float32) * np.float32(0.03)
    return codes[0], codes[1], scales


def _qsa_append(case: Case, rng: np.random.Generator) -> Call:
    c, cells = case.config, num_cells(case)
    half = np.arange(0, c.rope_dim, 2, dtype=np.float32) / np.float32(c.rope_dim)
    width = 2 * (c.num_heads + c.num_kv_heads) * c.head_dim + (c.index_heads + 1) * c.index_dim
    proj = _normal(rng, case.rows, width)
    norms = [_gamma(rng, c.head_dim) for _ in range(2)]
    norms += [_gamma(rng, c.index_dim) for _ in range(2)]
    inv_freq = np.float32(1) / np.float32(c.rope_theta) ** half
    keys, values, scales = _cells(case, rng)
    index_raw = _normal(rng, cells, c.index_dim)
    index_keys = _normal(rng, cells // c.index_ratio // GROUP + 1, c.index_dim, GROUP)
    caches = (keys, values, index_raw, index_keys, scales)
    numbers = (np.int32(0), np.int32(case.position), np.int32(case.rows))
    return Call(
        op="qsa_append",
        operands=(proj, *norms, inv_freq, *caches, *numbers),
        attributes={
            "num_heads": c.num_heads,
            "index_heads": c.index_heads,
            "ratio": c.index_ratio,
            "eps": c.eps,
        },
        matrices={},
        macs=0,
        num_bytes=2 * proj.nbytes,
    )


def _qsa_select(case: Case, rng: np.random.Generator) -> Call:
    c = case.config
    blocks = num_cells(case) // c.index_ratio
    seen = case.rows * ((case.position + case.rows) // c.index_ratio)
    index_q = _normal(rng, case.rows, c.index_heads, c.index_dim)
    index_keys = _normal(rng, blocks // GROUP + 1, c.index_dim, GROUP)
    return Call(
        op="qsa_select",
        operands=(index_q, index_keys, np.int32(case.position), np.int32(case.rows)),
        attributes={"ratio": c.index_ratio, "num_blocks": c.index_budget // c.index_ratio},
        matrices={},
        macs=seen * c.index_heads * c.index_dim,
        num_bytes=index_q.nbytes + 4 * (seen // case.rows) * c.index_dim,
    )


def _qsa_attend(case: Case, rng: np.random.Generator) -> Call:
    c, NB = case.config, case.config.index_budget // case.config.index_ratio
    q = _normal(rng, case.rows, c.num_heads, c.head_dim)
    proj = _normal(rng, case.rows, 2 * (c.num_heads + c.num_kv_heads) * c.head_dim)
    keys, values, scales = _cells(case, rng)
    blocks = np.full((case.rows, NB), -1, np.int32)
    for t in range(case.rows):
        complete = (case.position + t + 1) // c.index_ratio
        chosen = rng.choice(complete, min(NB, complete), replace=False)
        blocks[t, : len(chosen)] = np.sort(chosen)
    touched = len(np.unique(blocks)) * c.index_ratio * c.num_kv_heads * c.head_dim
    return Call(
        op="qsa_attend",
        operands=(
            *(q, proj, keys, values, blocks, scales),
            *(np.int32(case.position), np.int32(case.rows)),
        ),
        attributes={"ratio": c.index_ratio},
        matrices={},
        macs=2 * case.rows * NB * c.index_ratio * c.num_heads * c.head_dim,
        num_bytes=2 * keys.itemsize * touched + 2 * proj.nbytes,
    )


_MAKERS: dict[str, Callable[[Case, np.random.Generator], Call]] = {
    "quant_matmul": _quant_matmul,
    "expert_ffn": _expert_ffn,
    "embed_rows": _embed_rows,
    "ngram_ask": _ngram_ask,
    "ngram_rows": _ngram_rows,
    "hyper_read": _hyper_read,
    "route": _route,
    "router_topk": _router_topk,
    "ngram_gate": _ngram_gate,
    "gdn_window": _gdn("gdn_window"),
    "gdn_chunk": _gdn("gdn_chunk"),
    "qsa_append": _qsa_append,
    "qsa_select": _qsa_select,
    "qsa_attend": _qsa_attend,
}
