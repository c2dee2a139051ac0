"""One GGUF v3 file's header: metadata and tensor directory, checked against the file's size.

After the metadata (`gguf_values.py`) follows, per tensor:

    name string | number of dimensions u32 | dimensions u64 each, contiguous first | type u32
    | offset u64, from the data's start: the next multiple of general.alignment after the directory

Source: ggml-org/ggml docs/gguf.md. As in llama.cpp, tensors must lie back to back: a gap or an
overlap means that a size is not what the writer meant, e.g. a fork's FP8 under Q2_0's id.
"""

import dataclasses
import mmap

from strata_jax.errors import BadFileError
from strata_jax.weights.gguf_types import LAYOUTS, GgmlType, explain_type
from strata_jax.weights.gguf_values import Cursor, Metadata, read_metadata

MAX_PAIRS = 1 << 16
MAX_TENSORS = 1 << 17
MAX_NAME_BYTES = 256
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 1 << 16
DEFAULT_ALIGNMENT = 32

_FOREIGN = {
    b"PK\x03\x04": "a zip archive or PyTorch file",
    b"vers": "a Git LFS pointer; run `git lfs pull` to fetch the file itself",
    b"<!DO": "a web page; the download went wrong",
    b"<htm": "a web page; the download went wrong",
    b"ggml": "a GGML file from before GGUF",
    b"tjgg": "a GGML file from before GGUF",
    b"fmgg": "a GGML file from before GGUF",
}


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """One tensor of the directory."""

    name: str
    shape: tuple[int, ...]
    """ggml order: the contiguous axis first. numpy's shape of the same bytes is the reverse."""
    type: GgmlType
    nbytes: int
    shard: int
    """Number of the file it lies in, 0-based."""
    offset: int
    """First byte, counted from the start of that file."""

    @property
    def num_elements(self) -> int:
        """Values in the tensor."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def row_bytes(self) -> int:
        """Bytes of one row along the contiguous axis."""
        layout = LAYOUTS[self.type]
        return self.shape[0] // layout.block_elems * layout.block_bytes


@dataclasses.dataclass(frozen=True)
class Header:
    """What one file says about itself."""

    metadata: Metadata
    tensors: dict[str, TensorInfo]
    size: int
    """Bytes from the file's start to the end of the directory."""
    warnings: tuple[str, ...]


def read_header(data: mmap.mmap | bytes, path: str, shard: int) -> Header:
    """Reads the header of a whole file given as bytes; touches nothing behind the header.

    Args:
        data: the file, mapped.
        path: its name in messages.
        shard: its number for `TensorInfo.shard`.

    Raises:
        BadFileError: for every departure from the format, naming file, byte, key or tensor.
    """
    cursor = Cursor(data, path)
    num_tensors, num_pairs = _read_preamble(cursor)
    metadata = read_metadata(cursor, num_pairs)
    alignment = _alignment(metadata, path)
    directory = [
        _read_tensor(cursor, f"tensor {index} of {num_tensors}") for index in range(num_tensors)
    ]
    start = -(-cursor.pos // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for at, info in directory:
        if info.name in tensors:
            raise cursor.error(f"tensor {info.name} is there twice", at)
        tensors[info.name] = dataclasses.replace(info, shard=shard, offset=start + info.offset)
    warnings = _check_places(tensors, start, alignment, len(data), path)
    return Header(metadata, tensors, cursor.pos, warnings)


def _read_preamble(cursor: Cursor) -> tuple[int, int]:
    magic = bytes(cursor.data[cursor.take(4, "the magic number") : cursor.pos])
    if magic != b"GGUF":
        looks = f", which looks like {_FOREIGN[magic]}" if magic in _FOREIGN else ""
        raise cursor.error(f"the file starts with {magic!r}{looks}; b'GGUF' expected", 0)
    version = cursor.u32("the version")
    if version in (1 << 24, 2 << 24, 3 << 24):
        raise cursor.error(
            "the file is big-endian, a little-endian one expected; "
            "convert it with gguf_convert_endian.py",
            4,
        )
    if version != 3:
        raise cursor.error(
            f"GGUF version {version}, only version 3 is read; "
            "write the file anew with a current llama.cpp",
            4,
        )
    num_tensors = cursor.u64("the tensor count")
    num_pairs = cursor.u64("the metadata count")
    if num_tensors > MAX_TENSORS:
        raise cursor.error(f"{num_tensors} tensors, at most {MAX_TENSORS} expected", 8)
    if num_pairs > MAX_PAIRS:
        raise cursor.error(f"{num_pairs} metadata pairs, at most {MAX_PAIRS} expected", 16)
    return num_tensors, num_pairs


def _alignment(metadata: Metadata, path: str) -> int:
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    power = isinstance(value, int) and value.bit_count() == 1
    if not isinstance(value, int) or not power or not 8 <= value <= MAX_ALIGNMENT:
        raise BadFileError(
            f"{path}: metadata general.alignment is {value!r}, "
            f"a power of two from 8 to {MAX_ALIGNMENT} expected"
        )
    return value


def _read_tensor(cursor: Cursor, what: str) -> tuple[int, TensorInfo]:
    """Returns where the entry starts and the tensor, its offset still relative to the data."""
    at = cursor.pos
    name = cursor.name(f"the name of {what}", MAX_NAME_BYTES)
    what = f"tensor {name}"
    num_dims = cursor.u32(f"the number of dimensions of {what}")
    if not 1 <= num_dims <= MAX_DIMENSIONS:
        raise cursor.error(f"{what} has {num_dims} dimensions, 1 to {MAX_DIMENSIONS} expected", at)
    shape = tuple(cursor.u64(f"a dimension of {what}") for _ in range(num_dims))
    type_id = cursor.u32(f"the type of {what}")
    offset = cursor.u64(f"the offset of {what}")
    if type_id not in LAYOUTS:
        raise cursor.error(f"{what} has {explain_type(type_id)}", at)
    layout = LAYOUTS[GgmlType(type_id)]
    info = TensorInfo(name, shape, layout.type, 0, 0, offset)
    if not 0 < info.num_elements < 1 << 62:
        raise cursor.error(
            f"{what} is {list(shape)}, sizes of at least 1 and a product under 2^62 expected", at
        )
    if shape[0] % layout.block_elems:
        raise cursor.error(
            f"{what} has rows of {shape[0]} values, type {layout.type.name} needs a multiple of "
            f"{layout.block_elems}",
            at,
        )
    nbytes = info.num_elements // layout.block_elems * layout.block_bytes
    return at, dataclasses.replace(info, nbytes=nbytes)


def _check_places(
    tensors: dict[str, TensorInfo], start: int, alignment: int, size: int, path: str
) -> tuple[str, ...]:
    """Checks that the tensors lie back to back inside the file; returns warnings about its end."""
    due, last = start, "the directory"
    for info in sorted(tensors.values(), key=lambda info: info.offset):
        what = f"{path}: tensor {info.name}"
        if info.offset + info.nbytes > size:
            raise BadFileError(
                f"{what} covers bytes {info.offset} to {info.offset + info.nbytes}, the file ends "
                f"at {size}; it is cut off or damaged, fetch it again"
            )
        if info.offset != due:
            problem = "overlaps" if info.offset < due else "leaves a gap after"
            raise BadFileError(
                f"{what} starts at byte {info.offset} and {problem} {last}, {due} expected; "
                "a size, an offset or a type id is not what the writer meant"
            )
        last = f"tensor {info.name} of type {info.type.name}"
        due += -(-info.nbytes // alignment) * alignment
    if not tensors or size == due:
        return ()
    if size < due:
        return (f"{path}: the file ends at byte {size}, inside the padding up to {due}",)
    return (f"{path}: {size - due} bytes after the last tensor belong to nothing",)
