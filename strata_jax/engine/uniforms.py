"""The numbers that decide draws: a function of seed and position alone. Plain numpy, imports no jax."""

import numpy as np

_BLOCK = 64
"""Positions whose numbers are worked out at once: one alone costs nearly as much."""
_ROUNDS = 10
_FACTORS = np.asarray([0xD2E7470EE14C6C93, 0xCA5A826395121157], np.uint64)
_STEPS = np.asarray([0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B], np.uint64)
_HALF, _LOW = np.uint64(32), np.uint64(2**32 - 1)


class Uniforms:
    """Those of one seed, for positions that follow one another more often than not."""

    def __init__(self, seed: int):
        self._seed = seed
        self._first = -_BLOCK
        self._known = np.zeros(0)

    def at(self, position: int) -> float:
        """See `uniforms`."""
        if not self._first <= position < self._first + _BLOCK:
            self._first = position // _BLOCK * _BLOCK
            self._known = uniforms(self._seed, self._first, _BLOCK)
        return float(self._known[position - self._first])


def uniforms(seed: int, first: int, count: int) -> np.ndarray:
    """Float64 [count] in [0, 1) for positions from `first` on.

    The upper 53 bits of the first word at counter position + 1 under the seed as key.

    Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3" (Philox 4x64-10).
    """
    none = np.zeros(count, np.uint64)
    a, b, c, d = np.arange(first + 1, first + count + 1).astype(np.uint64), none, none, none
    key = np.asarray([seed & (2**64 - 1), seed >> 64], np.uint64)
    for _ in range(_ROUNDS):
        (high_a, low_a), (high_c, low_c) = _product(a, _FACTORS[0]), _product(c, _FACTORS[1])
        a, b, c, d = high_c ^ b ^ key[0], low_c, high_a ^ d ^ key[1], low_a
        key = key + _STEPS
    return (a >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _product(x: np.ndarray, factor: np.uint64) -> tuple[np.ndarray, np.ndarray]:
    """The upper and the lower 64 bits of x * factor."""
    low, high = x & _LOW, x >> _HALF
    f_low, f_high = factor & _LOW, factor >> _HALF
    middle = (low * f_low >> _HALF) + high * f_low
    crossed = low * f_high + (middle & _LOW)
    return high * f_high + (middle >> _HALF) + (crossed >> _HALF), x * factor
