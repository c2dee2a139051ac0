"""The element types of GGUF tensors: ids, names and block sizes.

Source: ggml's type table as of llama.cpp b11434 (docs: gguf.md, "Which types occur").
"""

import dataclasses
import enum


class GgmlType(enum.IntEnum):
    """Type ids this reader can size; `SUPPORTED` are the ones a model may be made of."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    IQ1_M = 29
    BF16 = 30
    MXFP4 = 39
    Q1_0 = 41
    Q2_0 = 42


@dataclasses.dataclass(frozen=True)
class TypeLayout:
    """How values of a type lie in memory: whole blocks, rows never share one."""

    type: GgmlType
    block_elems: int
    """Values in one block; a row's length is a multiple of it."""
    block_bytes: int

    @property
    def bits(self) -> float:
        """Bits per value, scales included."""
        return 8 * self.block_bytes / self.block_elems


_SIZES = {
    GgmlType.F32: (1, 4),
    GgmlType.F16: (1, 2),
    GgmlType.Q4_0: (32, 18),
    GgmlType.Q4_1: (32, 20),
    GgmlType.Q5_0: (32, 22),
    GgmlType.Q5_1: (32, 24),
    GgmlType.Q8_0: (32, 34),
    GgmlType.Q2_K: (256, 84),
    GgmlType.Q3_K: (256, 110),
    GgmlType.Q4_K: (256, 144),
    GgmlType.Q5_K: (256, 176),
    GgmlType.Q6_K: (256, 210),
    GgmlType.IQ2_XXS: (256, 66),
    GgmlType.IQ2_XS: (256, 74),
    GgmlType.IQ3_XXS: (256, 98),
    GgmlType.IQ1_S: (256, 50),
    GgmlType.IQ4_NL: (32, 18),
    GgmlType.IQ3_S: (256, 110),
    GgmlType.IQ2_S: (256, 82),
    GgmlType.IQ4_XS: (256, 136),
    GgmlType.I8: (1, 1),
    GgmlType.I16: (1, 2),
    GgmlType.I32: (1, 4),
    GgmlType.I64: (1, 8),
    GgmlType.F64: (1, 8),
    GgmlType.IQ1_M: (256, 56),
    GgmlType.BF16: (1, 2),
    GgmlType.MXFP4: (32, 17),
    GgmlType.Q1_0: (128, 18),
    GgmlType.Q2_0: (64, 18),
}

LAYOUTS = {kind: TypeLayout(kind, *sizes) for kind, sizes in _SIZES.items()}
"""Layout of every type in `GgmlType`."""

FLOATS = frozenset({GgmlType.F32, GgmlType.F16, GgmlType.BF16})
"""Unquantised types; norms, gates' decay and convolutions are read as one of these."""

_PLAIN = frozenset({GgmlType.I8, GgmlType.I16, GgmlType.I32, GgmlType.I64, GgmlType.F64})

SUPPORTED = frozenset(GgmlType) - _PLAIN
"""Types with defined arithmetic (docs: numerics.md, "Weights")."""

_REFUSED_NAMES = {
    4: "Q4_2",
    5: "Q4_3",
    9: "Q8_1",
    15: "Q8_K",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    34: "TQ1_0",
    35: "TQ2_0",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
    40: "NVFP4",
}

_INSTEAD = {
    34: "use Q2_0 or IQ1_M",
    35: "use Q2_0 or IQ2_XXS",
    40: "use MXFP4 (4-bit float), IQ4_NL or Q8_0",
}


def explain_type(type_id: int) -> str:
    """Says why a type id is not read and what to use in its place, for an error message."""
    if type_id in _REFUSED_NAMES:
        instead = _INSTEAD.get(type_id, "use Q4_0, IQ4_NL or Q8_0")
        return f"type {_REFUSED_NAMES[type_id]} ({type_id}), which is not supported; {instead}"
    known = ", ".join(sorted(kind.name for kind in SUPPORTED))
    return (
        f"type id {type_id}, which is none of {known}; FP8 types of forks have no settled id, "
        "use Q8_0 or BF16 for them"
    )
