import numpy as np
import pytest

from strata_jax.ops.numerics_ref import fma_rn, quantize_rows_ref
from strata_jax.ops.quant_matmul_ref import quant_matmul_exact
from strata_jax.ops.unpack_layouts_ref import LAYOUTS
from strata_jax.ops.unpack_ref import dequantize_ref, unpack_rows_ref

F32, F16, BF16, Q4_0, Q4_1, Q8_0, Q2_K, Q6_K, Q2_0 = 0, 1, 30, 2, 3, 8, 10, 14, 42
QUANTIZED = [type_id for type_id, layout in LAYOUTS.items() if layout.form != "float"]

# Where a block's half-precision scales lie, for types that do not start with one.
SCALES_AT = {3: (0, 2), 7: (0, 2), 10: (80, 82), 11: (108,), 12: (0, 2), 13: (0, 2), 14: (208,)}
IQ1_M, MXFP4 = 29, 39


def name_of(type_id):
    return LAYOUTS[type_id].name


def bits_of(values):
    return np.ascontiguousarray(values).view(np.uint32)


def sane_bytes(type_id, num_rows, num_cols, rng):
    """Random rows whose scales lie near 2**-7."""
    layout = LAYOUTS[type_id]
    num_blocks = num_rows * num_cols // layout.block_values
    raw = rng.integers(0, 256, (num_blocks, layout.block_bytes), np.uint8)
    if type_id == MXFP4:
        raw[:, 0] = 121
    elif type_id == IQ1_M:  # 0x2000 = 2**-7, its top nibble in the last of four words
        raw[:, 49:56:2] &= 0x0F
        raw[:, 55] |= 0x20
    else:
        for at in SCALES_AT.get(type_id, (0,)):
            raw[:, at + 1] = 0x20
    return raw.reshape(-1)


def columns_for(type_id):
    return 640 if 640 % LAYOUTS[type_id].block_values == 0 else 512


class TestQuantised:
    @pytest.mark.parametrize("type_id", QUANTIZED, ids=name_of)
    def test_is_near_the_product_of_dequantised_values(self, type_id):
        rng = np.random.default_rng(type_id)
        N, K = 12, columns_for(type_id)
        raw = sane_bytes(type_id, N, K, rng)
        x = rng.standard_normal((5, K)).astype(np.float32)
        codes, scales = quantize_rows_ref(x)
        rounded = codes.astype(np.float64) * np.repeat(scales, 32, axis=1).astype(np.float64)
        w = dequantize_ref(type_id, raw, N, K).astype(np.float64)

        got = quant_matmul_exact(x, type_id, raw, N)

        # Only float32 sums of at most 2 * K / 32 + 3 terms lie between the two.
        atol = 2.0**-24 * (2 * K / 32 + 6) * (np.abs(rounded) @ np.abs(w.T)).max()
        np.testing.assert_allclose(got, rounded @ w.T, rtol=0, atol=atol)

    @pytest.mark.parametrize("type_id", [Q8_0, Q4_1, Q2_K, Q6_K], ids=name_of)
    def test_equals_the_formula_value_by_value(self, type_id):
        rng = np.random.default_rng(1)
        N, K = 2, columns_for(type_id)
        raw = sane_bytes(type_id, N, K, rng)
        x = rng.standard_normal((2, K)).astype(np.float32)
        q, dx = quantize_rows_ref(x)
        rows = unpack_rows_ref(type_id, raw, N, K)

        got = quant_matmul_exact(x, type_id, raw, N)

        for t in range(2):
            for row in range(N):
                expected = scalar_row(q[t].tolist(), dx[t], rows, row)
                assert bits_of(got[t, row]) == bits_of(expected)

    @pytest.mark.parametrize("type_id", [Q8_0, Q4_1, Q2_K, Q6_K, Q2_0], ids=name_of)
    def test_gives_a_row_the_same_bits_alone_and_among_others(self, type_id):
        rng = np.random.default_rng(2)
        N, K = 6, columns_for(type_id)
        raw = sane_bytes(type_id, N, K, rng)
        x = rng.standard_normal((7, K)).astype(np.float32)
        x[3] = np.nan

        together = quant_matmul_exact(x, type_id, raw, N)

        for t in (0, 1, 2, 4, 5, 6):
            alone = quant_matmul_exact(x[t : t + 1], type_id, raw, N)
            np.testing.assert_array_equal(bits_of(alone[0]), bits_of(together[t]))
        assert np.isnan(together[3]).all()

    def test_computes_a_known_product(self):
        # Activation codes are the values themselves: the largest magnitude is 127.
        x = np.zeros((1, 64), np.float32)
        x[0, :3] = [127, -3, 2]
        x[0, 32] = 127
        weights = np.zeros(64, np.int64)
        weights[[0, 1, 2, 32]] = [1, 5, -128, -7]
        block = b"\x00\x3c" + weights[:32].astype(np.int8).tobytes()
        other = b"\x00\x40" + weights[32:].astype(np.int8).tobytes()
        dx = np.float32(127) * np.float32(float.fromhex("0x1.020408p-7"))

        got = quant_matmul_exact(x, Q8_0, block + other, 1)

        first = np.float32(127 - 15 - 256) * dx
        assert got[0, 0] == fma_rn(np.float32(-7 * 127), np.float32(2) * dx, first)

    def test_starts_a_new_sum_every_256_values(self):
        # 2**24 swallows a one added to it; the second segment's eight ones are summed first.
        x = np.zeros((1, 512), np.float32)
        x[0, ::32] = 127
        scale = np.float16(1 / 127).tobytes()
        ones = scale + b"\x01" + bytes(31)
        huge = np.float16(32768).tobytes() + b"\x7f" + bytes(31)

        got = quant_matmul_exact(x, Q8_0, huge + ones * 15, 1)[0, 0]

        dx = np.float32(127) * np.float32(float.fromhex("0x1.020408p-7"))
        step = np.float32(np.float16(1 / 127)) * dx
        head = np.float32(127 * 127) * np.float32(np.float32(32768) * dx)
        tail = np.float32(0)
        for _ in range(7):
            head = fma_rn(np.float32(127), step, head)
        for _ in range(8):
            tail = fma_rn(np.float32(127), step, tail)
        assert got == head + tail

    def test_takes_zero_activations(self):
        assert quant_matmul_exact(np.zeros((0, 32), np.float32), Q8_0, bytes(34), 1).shape == (0, 1)

    def test_rejects_rows_that_are_not_whole_blocks(self):
        with pytest.raises(ValueError, match="rows of 40 values, expected a multiple of 32"):
            quant_matmul_exact(np.zeros((1, 40), np.float32), Q8_0, b"", 0)


def scalar_row(q, dx, rows, row):
    """One dot product from numerics.md's text, one number at a time."""
    w = rows.codes[row].tolist()
    num_blocks = len(dx)
    total = np.float32(0)
    for first in range(0, num_blocks, 8):
        acc = np.float32(0)
        for b in range(first, min(first + 8, num_blocks)):
            integer = minimum = 0
            for i in range(32 * b, 32 * b + 32):
                integer += (1 if rows.k is None else int(rows.k[row, i // 16])) * w[i] * q[i]
                minimum += (1 if rows.n is None else int(rows.n[row, i // 16])) * q[i]
            acc = fma_rn(np.float32(integer), rows.d[row, b] * dx[b], acc)
            if rows.m is not None:
                acc = fma_rn(np.float32(minimum), rows.m[row, b] * dx[b], acc)
        total = total + acc
    return total


class TestUnquantised:
    def rows_of(self, type_id, values):
        if type_id == F32:
            return values.astype(np.float32).tobytes()
        if type_id == F16:
            return values.astype(np.float16).tobytes()
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()

    @pytest.mark.parametrize("type_id", [F32, F16, BF16], ids=name_of)
    def test_equals_the_formula_value_by_value(self, type_id):
        rng = np.random.default_rng(3)
        raw = self.rows_of(type_id, rng.standard_normal((2, 320)))
        x = rng.standard_normal((2, 320)).astype(np.float32)
        w = dequantize_ref(type_id, raw, 2, 320)

        got = quant_matmul_exact(x, type_id, raw, 2)

        for t, row in np.ndindex(2, 2):
            total = np.float32(0)
            for first in range(0, 320, 256):
                acc = np.float32(0)
                for block in range(first, min(first + 256, 320), 32):
                    p = np.float32(0)
                    for i in range(block, block + 32):
                        p = fma_rn(w[row, i], x[t, i], p)
                    acc = acc + p
                total = total + acc
            assert bits_of(got[t, row]) == bits_of(total)

    def test_is_exact_where_float32_can_be(self):
        rng = np.random.default_rng(4)
        x, w = rng.integers(-30, 30, (2, 3, 640)).astype(np.float32)

        got = quant_matmul_exact(x, F32, w.tobytes(), 3)

        np.testing.assert_array_equal(got, x.astype(np.int64) @ w.astype(np.int64).T)

    def test_keeps_activations_that_int8_would_lose(self):
        x = np.zeros((1, 32), np.float32)
        x[0, :2] = [1, 1e-6]
        w = np.zeros((1, 32), np.float32)
        w[0, 1] = 1

        assert quant_matmul_exact(x, F32, w.tobytes(), 1)[0, 0] == np.float32(1e-6)
