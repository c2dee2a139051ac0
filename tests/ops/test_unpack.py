import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from strata_jax import _native
from strata_jax.ops.unpack_layouts_ref import LAYOUTS
from strata_jax.ops.unpack_ref import dequantize_ref, layout_of, unpack_rows_ref

QUANTIZED = [type_id for type_id, layout in LAYOUTS.items() if layout.form != "float"]
WITH_ORACLE = [type_id for type_id in LAYOUTS if type_id not in (41, 42)]
ISA_FLAGS = {
    "scalar": set(),
    "avx2": {"avx2", "f16c"},
    "avx512": {"avx512f", "avx512bw", "avx512vl"},
}
Q1_0, Q2_0, MXFP4 = 41, 42, 39
ONE = b"\x00\x3c"  # 1.0 as a half


def name_of(type_id):
    return LAYOUTS[type_id].name


def bits_of(values):
    return np.ascontiguousarray(values).view(np.uint32)


def random_bytes(type_id, num_rows, num_cols, seed=0):
    """Rows of random bytes: every code, and scales of every kind, infinite and NaN ones included."""
    layout = LAYOUTS[type_id]
    size = num_rows * num_cols // layout.block_values * layout.block_bytes
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def columns_for(type_id):
    """Row lengths with whole segments, partial last ones, and less than one."""
    block = LAYOUTS[type_id].block_values
    return [cols for cols in (64, 160, 256, 320, 384, 640, 1024) if cols % block == 0]


CASES = [(type_id, cols) for type_id in QUANTIZED for cols in columns_for(type_id)]
CASE_NAMES = [f"{name_of(type_id)}-{cols}" for type_id, cols in CASES]


def skip_without(isa):
    cpuinfo = Path("/proc/cpuinfo")
    flags = set(cpuinfo.read_text().split()) if cpuinfo.is_file() else set()
    missing = ISA_FLAGS[isa] - flags
    if missing:
        pytest.skip(
            f"this CPU has no {', '.join(sorted(missing))}: the {isa} unpackers are UNTESTED"
        )


class TestTwin:
    @pytest.mark.parametrize("type_id", WITH_ORACLE, ids=name_of)
    def test_gives_the_values_of_the_gguf_package(self, type_id):
        num_rows, num_cols = 60, 1024
        raw = random_bytes(type_id, num_rows, num_cols)
        with np.errstate(all="ignore"):
            expected = gguf.quants.dequantize(
                raw.reshape(num_rows, -1), gguf.GGMLQuantizationType(type_id)
            )

        got = dequantize_ref(type_id, raw, num_rows, num_cols)

        # Equal, not close: scales times integers are exact, so both sides round the same products.
        np.testing.assert_array_equal(got, expected)

    @pytest.mark.parametrize("type_id", QUANTIZED, ids=name_of)
    def test_names_parts_by_form(self, type_id):
        layout = layout_of(type_id)
        num_cols = max(64, layout.block_values)

        rows = unpack_rows_ref(type_id, random_bytes(type_id, 2, num_cols), 2, num_cols)

        assert rows.codes.shape == (2, num_cols)
        assert rows.d.shape == (2, num_cols // 32)
        assert (rows.m is not None) == (layout.form in ("min", "split_min"))
        assert (rows.k is not None) == (layout.form in ("split", "split_min"))
        assert (rows.n is not None) == (layout.form == "split_min")

    def test_reads_q1_0(self):
        signs = bytes([0b00000001, 0b10000000]) + bytes(13) + b"\xff"

        values = dequantize_ref(Q1_0, ONE + signs, 1, 128)[0]

        positive = np.flatnonzero(values == 1)
        assert positive.tolist() == [0, 15, *range(120, 128)]
        assert set(values.tolist()) == {1.0, -1.0}

    def test_reads_q2_0(self):
        codes = bytes([0b11100100, 0b00000011]) + bytes(13) + b"\x55"

        values = dequantize_ref(Q2_0, b"\x00\x40" + codes, 1, 64)[0]

        assert values[:8].tolist() == [-2, 0, 2, 4, 4, -2, -2, -2]
        assert values[8:60].tolist() == [-2] * 52
        assert values[60:].tolist() == [0] * 4

    @pytest.mark.parametrize(("exponent", "power"), [(0, -128), (1, -127), (128, 0), (255, 127)])
    def test_reads_every_mxfp4_scale(self, exponent, power):
        rows = unpack_rows_ref(MXFP4, bytes([exponent]) + bytes(16), 1, 32)

        assert rows.d[0, 0] == np.float32(2.0**power)

    def test_gives_quiet_nans(self):
        signalling = b"\x01\x7c"

        rows = unpack_rows_ref(Q2_0, signalling + bytes(16), 1, 64)

        assert bits_of(rows.d).tolist() == [[0x7FC02000] * 2]

    def test_rejects_a_wrong_number_of_bytes(self):
        with pytest.raises(
            ValueError, match="Q2_0: 35 bytes for 1 rows of 128 values, expected 36"
        ):
            unpack_rows_ref(Q2_0, bytes(35), 1, 128)

    def test_rejects_columns_that_are_not_whole_blocks(self):
        with pytest.raises(ValueError, match="Q2_0: rows of 96 values, expected a multiple of 64"):
            unpack_rows_ref(Q2_0, bytes(27), 1, 96)

    def test_rejects_unquantised_and_unknown_types(self):
        with pytest.raises(ValueError, match="type F16, expected a quantised type"):
            unpack_rows_ref(1, bytes(64), 1, 32)
        with pytest.raises(ValueError, match="ggml type 40, expected one of"):
            unpack_rows_ref(40, bytes(36), 1, 64)


class TestNative:
    @pytest.mark.parametrize("isa", ISA_FLAGS)
    @pytest.mark.parametrize(("type_id", "num_cols"), CASES, ids=CASE_NAMES)
    def test_gives_the_bits_of_the_twin(self, isa, type_id, num_cols):
        skip_without(isa)
        num_rows = 40
        raw = random_bytes(type_id, num_rows, num_cols, seed=num_cols)
        expected = unpack_rows_ref(type_id, raw, num_rows, num_cols)

        got = _native.unpack_rows(type_id, raw.tobytes(), num_rows, num_cols, isa)

        biased = expected.codes.astype(np.int32) + LAYOUTS[type_id].bias
        np.testing.assert_array_equal(got["codes"], biased)
        for part in "dmkn":
            values = getattr(expected, part)
            if values is not None:
                np.testing.assert_array_equal(bits_of(got[part]), bits_of(values), err_msg=part)


def test_code_books_are_those_of_the_gguf_package():
    script = Path(__file__).parents[2] / "tools" / "make_grids.py"

    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)

    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("num_rows", "num_cols"),
    [(1 << 62, 256), (-1, -256), (1 << 40, 0), (-1, 256), (1, 1 << 62), (1 << 56, 256), (1, 32)],
)
def test_refuses_sizes_that_are_not_those_of_the_bytes(num_rows, num_cols):
    size = 0 if num_rows != 1 else 98
    with pytest.raises(ValueError, match=f"bytes are not {num_rows} rows of {num_cols} values"):
        _native.unpack_rows(18, bytes(size), num_rows, num_cols, "scalar")
