"""The plain op set of a model file: every matrix dequantised to float32, by numpy alone.

The oracle of the model's tests; for small models.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

from strata_jax.ops.roles import (
    DRAFT_TENSORS,
    EXPERT_ROLES,
    GLOBAL_TENSORS,
    LAYER_TENSORS,
    Role,
)
from strata_jax.ops.sets import OpSet, plain_ops
from strata_jax.ops.unpack_ref import dequantize_ref
from strata_jax.weights.draft_layer import DraftLayer
from strata_jax.weights.pack import Pack

Matrices = dict[tuple[Role, int], Any]

_FUSED = "ffn_gate_up_exps.weight"


def dequantized_matrices(pack: Pack) -> dict[tuple[Role, int], np.ndarray]:
    """Float32 [N, K], experts [E, N, K], by role and layer: what a native store has addresses of."""
    matrices = {}
    for role, name in GLOBAL_TENSORS.items():
        if role is Role.OUTPUT and not pack.has(name):
            name = GLOBAL_TENSORS[Role.TOKEN_EMBD]  # tied head
        if pack.has(name):
            matrices[role, 0] = _matrix(pack, name)
    for layer in range(pack.config.num_layers):
        found = _layer(pack, f"blk.{layer}.", LAYER_TENSORS)
        matrices |= {(role, layer): matrix for role, matrix in found.items()}
    return matrices


def dequantized_draft(draft: DraftLayer) -> dict[tuple[Role, int], np.ndarray]:
    """The same of a draft layer: what its store has addresses of, and the model's embedding and head."""
    shared = dequantized_matrices(draft.trunk)
    matrices = {key: shared[key] for key in ((Role.TOKEN_EMBD, 0), (Role.OUTPUT, 0))}
    found = _layer(draft.pack, draft.prefix, {**LAYER_TENSORS, **DRAFT_TENSORS})
    return matrices | {(role, 0): matrix for role, matrix in found.items()}


def _layer(pack: Pack, prefix: str, tensors: dict[Role, str]) -> dict[Role, np.ndarray]:
    matrices = {}
    for role, name in tensors.items():
        if pack.has(prefix + name):
            matrices[role] = _matrix(pack, prefix + name)
            assert (matrices[role].ndim == 3) == (role in EXPERT_ROLES)
    if pack.has(prefix + _FUSED):  # of each expert the gate, then the up projection
        gate, up = np.split(_matrix(pack, prefix + _FUSED), 2, axis=1)
        matrices[Role.FFN_GATE_EXPS] = gate
        matrices[Role.FFN_UP_EXPS] = up
    return matrices


def split_table(matrices: dict[tuple[Role, int], np.ndarray]) -> tuple[Matrices, Matrices]:
    """What goes to the device as operands, and the n-gram table, which numpy reads."""
    table = {key: matrix for key, matrix in matrices.items() if key[0] is Role.NGRAM_TABLE}
    return {key: jnp.asarray(m) for key, m in matrices.items() if key not in table}, table


def plain_ops_of(pack: Pack) -> OpSet:
    """The plain op set over the pack's matrices, as constants: for single blocks."""
    operands, table = split_table(dequantized_matrices(pack))
    return plain_ops({**operands, **table})


def _matrix(pack: Pack, name: str) -> np.ndarray:
    info = pack.tensor(name)
    cols, *outer = info.shape
    rows = int(np.prod(outer, dtype=int))
    values = dequantize_ref(int(info.type), pack.view(name), rows, cols)
    return values.reshape(*(outer[::-1] or [1]), cols)
