"""The question for a step's n-gram rows, ahead of the layer that wants them.

Native on devices only, `ffi/cuda/ops/ngram_ask.h`, and only where the host reads the table: elsewhere the
rows are there when `ngram_rows` looks, and nobody need be asked.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from strata_jax.config import NgramConfig
from strata_jax.ops.native import Backend, int64s


def ngram_ask(
    ids: Int32[Array, " T"],
    tokens: Int32[Array, "T N"],
    live: Int32[Array, ""],
    *,
    table: int,
    ngram: NgramConfig,
    backend: Backend,
) -> Int32[Array, " T"]:
    """The ids as they are, after the host was told which rows of the table it will be asked for.

    Args:
        ids: of the step, changed in place by nothing: who works with the result comes after the question.
        tokens: as `ngram_rows` of the same step will get them.
        live: rows that count.
        table: slot of a table that the host reads (`weights/device_table.py`).
        ngram: multipliers, offsets and sizes of the hash heads.
        backend: whose kernels.
    """
    call = backend.call("ngram_ask", [jax.ShapeDtypeStruct(ids.shape, jnp.int32)], aliases={0: 0})
    (passed,) = call(
        ids,
        tokens,
        live,
        table=np.int64(table),
        multipliers=int64s(ngram.multipliers),
        offsets=int64s(ngram.head_offsets),
        sizes=int64s(ngram.head_sizes),
    )
    return passed


def ngram_ask_ref(
    ids: Int32[Array, " T"],
    tokens: Int32[Array, "T N"],
    live: Int32[Array, ""],
    *,
    ngram: NgramConfig,
) -> Int32[Array, " T"]:
    """What `ngram_ask` must equal: the ids."""
    del tokens, live, ngram
    return ids
