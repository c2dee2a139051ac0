"""The float arithmetic of contract T in numpy: what `ffi/common/numerics.h` must equal bit for bit.

Every function is one IEEE float32 operation, or a documented sequence of them, element by element.
numpy multiplies, adds and divides float32 arrays with one rounding each and never fuses; the fused
operation is built from exact float64 steps. Source: numerics.md, contract T.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

BLOCK = 32
"""Values that share one activation scale."""

SEGMENT_BLOCKS = 8
"""Blocks of 32 in a segment, the unit in which a row's sum is split."""

_QUIET_NAN = np.array(0x7FC00000, np.uint32).view(np.float32)
_QUANT_FLOOR = np.float32(2.0**-100)
_INV_127 = np.float32(float.fromhex("0x1.020408p-7"))
_SILU_BOUND = np.float32(87)
_LOG2_E = np.float32(float.fromhex("0x1.715476p+0"))
_LN2_HI = np.float32(float.fromhex("0x1.62ep-1"))
_LN2_LO = np.float32(float.fromhex("0x1.0bfbe8p-15"))
_EXP_COEFFICIENTS = tuple(
    np.float32(float.fromhex(digits))
    for digits in (
        "0x1.6c16c2p-10",  # 1/720
        "0x1.111112p-7",  # 1/120
        "0x1.555556p-5",  # 1/24
        "0x1.555556p-3",  # 1/6
        "0x1p-1",
        "0x1p+0",
        "0x1p+0",
    )
)


def fma_rn(a: ArrayLike, b: ArrayLike, c: ArrayLike) -> np.ndarray:
    """Returns a * b + c rounded once to float32 (nearest even), broadcasting its arguments.

    The product of two float32 is exact in float64. The sum with c is not, so its error is computed
    too (TwoSum) and the float64 sum is rounded to odd: of the two neighbours of the exact value, the
    one whose last bit is set. Rounding that to float32 equals rounding the exact value, because
    float64 has more than two bits to spare.

    Source: Boldo and Melquiond 2008, "Emulation of FMA and correctly rounded sums", theorem 1.
    """
    with np.errstate(all="ignore"):
        product = np.asarray(a, np.float64) * np.asarray(b, np.float64)
        addend = np.asarray(c, np.float64)
        total = np.asarray(product + addend)
        addend_part = total - product
        error = (product - (total - addend_part)) + (addend - addend_part)
        bits = total.view(np.int64)
        to_odd = np.isfinite(total) & (error != 0) & (bits & 1 == 0)
        # A float64's bits count upwards away from zero.
        step = np.where((error > 0) == (total > 0), 1, -1)
        odd = np.where(to_odd, bits + step, bits).view(np.float64)
        return odd.astype(np.float32)


def accumulate_row(
    num_blocks: int,
    shape: tuple[int, ...],
    add_block: Callable[[int, np.ndarray], np.ndarray],
) -> np.ndarray:
    """Sums a row's blocks in the documented order, for `shape` rows at a time.

    Args:
        num_blocks: blocks of 32 in the row.
        shape: shape of the result.
        add_block: takes a block's number and the sum so far of its segment, returns the new sum.

    Returns:
        float32 of `shape`: segments of 8 blocks, each from +0 in ascending order of blocks, added to
        a total from +0 in ascending order of segments.
    """
    total = np.zeros(shape, np.float32)
    for first in range(0, num_blocks, SEGMENT_BLOCKS):
        acc = np.zeros(shape, np.float32)
        for block in range(first, min(first + SEGMENT_BLOCKS, num_blocks)):
            acc = add_block(block, acc)
        with np.errstate(all="ignore"):
            total = total + acc
    return total


def quantize_rows_ref(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Quantises activations to int8 with one scale per 32 values.

    Args:
        x: float32 [T, K], K a multiple of 32.

    Returns:
        codes, int8 [T, K] within +-127, and scales, float32 [T, K / 32]. A block whose largest
        magnitude is below 2**-100 has codes 0 and scale +0; one with a value that is not finite has
        codes 0 and a quiet NaN as scale.

    Raises:
        ValueError: if K is not a multiple of 32.
    """
    T, K = x.shape
    if K % BLOCK:
        raise ValueError(f"quantize_rows_ref: rows of {K} values, expected a multiple of {BLOCK}")
    blocks = np.asarray(x, np.float32).reshape(T, K // BLOCK, BLOCK)
    finite = np.isfinite(blocks).all(axis=2)
    largest = np.where(finite, np.abs(blocks).max(axis=2), np.float32(0))
    live = largest >= _QUANT_FLOOR
    inverse = np.float32(127) / np.where(live, largest, np.float32(1))
    scaled = np.where(live[..., None], blocks, np.float32(0)) * inverse[..., None]
    scales = np.where(live, largest * _INV_127, np.float32(0))
    scales = np.where(finite, scales, _QUIET_NAN)
    return np.rint(scaled).astype(np.int8).reshape(T, K), scales.astype(np.float32)


def exp_bounded_ref(c: np.ndarray) -> np.ndarray:
    """Returns e**c for float32 |c| <= 87: 2**n times a degree-6 polynomial in c - n ln 2.

    ln 2 is held in two parts, the first short enough for n * part to be exact.
    """
    n = np.rint(c * _LOG2_E)
    r = fma_rn(-n, _LN2_LO, fma_rn(-n, _LN2_HI, c))
    e = np.broadcast_to(_EXP_COEFFICIENTS[0], r.shape)
    for coefficient in _EXP_COEFFICIENTS[1:]:
        e = fma_rn(e, r, coefficient)
    power = ((n.astype(np.int32) + 127) << 23).view(np.float32)
    return e * power


def silu_mul_ref(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """Returns gate / (1 + e**-gate) * up in float32, element by element; a NaN gate gives NaN.

    Args:
        gate: float32, any shape.
        up: float32, the same shape.
    """
    gate, up = np.asarray(gate, np.float32), np.asarray(up, np.float32)
    is_nan = np.isnan(gate)
    c = np.clip(-np.where(is_nan, np.float32(0), gate), -_SILU_BOUND, _SILU_BOUND)
    with np.errstate(all="ignore"):
        h = (gate / (np.float32(1) + exp_bounded_ref(c))) * up
    return np.where(is_nan, gate, h)
