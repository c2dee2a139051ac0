"""The hashed n-gram embedding. Native side: `ffi/ops/ngram_rows.h`."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

from strata_jax.config import NgramConfig
from strata_jax.ops.native import CPU, Backend, int64s


def ngram_rows(
    tokens: Int32[Array, "T N"],
    streams: Float32[Array, "T J D"],
    live: Int32[Array, ""],
    *,
    table: int,
    ngram: NgramConfig,
    backend: Backend = CPU,
) -> Float32[Array, "T W*C"]:
    """The table rows of each token's n-grams, side by side, from wherever the table lies.

    Args:
        tokens: each row's token and the N-1 before it, newest first, padded with EOS by the caller.
        streams: what the rows will be added to. Nothing of it is read: where the host reads the table, the
            device waits for the rows, and it is to do the layers before them first.
        live: rows that count; the others are zero in the result.
        table: slot of the open table (`weights/ngram_table.py`).
        ngram: multipliers, offsets and sizes of the hash heads.
        backend: whose kernels.

    Source: model.md, section 7.
    """
    width = ngram.num_heads * ngram.row_width
    out = jax.ShapeDtypeStruct((tokens.shape[0], width), jnp.float32)
    (rows,) = backend.call("ngram_rows", [out])(
        tokens,
        streams,
        live,
        table=np.int64(table),
        multipliers=int64s(ngram.multipliers),
        offsets=int64s(ngram.head_offsets),
        sizes=int64s(ngram.head_sizes),
    )
    return rows


def ngram_row_ids_ref(tokens: np.ndarray, ngram: NgramConfig) -> np.ndarray:
    """Table rows [T, W] of token n-grams [T, N] (newest first), in plain Python integers."""
    groups = ngram.ngram_size - 1
    rows = np.zeros((len(tokens), ngram.num_heads), np.int64)
    for t, context in enumerate(tokens.tolist()):
        for head in range(ngram.num_heads):
            n = head // (ngram.num_heads // groups) + 2
            value = 0
            for place in range(n):
                value ^= context[place] * ngram.multipliers[place]
            rows[t, head] = value % ngram.head_sizes[head] + ngram.head_offsets[head]
    return rows


def ngram_rows_ref(
    tokens: np.ndarray, streams: np.ndarray, live: int, *, table: np.ndarray, ngram: NgramConfig
) -> np.ndarray:
    """What `ngram_rows` must equal, in numpy: 64-bit integers are not jnp's by default."""
    del streams
    rows = table[ngram_row_ids_ref(tokens, ngram)].reshape(len(tokens), -1)
    return np.where(np.arange(len(tokens))[:, None] < live, rows, np.float32(0))
