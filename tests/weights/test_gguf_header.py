import struct

import pytest

from strata_jax.errors import BadFileError
from strata_jax.weights import gguf_header
from strata_jax.weights.gguf_header import Header, read_header
from strata_jax.weights.gguf_types import GgmlType
from tests.gguf_writer import Pair, Tensor, header

F32, Q8_0, Q2_0 = 0, 8, 42
PAIRS = (Pair("general.architecture", "string", "x"),)
TENSORS = (
    Tensor("a", (64, 3), F32, 768),
    Tensor("b", (64, 2, 2), Q2_0, 72),
    Tensor("c", (32,), Q8_0, 34),
)


def file_of(tensors=TENSORS, pairs=PAIRS, alignment=32):
    head, layout = header(pairs, tensors, alignment)
    return bytearray(head + bytes(layout.size - layout.data)), layout


def read(raw) -> Header:
    return read_header(bytes(raw), "f.gguf", 0)


def put(raw: bytearray, at: int, form: str, value: int) -> bytearray:
    struct.pack_into("<" + form, raw, at, value)
    return raw


def test_reads_the_directory():
    raw, layout = file_of()

    result = read(raw)

    assert list(result.tensors) == ["a", "b", "c"]
    info = result.tensors["b"]
    assert info.shape == (64, 2, 2)
    assert info.type is GgmlType.Q2_0
    assert (info.nbytes, info.row_bytes, info.num_elements) == (72, 18, 256)
    assert info.offset == layout.tensors["b"]
    assert result.warnings == ()


@pytest.mark.parametrize("alignment", [8, 64, 4096, 65536])
def test_follows_the_alignment_in_the_metadata(alignment):
    pairs = (*PAIRS, Pair("general.alignment", "u32", alignment))
    raw, layout = file_of(pairs=pairs, alignment=alignment)

    offsets = {name: info.offset for name, info in read(raw).tensors.items()}

    assert offsets == layout.tensors
    assert all(offset % alignment == 0 for offset in offsets.values())


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("u32", 0),
        ("u32", 24),
        ("u32", 4),
        ("u32", 1 << 17),
        ("u64", 1 << 63),
        ("i32", -32),
        ("f32", 32.0),
        ("string", "32"),
        ("bool", True),
        ("u32[]", [32]),
    ],
)
def test_refuses_an_alignment_that_is_no_sane_power_of_two(kind, value):
    raw, _ = file_of(pairs=(*PAIRS, Pair("general.alignment", kind, value)))

    with pytest.raises(BadFileError, match=r"metadata general\.alignment is "):
        read(raw)


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (b"PK\x03\x04", "byte 0: .* looks like a zip archive or PyTorch file; b'GGUF' expected"),
        (b"version https", "looks like a Git LFS pointer; run `git lfs pull`"),
        (b"<!DOCTYPE", "looks like a web page"),
        (b"ggml", "from before GGUF"),
        (b"GGU", "the magic number needs 4 bytes, the file ends after 3"),
        (b"\x00\x00\x00\x00", "the file starts with"),
        (b"GGUF\x01\x00\x00\x00", "byte 4: GGUF version 1, only version 3 is read"),
        (b"GGUF\x02\x00\x00\x00", "GGUF version 2, only version 3"),
        (b"GGUF\x04\x00\x00\x00", "GGUF version 4, only version 3"),
        (b"GGUF\x00\x00\x00\x03", "big-endian, a little-endian one expected"),
    ],
)
def test_says_what_a_foreign_file_looks_like(start, message):
    with pytest.raises(BadFileError, match=message):
        read(start)


@pytest.mark.parametrize(("at", "what"), [(8, "tensors"), (16, "metadata pairs")])
@pytest.mark.parametrize("count", [1 << 20, 1 << 63, (1 << 64) - 1])
def test_refuses_absurd_counts_at_once(at, what, count):
    raw, _ = file_of()

    with pytest.raises(BadFileError, match=f"byte {at}: {count} {what}, at most"):
        read(put(raw, at, "Q", count))


def test_refuses_a_cut_at_every_byte_of_the_directory():
    raw, layout = file_of()

    for end in range(layout.directory, layout.data - 31):
        with pytest.raises(BadFileError, match=r"^f.gguf: byte \d+: "):
            read(raw[:end])


def test_refuses_a_cut_at_every_byte_of_the_data():
    raw, layout = file_of()

    for end in range(layout.data - 31, layout.tensors["c"] + 34):
        with pytest.raises(BadFileError):
            read(raw[:end])


@pytest.mark.parametrize("end", [34, 63])
def test_warns_if_only_padding_is_cut_off(end):
    raw, layout = file_of()

    (warning,) = read(raw[: layout.tensors["c"] + end]).warnings

    assert "inside the padding" in warning


def test_warns_about_bytes_after_the_last_tensor():
    raw, _ = file_of()

    (warning,) = read(raw + bytes(5)).warnings

    assert warning == "f.gguf: 5 bytes after the last tensor belong to nothing"


def test_reads_a_file_without_tensors():
    raw, layout = file_of(tensors=())

    assert read(raw).tensors == {}
    assert read(raw[: layout.directory]).warnings == ()


@pytest.mark.parametrize("dims", [0, 5, 1 << 31])
def test_refuses_a_number_of_dimensions_out_of_range(dims):
    raw, layout = file_of()

    with pytest.raises(BadFileError, match=f"tensor b has {dims} dimensions, 1 to 4 expected"):
        read(put(raw, layout.dims["b"], "I", dims))


@pytest.mark.parametrize("size", [0, 1 << 40, 1 << 61, 1 << 63, (1 << 64) - 64])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_refuses_sizes_that_are_zero_or_overflow(size, axis):
    raw, layout = file_of()

    with pytest.raises(BadFileError, match="tensor b "):
        read(put(raw, layout.dims["b"] + 4 + 8 * axis, "Q", size))


def test_refuses_rows_that_blocks_do_not_fill():
    raw, layout = file_of()

    with pytest.raises(BadFileError, match="tensor b has rows of 65 values, type Q2_0 needs a mul"):
        read(put(raw, layout.dims["b"] + 4, "Q", 65))


@pytest.mark.parametrize(
    ("type_id", "message"),
    [
        (40, r"tensor b has type NVFP4 \(40\), which is not supported; use MXFP4"),
        (43, "tensor b has type id 43, .* FP8 .* use Q8_0 or BF16"),
        (34, "TQ1_0"),
        (5, "Q4_3"),
        (1 << 31, "type id 2147483648"),
    ],
)
def test_refuses_types_by_name(type_id, message):
    raw, layout = file_of()

    with pytest.raises(BadFileError, match=message):
        read(put(raw, layout.types["b"], "I", type_id))


@pytest.mark.parametrize(
    ("name", "offset", "message"),
    [
        ("a", 32, "tensor a starts at byte .* leaves a gap after the directory"),
        ("b", 0, "overlaps tensor a"),
        ("b", 736, "overlaps tensor a"),
        ("b", 769, "leaves a gap after tensor a"),
        ("c", 896, "tensor c starts .* leaves a gap after tensor b of type Q2_0"),
        ("c", 1 << 40, "the file ends at"),
        ("c", (1 << 64) - 32, "the file ends at"),
    ],
)
def test_refuses_tensors_that_do_not_lie_back_to_back(name, offset, message):
    raw, layout = file_of()

    with pytest.raises(BadFileError, match=message):
        read(put(raw + bytes(4096), layout.types[name] + 4, "Q", offset))


def test_notices_fp8_of_a_fork_that_uses_the_id_of_q2_0():
    fp8_bytes = 64 * 4
    raw, _ = file_of(
        tensors=(Tensor("a", (64, 4), Q2_0, fp8_bytes), Tensor("b", (64, 4), Q2_0, fp8_bytes))
    )

    with pytest.raises(BadFileError, match=r"gap after tensor a of type Q2_0, .* type id"):
        read(raw)


def test_accepts_offsets_in_any_order():
    raw, layout = file_of(tensors=(TENSORS[0], TENSORS[2], Tensor("d", (32,), Q8_0, 34)))
    one, two = (layout.tensors[name] - layout.data for name in ("c", "d"))
    put(raw, layout.types["c"] + 4, "Q", two)
    put(raw, layout.types["d"] + 4, "Q", one)

    assert read(raw).tensors["c"].offset == layout.tensors["d"]


def test_refuses_a_tensor_that_is_there_twice():
    raw, layout = file_of(tensors=(TENSORS[0], Tensor("x", (64, 3), F32, 768)))
    raw[layout.entries["x"] + 8] = ord("a")

    with pytest.raises(BadFileError, match=rf"byte {layout.entries['x']}: tensor a is there twice"):
        read(raw)


@pytest.mark.parametrize("name", [b"\xff", b"\n", b"\x1b"])
def test_refuses_names_that_cannot_be_printed(name):
    raw, layout = file_of()
    raw[layout.entries["b"] + 8 : layout.entries["b"] + 9] = name

    with pytest.raises(BadFileError, match="the name of tensor 1 of 3 is"):
        read(raw)


def test_refuses_a_name_longer_than_any():
    raw, layout = file_of()

    with pytest.raises(BadFileError, match="the name of tensor 1 of 3 is 257 bytes long"):
        read(put(raw, layout.entries["b"], "Q", 257))


def test_limits_are_far_above_the_released_model():
    assert gguf_header.MAX_TENSORS > 50 * 1600
    assert gguf_header.MAX_PAIRS > 100 * 65
