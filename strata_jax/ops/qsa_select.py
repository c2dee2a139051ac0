"""The blocks of cells a row attends to. Native side: `ffi/ops/qsa_select.h`."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

from strata_jax.ops.native import CPU, Backend


def qsa_select(
    index_q: Float32[Array, "T IH IC"],
    index_keys: Float32[Array, "M/16 IC 16"],
    pos: Int32[Array, ""],
    live: Int32[Array, ""],
    *,
    store: int = -1,
    ratio: int,
    num_blocks: int,
    backend: Backend = CPU,
) -> Int32[Array, "T NB"]:
    """The `num_blocks` best complete blocks of each row, ascending, filled up with -1.

    The choice is canonical: highest score, then lowest block. Time follows the cells a row sees.

    Args:
        index_q: indexer queries after norm and rotation.
        index_keys: pooled keys of complete blocks, 16 side by side.
        pos: position of row 0.
        live: rows that count; the others get -1 only.
        store: slot of a device's store, whose peer may take rows of a tile; -1 = none does.
        ratio: cells per block.
        num_blocks: NB, the budget in blocks.
        backend: whose kernels.

    Source: model.md, section 5.
    """
    out = jax.ShapeDtypeStruct((index_q.shape[0], num_blocks), jnp.int32)
    workspace = backend.workspace("qsa_select", index_q.shape[0], index_keys.shape[0])
    call = backend.call("qsa_select", [out], workspace=workspace)
    attributes = {"store": np.int64(store)} if backend.is_device else {}
    (blocks,) = call(index_q, index_keys, pos, live, ratio=np.int64(ratio), **attributes)
    return blocks


def qsa_select_ref(index_q, index_keys, pos, live, *, ratio, num_blocks):
    """What `qsa_select` must equal, in plain jnp; it scores the whole cache."""
    T = index_q.shape[0]
    keys = jnp.swapaxes(index_keys, 1, 2).reshape(-1, index_keys.shape[1])  # [M, IC]
    scores = jnp.sum(jnp.maximum(jnp.einsum("thc,mc->tmh", index_q, keys), 0.0), axis=-1) + 0.0
    rows = jnp.arange(T)
    complete = (pos + rows + 1) // ratio
    index = jnp.arange(keys.shape[0])
    usable = index < complete[:, None]
    # A stable descending sort keeps equal scores in ascending order of their block.
    order = jnp.argsort(jnp.where(usable, -scores, jnp.inf), axis=1, stable=True)
    count = min(num_blocks, keys.shape[0])
    chosen = jnp.where(jnp.arange(count) < complete[:, None], order[:, :count], keys.shape[0])
    chosen = jnp.sort(chosen, axis=1)
    chosen = jnp.pad(chosen, ((0, 0), (0, num_blocks - count)), constant_values=keys.shape[0])
    keep = (chosen < keys.shape[0]) & (rows < live)[:, None]
    return jnp.where(keep, chosen, -1).astype(jnp.int32)
