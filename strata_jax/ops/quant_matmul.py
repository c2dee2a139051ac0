"""Activations times GGUF matrices. Native side: `ffi/ops/quant_matmul.h`."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

from strata_jax.ops.native import CPU, Backend, int64s
from strata_jax.ops.roles import Role


def quant_matmul(
    x: Float32[Array, "T K"],
    live: Int32[Array, ""],
    *,
    store: int,
    layer: int,
    roles: Sequence[Role],
    num_columns: int,
    backend: Backend = CPU,
) -> Float32[Array, "T N"]:
    """The products of `x` with the matrices `roles` of a layer, side by side.

    Quantised matrices take the input quantised to int8 per 32 values, others as float32, both in the
    order of sums of contract T (numerics.md): a row has the same bits whatever the number of rows.

    Args:
        x: activations; K is the row length of every matrix.
        live: rows that count; the others are zero in the result.
        store: slot of the native weight store.
        layer: whose matrices.
        roles: which, in the order of the result's columns.
        num_columns: N, the sum of the matrices' rows.
        backend: whose kernels.
    """
    out = jax.ShapeDtypeStruct((x.shape[0], num_columns), jnp.float32)
    attributes = {"store": np.int64(store), "layer": np.int64(layer)}
    workspace = backend.workspace("quant_matmul", store, layer, list(roles), x.shape[0])
    (y,) = backend.call("quant_matmul", [out], workspace=workspace)(
        x, live, **attributes, roles=int64s(roles)
    )
    return y


def quant_matmul_ref(
    x: Float32[Array, "T K"],
    live: Int32[Array, ""],
    *,
    matrices: Sequence[Float32[Array, "N K"]],
) -> Float32[Array, "T N"]:
    """What `quant_matmul` approximates, on dequantised matrices: it leaves out the int8 activation.

    Bits are specified by `quant_matmul_exact` (quant_matmul_ref.py, numpy) and the scalar kernels.
    """
    rows = jnp.arange(x.shape[0])[:, None] < live
    return jnp.where(rows, jnp.concatenate([x @ w.T for w in matrices], axis=1), 0.0)
