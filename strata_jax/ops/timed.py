"""Ops that tell a device's timeline (`ffi/cuda/timeline.h`) when they begin: for programs that are timed."""

import dataclasses
from typing import Any

import jax
import numpy as np

from strata_jax.ops.native import Backend
from strata_jax.ops.roles import Role
from strata_jax.ops.sets import Op, OpSet

PHASES = (
    # Those of expert_ffn, which marks them itself: `Phase` of timeline.h.
    "experts: grouping",
    "experts: waiting for copies",
    "experts: gate and up",
    "experts: down",
    "experts: combine",
    "embedding",
    "hyper-connections",
    "delta net: projections",
    "delta net",
    "delta net: output",
    "attention: projections",
    "attention: append",
    "attention: selection",
    "attention",
    "attention: output",
    "router",
    "n-gram",
    "head, and between chunks",
    "experts: waiting for the peer",  # marked by expert_ffn, too
)
"""Names by number."""

_BY_OP = {
    "embed_rows": "embedding",
    "hyper_read": "hyper-connections",
    "gdn_chunk": "delta net",
    "qsa_append": "attention: append",
    "qsa_select": "attention: selection",
    "qsa_attend": "attention",
    "route": "router",
    "ngram_ask": "n-gram",
    "ngram_rows": "n-gram",
    "ngram_gate": "n-gram",
}
_BY_ROLE = {
    Role.ATTN_QKV: "delta net: projections",
    Role.SSM_OUT: "delta net: output",
    Role.ATTN_Q: "attention: projections",
    Role.ATTN_OUTPUT: "attention: output",
    Role.PLE_KEY: "n-gram",
    Role.OUTPUT: "head, and between chunks",
}
"""Of products, by their first matrix."""


def mark(x: jax.Array, *, store: int, phase: int, backend: Backend) -> jax.Array:
    """`x` itself; whoever uses the result begins the phase.

    Args:
        x: of any shape and type.
        store: slot of the device's store, which has the timeline.
        phase: number in `PHASES`.
        backend: whose kernels.
    """
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    attributes = {"store": np.int64(store), "phase": np.int64(phase)}
    (same,) = backend.call("mark", [out], aliases={0: 0})(x, **attributes)
    return same


def timed_ops(ops: OpSet, store: int, backend: Backend) -> OpSet:
    """The same ops, each with a mark on its first operand."""

    def marked(x: jax.Array, phase: str) -> jax.Array:
        return mark(x, store=store, phase=PHASES.index(phase), backend=backend)

    def timed(op: Op, phase: str) -> Op:
        return lambda x, *rest, **settings: op(marked(x, phase), *rest, **settings)

    def matmul(x: jax.Array, *rest: Any, roles: tuple[Role, ...], **settings: Any) -> jax.Array:
        return ops.quant_matmul(marked(x, _BY_ROLE[roles[0]]), *rest, roles=roles, **settings)

    wrapped = {name: timed(getattr(ops, name), phase) for name, phase in _BY_OP.items()}
    return dataclasses.replace(ops, quant_matmul=matmul, **wrapped)
