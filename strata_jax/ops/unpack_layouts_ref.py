"""The stored layout of every GGUF type, as numpy code; `unpack_ref` is the way in.

A decoder takes uint8 [B, bytes], one stored block a row, and returns the parts of the common form
for these blocks. Sources: gguf.md, "Block layouts"; numerics.md, contract T; the code books are the
tables of the `gguf` package.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from gguf import quants

Form = Literal["float", "plain", "min", "split", "split_min"]
"""How the integer part of a block is formed; the names of `Form` in `ffi/common/gguf_types.h`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnpackedRows:
    """R rows of C values in the common form."""

    codes: np.ndarray
    """int8 [R, C]: w."""

    d: np.ndarray
    """float32 [R, C / 32]: D."""

    m: np.ndarray | None = None
    """float32 [R, C / 32]: M, for types with a minimum."""

    k: np.ndarray | None = None
    """float32 [R, C / 16]: integer factor of a group of 16; None means 1."""

    n: np.ndarray | None = None
    """float32 [R, C / 16]: integer factor of M per group of 16; None means 1."""


@dataclasses.dataclass(frozen=True)
class TypeLayout:
    """How one GGUF type stores values."""

    name: str
    block_values: int
    block_bytes: int
    form: Form
    bias: int
    """What the native side adds to w to store it as an unsigned byte."""

    decode: Callable[[np.ndarray], UnpackedRows] | None
    """From uint8 [B, block_bytes], one block a row. None for unquantised types."""


def _half(raw: np.ndarray) -> np.ndarray:
    """IEEE halves [B, 2] to float32 [B, 1]; signalling NaNs become quiet."""
    bits = _words(raw, np.uint16)
    quiet = np.where((bits & 0x7FFF) > 0x7C00, bits | 0x0200, bits).astype(np.uint16)
    return quiet.view(np.float16).astype(np.float32)


def _words(raw: np.ndarray, dtype: type[np.unsignedinteger[Any]]) -> np.ndarray:
    """Little-endian words along the last axis, widened to int64."""
    return np.ascontiguousarray(raw).view(np.dtype(dtype).newbyteorder("<")).astype(np.int64)


def _fields(words: np.ndarray, shifts: range, width: int) -> np.ndarray:
    """Bit fields [..., len(shifts)] of integers [...]."""
    return (words[..., None] >> np.array(shifts)) & ((1 << width) - 1)


def _planes(raw: np.ndarray, run: int, width: int) -> np.ndarray:
    """Codes of `width` bits from bytes [B, bytes], as int64 [B, bytes * 8 / width].

    Of each `run` bytes the lowest bits of all come first, then the next bits of all, and so on.
    """
    shifts = np.arange(0, 8, width)[:, None]
    runs = raw.astype(np.int64).reshape(len(raw), -1, 1, run)
    return ((runs >> shifts) & ((1 << width) - 1)).reshape(len(raw), -1)


def _negate(values: np.ndarray, sign_bits: np.ndarray) -> np.ndarray:
    """Values [B, ...] with those negated whose bit in [B, values] is set, as int64 [B, values]."""
    return np.where(sign_bits == 1, -1, 1) * values.reshape(sign_bits.shape)


def _even_signs(fields: np.ndarray) -> np.ndarray:
    """7-bit fields [B, n] to bits [B, 8 n]; the eighth makes the number of ones even."""
    bits = _fields(fields, range(7), 1)
    parity = bits.sum(axis=-1, keepdims=True) & 1
    return np.concatenate([bits, parity], axis=-1).reshape(len(fields), -1)


def _code_book(table: Any) -> np.ndarray:
    """Vectors of a gguf class's code book, int64 [entries, length]."""
    table.init_grid()
    return np.asarray(table.grid).astype(np.int64).reshape(table.grid_shape)


def _rows(codes: np.ndarray, **floats: np.ndarray) -> UnpackedRows:
    parts = {name: part.astype(np.float32) for name, part in floats.items()}
    return UnpackedRows(codes=codes.astype(np.int8), **parts)


# Blocks of 32, 64 or 128 values.

_IQ4_LEVELS = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])
_MXFP4_LEVELS = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12])


def _q4_0(raw: np.ndarray) -> UnpackedRows:
    return _rows(_planes(raw[:, 2:], 16, 4) - 8, d=_half(raw[:, :2]))


def _q4_1(raw: np.ndarray) -> UnpackedRows:
    return _rows(_planes(raw[:, 4:], 16, 4), d=_half(raw[:, :2]), m=_half(raw[:, 2:4]))


def _q5_0(raw: np.ndarray) -> UnpackedRows:
    q = _planes(raw[:, 6:], 16, 4) | _planes(raw[:, 2:6], 1, 1) << 4
    return _rows(q - 16, d=_half(raw[:, :2]))


def _q5_1(raw: np.ndarray) -> UnpackedRows:
    q = _planes(raw[:, 8:], 16, 4) | _planes(raw[:, 4:8], 1, 1) << 4
    return _rows(q, d=_half(raw[:, :2]), m=_half(raw[:, 2:4]))


def _q8_0(raw: np.ndarray) -> UnpackedRows:
    return _rows(np.ascontiguousarray(raw[:, 2:]).view(np.int8), d=_half(raw[:, :2]))


def _iq4_nl(raw: np.ndarray) -> UnpackedRows:
    return _rows(_IQ4_LEVELS[_planes(raw[:, 2:], 16, 4)], d=_half(raw[:, :2]))


def _mxfp4(raw: np.ndarray) -> UnpackedRows:
    """Levels are doubled to be integers, so D is half the stored power of two: 2**(e - 128)."""
    d = np.ldexp(1.0, raw[:, :1].astype(np.int64) - 128)
    return _rows(_MXFP4_LEVELS[_planes(raw[:, 1:], 16, 4)], d=d)


def _q1_0(raw: np.ndarray) -> UnpackedRows:
    return _rows(2 * _planes(raw[:, 2:], 1, 1) - 1, d=np.repeat(_half(raw[:, :2]), 4, axis=1))


def _q2_0(raw: np.ndarray) -> UnpackedRows:
    return _rows(_planes(raw[:, 2:], 1, 2) - 1, d=np.repeat(_half(raw[:, :2]), 2, axis=1))


# K-quants, and IQ4_XS whose scales are of their kind: blocks of 256 values.


def _q2_k(raw: np.ndarray) -> UnpackedRows:
    return _rows(
        _planes(raw[:, 16:80], 32, 2),
        d=np.repeat(_half(raw[:, 80:82]), 8, axis=1),
        m=np.repeat(-_half(raw[:, 82:84]), 8, axis=1),
        k=raw[:, :16] & 15,
        n=raw[:, :16] >> 4,
    )


def _q3_k(raw: np.ndarray) -> UnpackedRows:
    q = _planes(raw[:, 32:96], 32, 2) | _planes(raw[:, :32], 32, 1) << 2
    k = _planes(raw[:, 96:104], 8, 4) | _planes(raw[:, 104:108], 4, 2) << 4
    return _rows(q - 4, d=np.repeat(_half(raw[:, 108:]), 8, axis=1), k=k - 32)


def _scales_and_minimums(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """D and M [B, 8] of Q4_K and Q5_K from the first 16 bytes of a block.

    Four scales, four minimums in the low 6 bits of bytes 0-7; four of each have their low 4 bits in
    the nibbles of bytes 8-11 and their high 2 bits on top of the first.
    """
    packed = raw[:, 4:16].astype(np.int64)
    high = packed[:, :8] >> 6 << 4
    scales = np.concatenate([packed[:, :4] & 63, packed[:, 8:] & 15 | high[:, :4]], axis=1)
    minimums = np.concatenate([packed[:, 4:8] & 63, packed[:, 8:] >> 4 | high[:, 4:]], axis=1)
    d = _half(raw[:, :2]) * scales.astype(np.float32)
    return d, -(_half(raw[:, 2:4]) * minimums.astype(np.float32))


def _q4_k(raw: np.ndarray) -> UnpackedRows:
    d, m = _scales_and_minimums(raw)
    return _rows(_planes(raw[:, 16:], 32, 4), d=d, m=m)


def _q5_k(raw: np.ndarray) -> UnpackedRows:
    d, m = _scales_and_minimums(raw)
    return _rows(_planes(raw[:, 48:], 32, 4) | _planes(raw[:, 16:48], 32, 1) << 4, d=d, m=m)


def _q6_k(raw: np.ndarray) -> UnpackedRows:
    q = _planes(raw[:, :128], 64, 4) | _planes(raw[:, 128:192], 32, 2) << 4
    k = np.ascontiguousarray(raw[:, 192:208]).view(np.int8)
    return _rows(q - 32, d=np.repeat(_half(raw[:, 208:]), 8, axis=1), k=k)


def _iq4_xs(raw: np.ndarray) -> UnpackedRows:
    scales = _planes(raw[:, 4:8], 1, 4) | _planes(raw[:, 2:4], 1, 2) << 4
    d = _half(raw[:, :2]) * (scales - 32).astype(np.float32)
    return _rows(_IQ4_LEVELS[_planes(raw[:, 8:], 16, 4)], d=d)


# Types with a code book: blocks of 256 values.


def _odd(scales: np.ndarray) -> np.ndarray:
    return (1 + 2 * scales).astype(np.float32)


def _iq2_xxs(raw: np.ndarray) -> UnpackedRows:
    groups = raw[:, 2:].reshape(len(raw), 8, 8)
    words = _words(groups[:, :, 4:], np.uint32)[:, :, 0]
    signs = _even_signs(_fields(words, range(0, 28, 7), 7).reshape(len(raw), -1))
    d = _half(raw[:, :2]) * _odd(words >> 28) * np.float32(0.125)
    return _rows(_negate(_code_book(quants.IQ2_XXS)[groups[:, :, :4]], signs), d=d)


def _iq2_xs(raw: np.ndarray) -> UnpackedRows:
    words = _words(raw[:, 2:66], np.uint16)
    return _rows(
        _negate(_code_book(quants.IQ2_XS)[words & 511], _even_signs(words >> 9)),
        d=np.repeat(_half(raw[:, :2]) * np.float32(0.125), 8, axis=1),
        k=_odd(_planes(raw[:, 66:], 1, 4)),
    )


def _iq2_s(raw: np.ndarray) -> UnpackedRows:
    indices = raw[:, 2:34] | _planes(raw[:, 66:74], 1, 2) << 8
    return _rows(
        _negate(_code_book(quants.IQ2_S)[indices], _planes(raw[:, 34:66], 1, 1)),
        d=np.repeat(_half(raw[:, :2]) * np.float32(0.125), 8, axis=1),
        k=_odd(_planes(raw[:, 74:], 1, 4)),
    )


def _iq3_xxs(raw: np.ndarray) -> UnpackedRows:
    words = _words(raw[:, 66:], np.uint32)
    signs = _even_signs(_fields(words, range(0, 28, 7), 7).reshape(len(raw), -1))
    d = _half(raw[:, :2]) * _odd(words >> 28) * np.float32(0.25)
    return _rows(_negate(_code_book(quants.IQ3_XXS)[raw[:, 2:66]], signs), d=d)


def _iq3_s(raw: np.ndarray) -> UnpackedRows:
    indices = raw[:, 2:66] | _planes(raw[:, 66:74], 1, 1) << 8
    signs = _planes(raw[:, 74:106], 1, 1)
    d = _half(raw[:, :2]) * _odd(_planes(raw[:, 106:], 1, 4))
    return _rows(_negate(_code_book(quants.IQ3_S)[indices], signs), d=d)


def _iq1_s(raw: np.ndarray) -> UnpackedRows:
    words = _words(raw[:, 34:], np.uint16)
    indices = raw[:, 2:34] | _fields(words, range(0, 12, 3), 3).reshape(len(raw), -1) << 8
    shift = np.repeat(1 - 2 * (words >> 15), 4, axis=1)[:, :, None]
    d = _half(raw[:, :2]) * _odd((words >> 12) & 7) * np.float32(0.125)
    codes = 8 * _code_book(quants.IQ1_S)[indices] + shift
    return _rows(codes.reshape(len(raw), -1), d=d)


def _iq1_m(raw: np.ndarray) -> UnpackedRows:
    """The half-precision scale is spread over the top 4 bits of four words, lowest part first."""
    words = _words(raw[:, 48:], np.uint16)
    bits = ((words >> 12) << np.arange(0, 16, 4)).sum(axis=1, keepdims=True)
    d = _half(bits.astype("<u2").view(np.uint8)) * np.float32(0.125)
    nibbles = _planes(raw[:, 32:48], 1, 4)
    codes = 8 * _code_book(quants.IQ1_S)[raw[:, :32] | (nibbles & 7) << 8]
    codes = codes + (1 - 2 * (nibbles >> 3))[:, :, None]
    k = _odd(_fields(words, range(0, 12, 3), 3).reshape(len(raw), -1))
    return _rows(codes.reshape(len(raw), -1), d=np.repeat(d, 8, axis=1), k=k)


LAYOUTS: dict[int, TypeLayout] = {
    0: TypeLayout("F32", 1, 4, "float", 0, None),
    1: TypeLayout("F16", 1, 2, "float", 0, None),
    2: TypeLayout("Q4_0", 32, 18, "plain", 8, _q4_0),
    3: TypeLayout("Q4_1", 32, 20, "min", 0, _q4_1),
    6: TypeLayout("Q5_0", 32, 22, "plain", 16, _q5_0),
    7: TypeLayout("Q5_1", 32, 24, "min", 0, _q5_1),
    8: TypeLayout("Q8_0", 32, 34, "plain", 128, _q8_0),
    10: TypeLayout("Q2_K", 256, 84, "split_min", 0, _q2_k),
    11: TypeLayout("Q3_K", 256, 110, "split", 4, _q3_k),
    12: TypeLayout("Q4_K", 256, 144, "min", 0, _q4_k),
    13: TypeLayout("Q5_K", 256, 176, "min", 0, _q5_k),
    14: TypeLayout("Q6_K", 256, 210, "split", 32, _q6_k),
    16: TypeLayout("IQ2_XXS", 256, 66, "plain", 64, _iq2_xxs),
    17: TypeLayout("IQ2_XS", 256, 74, "split", 64, _iq2_xs),
    18: TypeLayout("IQ3_XXS", 256, 98, "plain", 64, _iq3_xxs),
    19: TypeLayout("IQ1_S", 256, 50, "plain", 64, _iq1_s),
    20: TypeLayout("IQ4_NL", 32, 18, "plain", 128, _iq4_nl),
    21: TypeLayout("IQ3_S", 256, 110, "plain", 64, _iq3_s),
    22: TypeLayout("IQ2_S", 256, 82, "split", 64, _iq2_s),
    23: TypeLayout("IQ4_XS", 256, 136, "plain", 128, _iq4_xs),
    29: TypeLayout("IQ1_M", 256, 56, "split", 64, _iq1_m),
    30: TypeLayout("BF16", 1, 2, "float", 0, None),
    39: TypeLayout("MXFP4", 32, 17, "plain", 64, _mxfp4),
    41: TypeLayout("Q1_0", 128, 18, "plain", 64, _q1_0),
    42: TypeLayout("Q2_0", 64, 18, "plain", 64, _q2_0),
}
"""By ggml type id, as stored in files."""
