import ctypes
import ctypes.util
from fractions import Fraction

import numpy as np
import pytest

from strata_jax.ops.numerics_ref import (
    accumulate_row,
    exp_bounded_ref,
    fma_rn,
    quantize_rows_ref,
    silu_mul_ref,
)


def bits_of(values):
    return np.asarray(values, np.float32).view(np.uint32)


def random_floats(rng, shape):
    """Floats of every exponent, infinities and NaN among them."""
    return rng.integers(0, 2**32, shape, dtype=np.uint32).view(np.float32)


def libm_fma(a, b, c):
    """The C library's fmaf, one correctly rounded operation."""
    fmaf = ctypes.CDLL(ctypes.util.find_library("m")).fmaf
    fmaf.restype = ctypes.c_float
    fmaf.argtypes = [ctypes.c_float] * 3
    return np.array([fmaf(*each) for each in zip(a, b, c)], np.float32)


def nearest_float32(exact):
    """A Fraction rounded to nearest even, in exact arithmetic; normal range only."""
    exponent = 0
    while abs(exact) >= 2 ** (exponent + 24):
        exponent += 1
    while abs(exact) < 2 ** (exponent + 23):
        exponent -= 1
    return np.float32(round(exact / Fraction(2) ** exponent) * 2.0**exponent)


class TestFma:
    def test_equals_the_c_library_on_random_bits(self):
        rng = np.random.default_rng(0)
        a, b, c = random_floats(rng, (3, 20000))

        got, expected = fma_rn(a, b, c), libm_fma(a, b, c)

        nan = np.isnan(expected)
        np.testing.assert_array_equal(np.isnan(got), nan)
        np.testing.assert_array_equal(bits_of(got)[~nan], bits_of(expected)[~nan])

    def test_equals_the_c_library_where_product_and_addend_nearly_cancel(self):
        rng = np.random.default_rng(1)
        a, b, noise = rng.standard_normal((3, 20000)).astype(np.float32)
        c = (-a * b * (1 + noise * np.float32(2**-22))).astype(np.float32)

        np.testing.assert_array_equal(bits_of(fma_rn(a, b, c)), bits_of(libm_fma(a, b, c)))

    @pytest.mark.parametrize("addend", [2.0**30 + 2**7, 2.0**30 + 3 * 2**7, -(2.0**30) - 2**7])
    @pytest.mark.parametrize("factor", [1 - 2.0**-23, 1 + 2.0**-23, -1 - 2.0**-23, 2.0**-23 - 1])
    def test_breaks_a_tie_by_the_part_below_float64(self, addend, factor):
        # The product is +-64 (1 - 2**-46) or +-64 (1 + 2**-22 + 2**-46): half a step of the addend,
        # up to a part so small that float64 drops it, which leaves a tie to the first of them.
        a, b, c = np.float32(64 + 2.0**-17), np.float32(factor), np.float32(addend)

        got = fma_rn(a, b, c)

        exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
        assert got == nearest_float32(exact)

    def test_keeps_subnormals(self):
        smallest = np.float32(2.0**-149)

        assert bits_of(fma_rn(smallest, np.float32(1), np.float32(0))) == 1
        assert bits_of(fma_rn(smallest, np.float32(0.5), smallest)) == 2

    def test_keeps_the_sign_of_zero(self):
        zero = np.float32(0)

        assert bits_of(fma_rn(-zero, np.float32(1), -zero)) == 0x80000000
        assert bits_of(fma_rn(np.float32(1), np.float32(1), np.float32(-1))) == 0

    def test_broadcasts(self):
        got = fma_rn(np.ones((3, 1), np.float32), np.arange(4, dtype=np.float32), np.float32(1))

        np.testing.assert_array_equal(got, np.tile(np.arange(1, 5, dtype=np.float32), (3, 1)))


class TestQuantizeRows:
    def test_gives_codes_and_scale_of_a_known_block(self):
        x = np.linspace(-127, 127, 32, dtype=np.float32)[None]

        codes, scales = quantize_rows_ref(x)

        np.testing.assert_array_equal(codes[0], np.rint(x[0]))
        assert scales[0, 0] == np.float32(127) * np.float32(float.fromhex("0x1.020408p-7"))

    def test_rounds_ties_to_even(self):
        x = np.zeros((1, 32), np.float32)
        x[0, :6] = [127, 0.5, 1.5, 2.5, -0.5, -1.5]

        codes, _ = quantize_rows_ref(x)

        np.testing.assert_array_equal(codes[0, :6], [127, 0, 2, 2, 0, -2])

    def test_keeps_codes_within_127_at_every_magnitude(self):
        rng = np.random.default_rng(2)
        magnitude = np.float32(2.0) ** rng.integers(-95, 127, (500, 1)).astype(np.float32)
        x = rng.uniform(-1, 1, (500, 32)).astype(np.float32) * magnitude

        codes, scales = quantize_rows_ref(x)

        assert np.abs(codes.astype(np.int32)).max(axis=1).tolist() == [127] * 500
        np.testing.assert_allclose(codes, x / scales, atol=0.501, rtol=0)

    def test_treats_blocks_below_the_floor_as_zero(self):
        x = np.full((2, 32), 2.0**-100, np.float32)
        x[1] = np.nextafter(np.float32(2.0**-100), np.float32(0))

        codes, scales = quantize_rows_ref(x)

        assert codes[0].tolist() == [127] * 32
        assert not codes[1].any()
        assert bits_of(scales[1, 0]) == 0

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    def test_marks_a_block_that_is_not_finite_and_no_other(self, bad):
        x = np.ones((1, 64), np.float32)
        x[0, 40] = bad

        codes, scales = quantize_rows_ref(x)

        assert codes[0, :32].tolist() == [127] * 32
        assert not codes[0, 32:].any()
        assert bits_of(scales[0, 1]) == 0x7FC00000
        assert np.isfinite(scales[0, 0])

    def test_takes_zero_rows(self):
        codes, scales = quantize_rows_ref(np.zeros((0, 64), np.float32))

        assert codes.shape == (0, 64)
        assert scales.shape == (0, 2)

    def test_rejects_rows_that_are_not_whole_blocks(self):
        with pytest.raises(ValueError, match="rows of 40 values, expected a multiple of 32"):
            quantize_rows_ref(np.zeros((1, 40), np.float32))


class TestSilu:
    def test_is_within_two_steps_of_float64(self):
        gate = np.linspace(-80, 80, 40001, dtype=np.float32)
        up = np.full_like(gate, 3)

        got = silu_mul_ref(gate, up)

        exact = gate.astype(np.float64) / (1 + np.exp(-gate.astype(np.float64))) * 3
        np.testing.assert_allclose(got, exact, rtol=3 * 2.0**-23, atol=2.0**-126)

    def test_has_an_exponential_accurate_to_two_steps(self):
        c = np.linspace(-87, 87, 50001, dtype=np.float32)

        np.testing.assert_allclose(
            exp_bounded_ref(c), np.exp(c.astype(np.float64)), rtol=2 * 2.0**-23
        )

    def test_follows_the_documented_steps(self):
        # e**-1 / ... written out once with scalars: n = -1, r = -1 + ln 2.
        f = np.float32
        r = fma_rn(f(1), f(float.fromhex("0x1.62ep-1")), f(-1))
        r = fma_rn(f(1), f(float.fromhex("0x1.0bfbe8p-15")), r)
        e = f(float.fromhex("0x1.6c16c2p-10"))
        for digits in ("0x1.111112p-7", "0x1.555556p-5", "0x1.555556p-3", "0x1p-1", "1", "1"):
            e = fma_rn(e, r, f(float.fromhex(digits)))
        expected = (f(1) / (f(1) + e * f(0.5))) * f(7)

        assert silu_mul_ref(np.array([1], f), np.array([7], f))[0] == expected

    def test_handles_zeros_infinities_and_nan(self):
        gate = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e30, -1e30], np.float32)

        got = silu_mul_ref(gate, np.ones_like(gate))

        assert bits_of(got[:2]).tolist() == [0, 0x80000000]
        assert got[2] == np.inf
        assert got[3] == -np.inf
        assert np.isnan(got[4])
        assert got[5] == np.float32(1e30)
        # e**87 stands in for the larger exponential, so the tail is tiny against the gate, not 0.
        assert -1e-7 < got[6] / 1e30 < 0


class TestAccumulateRow:
    def test_adds_segments_of_eight_blocks_in_order(self):
        calls = []

        def add_block(block, acc):
            calls.append((block, float(acc[0])))
            return acc + np.float32(1)

        total = accumulate_row(20, (1,), add_block)

        assert [block for block, _ in calls] == list(range(20))
        assert [acc for _, acc in calls] == [float(i % 8) for i in range(20)]
        assert total.tolist() == [20.0]

    def test_depends_on_the_split_into_segments(self):
        # 2**24 in the first segment swallows ones added singly, not a segment's sum of them.
        values = np.array([2.0**24] + [0.0] * 7 + [1.0] * 8, np.float32)

        total = accumulate_row(16, (), lambda block, acc: acc + values[block])

        assert total == np.float32(2.0**24 + 8)
