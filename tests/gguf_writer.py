"""Writes GGUF v3 files byte by byte, so that tests know where everything lies and can break it.

Independent of the reader and of the `gguf` package, which knows neither Q2_0 nor sparse files.
"""

import dataclasses
import pathlib
import struct
from collections.abc import Sequence
from typing import Any

_SCALARS = {
    "u8": (0, "B"),
    "i8": (1, "b"),
    "u16": (2, "H"),
    "i16": (3, "h"),
    "u32": (4, "I"),
    "i32": (5, "i"),
    "f32": (6, "f"),
    "bool": (7, "?"),
    "u64": (10, "Q"),
    "i64": (11, "q"),
    "f64": (12, "d"),
}


@dataclasses.dataclass(frozen=True)
class Pair:
    """One metadata pair. `kind` is u8 ... f64, bool, string, or one of them with [] behind."""

    key: str
    kind: str
    value: Any


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor: shape in ggml order, raw bytes or None for a hole of `nbytes` zeros."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    nbytes: int
    data: bytes | None = None


@dataclasses.dataclass
class Layout:
    """Where the parts of a written file are, in bytes from its start."""

    size: int = 0
    directory: int = 0
    data: int = 0
    pairs: dict[str, int] = dataclasses.field(default_factory=dict)
    """First byte of each pair (its key's length)."""
    values: dict[str, int] = dataclasses.field(default_factory=dict)
    """First byte of each value (its type is the four bytes before)."""
    entries: dict[str, int] = dataclasses.field(default_factory=dict)
    """First byte of each directory entry (its name's length)."""
    dims: dict[str, int] = dataclasses.field(default_factory=dict)
    """First byte of each tensor's dimension count (dimensions follow)."""
    types: dict[str, int] = dataclasses.field(default_factory=dict)
    """First byte of each tensor's type (its offset follows)."""
    tensors: dict[str, int] = dataclasses.field(default_factory=dict)
    """First byte of each tensor's data."""


def text(value: str) -> bytes:
    """A GGUF string."""
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def header(
    pairs: Sequence[Pair], tensors: Sequence[Tensor], alignment: int = 32
) -> tuple[bytes, Layout]:
    """Everything up to the data, padded to the alignment, and where things are."""
    layout = Layout()
    out = bytearray(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(pairs)))
    for pair in pairs:
        layout.pairs[pair.key] = len(out)
        out += text(pair.key) + struct.pack("<I", _type_id(pair.kind))
        layout.values[pair.key] = len(out)
        out += _value(pair.kind, pair.value)
    layout.directory = len(out)
    relative = 0
    for tensor in tensors:
        layout.entries[tensor.name] = len(out)
        out += text(tensor.name)
        layout.dims[tensor.name] = len(out)
        out += struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape)
        layout.types[tensor.name] = len(out)
        out += struct.pack("<IQ", tensor.type_id, relative)
        layout.tensors[tensor.name] = relative
        relative += -(-tensor.nbytes // alignment) * alignment
    out += bytes(-len(out) % alignment)
    layout.data = len(out)
    layout.size = layout.data + relative
    layout.tensors = {name: layout.data + at for name, at in layout.tensors.items()}
    return bytes(out), layout


def write_gguf(
    path: pathlib.Path, pairs: Sequence[Pair], tensors: Sequence[Tensor], alignment: int = 32
) -> Layout:
    """Writes a file; tensors without data become holes, which take no space on the disk."""
    head, layout = header(pairs, tensors, alignment)
    with path.open("wb") as file:
        file.write(head)
        for tensor in tensors:
            if tensor.data is not None:
                assert len(tensor.data) == tensor.nbytes, tensor.name
                file.seek(layout.tensors[tensor.name])
                file.write(tensor.data)
        file.truncate(layout.size)
    return layout


def patch(path: pathlib.Path, at: int, raw: bytes) -> None:
    """Overwrites bytes of a file."""
    with path.open("r+b") as file:
        file.seek(at)
        file.write(raw)


def _type_id(kind: str) -> int:
    if kind.endswith("[]"):
        return 9
    return 8 if kind == "string" else _SCALARS[kind][0]


def _value(kind: str, value: Any) -> bytes:
    if kind == "string":
        return text(value)
    if not kind.endswith("[]"):
        return struct.pack("<" + _SCALARS[kind][1], value)
    kind = kind.removesuffix("[]")
    head = struct.pack("<IQ", _type_id(kind), len(value))
    if kind == "string":
        return head + b"".join(text(item) for item in value)
    return head + struct.pack(f"<{len(value)}{_SCALARS[kind][1]}", *value)
