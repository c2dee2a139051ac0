"""Token embeddings. Native side: `ffi/ops/embed_rows.h`."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

from strata_jax.ops.native import CPU, Backend
from strata_jax.ops.roles import Role


def embed_rows(
    ids: Int32[Array, " T"],
    live: Int32[Array, ""],
    *,
    store: int,
    width: int,
    backend: Backend = CPU,
) -> Float32[Array, "T D"]:
    """Rows `ids` of the token embedding, dequantised from the file's own blocks.

    Rows at and past `live` are zero and their ids are not read; an id outside the table is an error.
    """
    out = jax.ShapeDtypeStruct((ids.shape[0], width), jnp.float32)
    attributes = {"store": np.int64(store), "role": np.int64(Role.TOKEN_EMBD)}
    (rows,) = backend.call("embed_rows", [out])(ids, live, **attributes)
    return rows


def embed_rows_ref(
    ids: Int32[Array, " T"], live: Int32[Array, ""], *, table: Float32[Array, "V D"]
) -> Float32[Array, "T D"]:
    """What `embed_rows` must equal, in plain jnp."""
    rows = jnp.arange(ids.shape[0])[:, None] < live
    return jnp.where(rows, table[jnp.where(rows[:, 0], ids, 0)], 0.0)
