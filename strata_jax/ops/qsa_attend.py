"""Attention of each row over its selected cells. Native side: `ffi/ops/qsa_attend.h`."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

from strata_jax.ops.cells import Cells, scale_groups, widen_ref
from strata_jax.ops.native import CPU, Backend


def qsa_attend(
    q: Float32[Array, "T H C"],
    proj: Float32[Array, "T P"],
    keys: Cells,
    values: Cells,
    blocks: Int32[Array, "T NB"],
    scales: Float32[Array, "S K 2G"],
    pos: Int32[Array, ""],
    live: Int32[Array, ""],
    *,
    store: int = -1,
    ratio: int,
    backend: Backend = CPU,
) -> Float32[Array, "T H*C"]:
    """Attends row t to the cells of `blocks[t]` and the unfinished block at its end, then gates.

    Cells no list names are not read. The order of sums depends on the list alone, so a row has the same
    bits in a window of any width. Arithmetic is float32 over what the stored values stand for.

    Args:
        q: queries after norm and rotation.
        proj: the projection that holds each head's gate behind its query, at (2 h + 1) C.
        keys: key cells [S, K, C]; float32, float16 or int8 (`ops/cells.py`).
        values: value cells, of the same type.
        blocks: ascending complete blocks, -1 fills up.
        scales: of int8 cells, a head's key's before its value's; any S else.
        pos: position of row 0.
        live: rows that count; the others are zero.
        store: slot of a device's store, whose peer may take rows of a tile; -1 = none does.
        ratio: cells per block; 0 = dense attention over all cells so far.
        backend: whose kernels.

    Source: Vaswani et al. 2017, eq. 1, restricted to the cells; model.md, section 4.
    """
    out = jax.ShapeDtypeStruct((q.shape[0], q.shape[1] * q.shape[2]), jnp.float32)
    sizes = (keys.shape[0], blocks.shape[1], ratio)
    workspace = backend.workspace("qsa_attend", *q.shape, *sizes)
    call = backend.call("qsa_attend", [out], workspace=workspace)
    attributes = {"store": np.int64(store)} if backend.is_device else {}
    operands = (q, proj, keys, values, blocks, scales, pos, live)
    (y,) = call(*operands, ratio=np.int64(ratio), **attributes)
    return y


def qsa_attend_ref(q, proj, keys, values, blocks, scales, pos, live, *, ratio):
    """What `qsa_attend` must equal, in plain jnp; it walks the whole cache under a mask."""
    T, H, C = q.shape
    S, K, _ = keys.shape
    cell = jnp.arange(S)
    visible = pos + jnp.arange(T)[:, None] + 1
    if ratio > 0:
        tail = visible // ratio * ratio
        listed = jnp.any(blocks[:, :, None] == (cell // ratio)[None, None, :], axis=1)
        mask = jnp.where(cell >= tail, cell < visible, listed)
    else:
        mask = cell < visible
    groups = scale_groups(C)
    keys = jnp.repeat(widen_ref(keys, scales[..., :groups]), H // K, axis=1)
    values = widen_ref(values, scales[..., groups:])
    # Cells that nobody wrote may hold anything, NaN included: they are replaced, not multiplied.
    used = jnp.any(mask, axis=0)[:, None, None]
    values = jnp.repeat(jnp.where(used, values, 0.0), H // K, axis=1)
    scores = jnp.einsum("thc,shc->ths", q, jnp.where(used, keys, 0.0)) * C**-0.5
    weights = jax.nn.softmax(jnp.where(mask[:, None, :], scores, -jnp.inf), axis=-1)
    gate = jax.nn.sigmoid(proj[:, : 2 * H * C].reshape(T, H, 2, C)[:, :, 1])
    out = (jnp.einsum("ths,shc->thc", weights, values) * gate).reshape(T, H * C)
    return jnp.where(jnp.arange(T)[:, None] < live, out, 0.0)
