"""Products of activations with GGUF rows in numpy: the specification of the native products.

What the native `quant_matmul` and every expert tier must equal bit for bit. Written to be read, not
to be fast. Source: numerics.md, contract T.
"""

import numpy as np

from strata_jax.ops.numerics_ref import BLOCK, accumulate_row, fma_rn, quantize_rows_ref
from strata_jax.ops.unpack_ref import UnpackedRows, dequantize_ref, layout_of, unpack_rows_ref


def quant_matmul_exact(
    x: np.ndarray, type_id: int, data: bytes | np.ndarray, num_rows: int
) -> np.ndarray:
    """Multiplies activations with the transpose of a GGUF matrix.

    Quantised types: the activation is quantised to int8 per 32 values, block products are exact
    integers, floats are combined in one order. F32, F16 and BF16: float32 throughout.

    Args:
        x: float32 [T, K], K a multiple of the type's block.
        type_id: ggml type id of the matrix.
        data: the matrix's bytes, N rows of K values.
        num_rows: N.

    Returns:
        float32 [T, N].

    Raises:
        ValueError: for an unknown type, a K that does not fit or a wrong number of bytes.
    """
    K = x.shape[1]
    if layout_of(type_id).form == "float":
        return _float_product(x, dequantize_ref(type_id, data, num_rows, K))
    if K % BLOCK:
        raise ValueError(f"quant_matmul_exact: rows of {K} values, expected a multiple of {BLOCK}")
    codes, scales = quantize_rows_ref(x)
    return _quantized_product(codes, scales, unpack_rows_ref(type_id, data, num_rows, K))


def _float_product(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Multiplies x [T, K] by w [N, K], float32: a chain of fma a block, blocks added in order.

    The last block of a row may be short.
    """

    def add_block(block: int, acc: np.ndarray) -> np.ndarray:
        p = np.zeros_like(acc)
        for i in range(block * BLOCK, min((block + 1) * BLOCK, x.shape[1])):
            p = fma_rn(w[None, :, i], x[:, i, None], p)
        with np.errstate(all="ignore"):
            return acc + p

    return accumulate_row(-(-x.shape[1] // BLOCK), (x.shape[0], w.shape[0]), add_block)


def _quantized_product(codes: np.ndarray, scales: np.ndarray, rows: UnpackedRows) -> np.ndarray:
    """Multiplies codes int8 [T, K] of scales float32 [T, K / 32] by N unpacked rows."""

    def add_block(block: int, acc: np.ndarray) -> np.ndarray:
        dx = scales[:, block, None]  # [T, 1]
        total, minimum = _block_integers(codes, rows, block)
        with np.errstate(all="ignore"):
            acc = fma_rn(total, rows.d[None, :, block] * dx, acc)
            if rows.m is not None:
                acc = fma_rn(minimum, rows.m[None, :, block] * dx, acc)
        return acc

    return accumulate_row(rows.d.shape[1], (codes.shape[0], rows.d.shape[0]), add_block)


def _block_integers(
    codes: np.ndarray, rows: UnpackedRows, block: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns I and J of one block as float32 [T, N]; both are integers below 2**24, so exact.

    A block is taken as two groups of 16 values; types with one group of 32 have factor 1 in both.
    """
    total = np.int64(0)
    minimum = np.int64(0)
    for group in (2 * block, 2 * block + 1):
        span = slice(group * BLOCK // 2, (group + 1) * BLOCK // 2)
        q = codes[:, span].astype(np.int64)  # [T, 16]
        factor = 1 if rows.k is None else rows.k[:, group].astype(np.int64)
        offset = 1 if rows.n is None else rows.n[:, group].astype(np.int64)
        total = total + factor * (q @ rows.codes[:, span].astype(np.int64).T)
        minimum = minimum + offset * q.sum(axis=1)[:, None]
    return np.asarray(total, np.float32), np.asarray(minimum, np.float32)
