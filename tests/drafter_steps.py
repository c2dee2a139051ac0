"""A draft layer that lies open, for tests: the whole layer over known rows, from any cells on."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from strata_jax.config import HiddenNorm, KvType
from strata_jax.engine.loader import load_draft_params, load_params, primary_sharding
from strata_jax.model.draft import DraftOps, append_rows, draft_rows, draft_streams
from strata_jax.model.state import empty_cells, empty_state, num_cells
from strata_jax.model.transformer import forward
from strata_jax.ops.native import CPU
from strata_jax.ops.roles import Role
from strata_jax.ops.sets import OpSet, native_ops, plain_ops
from strata_jax.weights.draft_layer import DraftLayer
from strata_jax.weights.draft_store import open_draft_store
from strata_jax.weights.matrices import fill_store
from strata_jax.weights.ngram_table import NgramTable
from strata_jax.weights.pack import Pack
from tests.plain import dequantized_draft, dequantized_matrices

CELLS = 512


def draft_ops(layer: OpSet, shared: OpSet, vocab_size: int) -> DraftOps:
    """Ops of a draft layer that takes the embedding and the head from `shared`."""
    head = functools.partial(
        shared.quant_matmul, layer=0, roles=(Role.OUTPUT,), num_columns=vocab_size
    )
    return DraftOps(layer=layer, embed_rows=shared.embed_rows, head=head)


def residuals(pack: Pack, ids: np.ndarray, *, plain: bool = False) -> np.ndarray:
    """Float32 [T, J, D]: the model's last residual at every position, read as one tile."""
    rows = -(-len(ids) // 64) * 64
    padded = np.zeros(rows, np.int32)
    padded[: len(ids)] = ids
    if plain:
        ops = plain_ops(dequantized_matrices(pack))
    else:
        store, table = fill_store(pack), NgramTable(pack, "mmap", print)
        ops = native_ops(store.slot, table=table.slot)
    state = empty_state(pack.config, num_cells(CELLS, rows), "f32", 0)
    params = load_params(pack, primary_sharding("cpu"))
    run = jax.jit(functools.partial(forward, ops, pack.config))
    found, _ = run(params, state, padded, np.int32(0), np.int32(len(ids)))
    return np.asarray(found.written())[: len(ids)]


class OpenDraft:
    """Runs the layer over rows; `plain` by the jnp twins on dequantised matrices."""

    def __init__(
        self,
        draft: DraftLayer,
        *,
        reading: HiddenNorm = "whole",
        plain: bool = False,
        kv: KvType = "f32",
    ):
        self.config = draft.trunk.config
        self.kv: KvType = kv
        if plain:
            ops = shared = plain_ops(dequantized_draft(draft))
        else:
            self._stores = open_draft_store(draft, None, CPU, print), fill_store(draft.trunk)
            ops, shared = (native_ops(store.slot) for store in self._stores)
        ops = draft_ops(ops, shared, self.config.vocab_size)
        params = load_draft_params(draft, None, primary_sharding("cpu"))

        def whole(cells, ids, hidden, origin, pos, live):
            streams = draft_streams(ops, self.config, reading, params, ids, hidden, live)
            return draft_rows(ops, self.config, params, cells, streams, origin, pos, live)

        def known(cells, ids, hidden, origin, pos, live):
            streams = draft_streams(ops, self.config, reading, params, ids, hidden, live)
            return append_rows(ops, self.config, params, cells, streams, origin, pos, live)

        self.whole = jax.jit(whole)
        """(cells, ids [T], hidden [T, J, D], origin, pos, live) -> logits, hidden, cells"""
        self.known = jax.jit(known)
        """The same arguments -> cells"""

    def empty(self):
        """Cells before the first row."""
        return empty_cells(self.config, num_cells(CELLS, 256), self.kv)

    def logits(self, ids: np.ndarray, residual: np.ndarray) -> np.ndarray:
        """Logits [T, V] of every row, teacher-forced, all rows at once."""
        numbers = np.int32(0), np.int32(0), np.int32(len(ids))
        rows = jnp.asarray(ids, jnp.int32), before(residual)
        return np.asarray(self.whole(self.empty(), *rows, *numbers)[0])


def before(residual: np.ndarray) -> np.ndarray:
    """What the rows take: the residual of the position before each, zeros for the first."""
    return np.concatenate([np.zeros_like(residual[:1]), residual[:-1]])
