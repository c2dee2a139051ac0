"""The two op sets that `model/transformer.py` runs with: native, and plain jnp twins.

One forward serves both; nothing else in the code knows the difference. `native_ops` reads matrices where
the native store says they lie; `plain_ops` is the readable version and the oracle of the tests, on
dequantised float32 matrices.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from strata_jax.config import NgramConfig
from strata_jax.ops import (
    embed_rows,
    expert_ffn,
    gdn_chunk,
    gdn_window,
    hyper_read,
    ngram_ask,
    ngram_gate,
    ngram_rows,
    qsa_append,
    qsa_attend,
    qsa_select,
    quant_matmul,
    route,
    router_topk,
)
from strata_jax.ops.native import CPU, Backend
from strata_jax.ops.roles import Role

Op = Callable[..., Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpSet:
    """One implementation of every op; the fields are called as the functions of the same name."""

    quant_matmul: Op
    """(x, live, *, layer, roles, num_columns) -> [T, N]"""
    expert_ffn: Op
    """(x, ids, weights, shared_weights, live, *, layer) -> [T, D]"""
    embed_rows: Op
    """(ids, live, *, width) -> [T, D]"""
    ngram_ask: Op
    """(ids, tokens, live, *, ngram) -> [T], the ids"""
    ngram_rows: Op
    """(tokens, streams, live, *, ngram) -> [T, W*C]"""
    hyper_read: Op
    """(streams, y, beta, norm, live, *, layer, roles, eps) -> streams, [T, D], [T, J]"""
    route: Op
    """(x, live, *, layer, num_experts, num_active) -> [T, A], [T, A], [T]"""
    router_topk: Op
    ngram_gate: Op
    gdn_window: Op
    """For windows; must not depend on the number of rows."""
    gdn_chunk: Op
    """For tiles: T is a multiple of 64 and row 0 lies on a multiple of 64."""
    qsa_append: Op
    qsa_select: Op
    qsa_attend: Op


def native_ops(
    store: int,
    *,
    tiers: int = -1,
    table: int = -1,
    is_asked: bool = False,
    backend: Backend = CPU,
) -> OpSet:
    """The native ops over the weight store, the expert tiers and the n-gram table of those slots.

    On a device the store is a `DeviceStore`, which holds the experts too: `tiers` stays -1. `is_asked`: the
    host reads the table for the device, and is told in good time.
    """

    def bound(op: Op, **slots: int) -> Op:
        return functools.partial(op, **slots, backend=backend)

    def routed(x, live, *, layer: int, num_experts: int, num_active: int):
        columns = {"roles": route.ROLES, "num_columns": num_experts + 1}
        logits = bound(quant_matmul.quant_matmul, store=store)(x, live, layer=layer, **columns)
        return bound(router_topk.router_topk)(logits, live, num_active=num_active)

    peer = {"store": store} if backend.is_device else {}
    return OpSet(
        quant_matmul=bound(quant_matmul.quant_matmul, store=store),
        expert_ffn=bound(expert_ffn.expert_ffn, store=store, tiers=tiers),
        embed_rows=bound(embed_rows.embed_rows, store=store),
        ngram_ask=bound(ngram_ask.ngram_ask, table=table) if is_asked else ngram_ask.ngram_ask_ref,
        ngram_rows=bound(ngram_rows.ngram_rows, table=table),
        hyper_read=bound(hyper_read.hyper_read, store=store),
        route=bound(route.route, store=store) if backend.is_device else routed,
        router_topk=bound(router_topk.router_topk),
        ngram_gate=bound(ngram_gate.ngram_gate),
        gdn_window=bound(gdn_window.gdn_window),
        gdn_chunk=bound(gdn_chunk.gdn_chunk),
        qsa_append=bound(qsa_append.qsa_append),
        qsa_select=bound(qsa_select.qsa_select, **peer),
        qsa_attend=bound(qsa_attend.qsa_attend, **peer),
    )


def plain_ops(matrices: Mapping[tuple[Role, int], np.ndarray]) -> OpSet:
    """The twins, over dequantised matrices [N, K] (experts [E, N, K]) by role and layer."""

    def matrix(role: Role, layer: int) -> jax.Array:
        return jnp.asarray(matrices[role, layer])  # numpy cannot be indexed by a traced id

    def matmul(x, live, *, layer: int, roles: Sequence[Role], num_columns: int):
        chosen = [matrix(role, layer) for role in roles]
        y = quant_matmul.quant_matmul_ref(x, live, matrices=chosen)
        assert y.shape[1] == num_columns, (roles, y.shape, num_columns)
        return y

    def experts(x, ids, weights, shared_weights, live, *, layer: int):
        chosen = [matrix(role, layer) for role in expert_ffn.ROLES]
        return expert_ffn.expert_ffn_ref(x, ids, weights, shared_weights, live, matrices=chosen)

    def routed(x, live, *, layer: int, num_experts: int, num_active: int):
        chosen = [matrix(role, layer) for role in route.ROLES]
        assert len(chosen[0]) == num_experts
        return route.route_ref(x, live, matrices=chosen, num_active=num_active)

    def read(streams, y, beta, norm, live, *, layer: int, roles: Sequence[Role | None], eps: float):
        chosen = [None if role is None else matrix(role, layer) for role in roles]
        return hyper_read.hyper_read_ref(streams, y, beta, norm, live, matrices=chosen, eps=eps)

    def embed(ids, live, *, width: int):
        table = matrix(Role.TOKEN_EMBD, 0)
        assert table.shape[1] == width
        return embed_rows.embed_rows_ref(ids, live, table=table)

    def ngrams(tokens, streams, live, *, ngram: NgramConfig):
        table = matrices[Role.NGRAM_TABLE, 0]
        out = jax.ShapeDtypeStruct((tokens.shape[0], ngram.num_heads * ngram.row_width), np.float32)
        run = functools.partial(ngram_rows.ngram_rows_ref, table=table, ngram=ngram)
        return jax.pure_callback(
            lambda tokens, streams, live: run(np.asarray(tokens), streams, int(live)),
            out,
            tokens,
            streams,
            live,
        )

    return OpSet(
        quant_matmul=matmul,
        expert_ffn=experts,
        embed_rows=embed,
        ngram_ask=ngram_ask.ngram_ask_ref,
        ngram_rows=ngrams,
        hyper_read=read,
        route=routed,
        router_topk=router_topk.router_topk_ref,
        ngram_gate=ngram_gate.ngram_gate_ref,
        gdn_window=gdn_window.gdn_window_ref,
        gdn_chunk=gdn_chunk.gdn_chunk_ref,
        qsa_append=qsa_append.qsa_append_ref,
        qsa_select=qsa_select.qsa_select_ref,
        qsa_attend=qsa_attend.qsa_attend_ref,
    )
