import struct
import time

import pytest

from strata_jax.errors import BadFileError
from strata_jax.weights import gguf_values
from strata_jax.weights.gguf_values import Cursor, Metadata, read_metadata
from tests.gguf_writer import Pair, header, text

EVERY_KIND = [
    Pair("u8", "u8", 255),
    Pair("i8", "i8", -128),
    Pair("u16", "u16", 65535),
    Pair("i16", "i16", -3),
    Pair("u32", "u32", 1 << 31),
    Pair("i32", "i32", -(1 << 31)),
    Pair("f32", "f32", 0.5),
    Pair("yes", "bool", True),
    Pair("no", "bool", False),
    Pair("words", "string", "grüß Gott"),
    Pair("u64", "u64", (1 << 64) - 1),
    Pair("i64", "i64", -1),
    Pair("f64", "f64", 1e300),
    Pair("flags", "bool[]", (True, False, True)),
    Pair("numbers", "u64[]", (1, 1 << 63)),
    Pair("floats", "f32[]", (0.25, -2.0)),
    Pair("strings", "string[]", ("a", "", "語")),
    Pair("nothing", "i32[]", ()),
    Pair("no strings", "string[]", ()),
]


def read(raw: bytes, count: int) -> Metadata:
    return read_metadata(Cursor(raw, "f.gguf"), count)


def pairs_of(*pairs: Pair) -> bytes:
    raw, layout = header(pairs, ())
    return raw[24 : layout.directory]


def test_reads_every_kind_of_value():
    metadata = read(pairs_of(*EVERY_KIND), len(EVERY_KIND))

    assert dict(metadata) == {pair.key: pair.value for pair in EVERY_KIND}
    assert type(metadata["yes"]) is bool
    assert str(metadata.entry("flags")) == "bool[3]"
    assert str(metadata.entry("u8")) == "u8"
    assert "absent" not in metadata


def test_decodes_arrays_only_when_asked():
    raw = bytearray(pairs_of(Pair("good", "u8", 1), Pair("bad", "string[]", ("abc",))))
    raw[-1] = 0xFF

    metadata = read(bytes(raw), 2)

    assert metadata["good"] == 1
    with pytest.raises(BadFileError, match=r"byte \d+: metadata bad is not valid UTF-8"):
        metadata["bad"]


def test_refuses_a_cut_at_every_byte():
    raw = pairs_of(*EVERY_KIND)

    for end in range(len(raw)):
        with pytest.raises(BadFileError, match=r"^f.gguf: byte \d+: "):
            read(raw[:end], len(EVERY_KIND))


U64 = struct.Struct("<Q").pack
HUGE = U64((1 << 64) - 1)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (HUGE, "byte 0: key 0 of 1 is 18446744073709551615 bytes long, at most 1024"),
        (U64(1000), "key 0 of 1 needs 1000 bytes, the file ends after 0"),
        (U64(2) + b"\xff\xfe", "byte 8: key 0 of 1 is not valid UTF-8"),
        (text(""), "key 0 of 1 is '', a name in printable characters expected"),
        (text("a\nb"), r"key 0 of 1 is 'a\\nb', a name in printable"),
        (text("k") + struct.pack("<I", 13), "metadata k has value type 13, 0 to 12 expected"),
        (text("k") + struct.pack("<I", 8) + HUGE, "metadata k is 18446744073709551615 bytes long"),
        (text("k") + struct.pack("<II", 9, 9) + U64(1), "metadata k is an array of arrays"),
        (text("k") + struct.pack("<II", 9, 4) + HUGE, "metadata k has 18446744073709551615 items"),
        (text("k") + struct.pack("<II", 9, 4) + U64(9), "metadata k needs 36 bytes"),
        (text("k") + struct.pack("<II", 9, 99) + U64(1), "metadata k has value type 99"),
        (text("k") + struct.pack("<II", 9, 8) + U64(2) + text("a"), "item 1 of metadata k does"),
        (text("k") + struct.pack("<II", 9, 8) + U64(1) + HUGE, "item 0 of metadata k does not"),
    ],
)
def test_names_the_place_of_a_length_or_type_that_lies(raw, message):
    with pytest.raises(BadFileError, match=message):
        read(raw, 1)


def test_refuses_a_key_that_is_there_twice():
    raw = pairs_of(Pair("k", "u8", 1)) * 2

    with pytest.raises(BadFileError, match="byte 14: key 'k' is there twice"):
        read(raw, 2)


def test_refuses_a_bool_that_is_neither_true_nor_false():
    raw = bytearray(pairs_of(Pair("k", "bool[]", (True, False))))
    raw[-1] = 2

    with pytest.raises(BadFileError, match="metadata k holds 2, a bool is 0 or 1"):
        read(bytes(raw), 1)["k"]


def test_stops_at_a_limit_on_strings_of_all_arrays(monkeypatch):
    monkeypatch.setattr(gguf_values, "MAX_STRING_ITEMS", 5)
    raw = pairs_of(Pair("a", "string[]", [""] * 3), Pair("b", "string[]", [""] * 3))

    with pytest.raises(BadFileError, match="metadata b brings the strings in arrays to 6"):
        read(raw, 2)


def test_stops_at_a_limit_on_one_string_of_an_array(monkeypatch):
    monkeypatch.setattr(gguf_values, "MAX_STRING_BYTES", 3)
    raw = pairs_of(Pair("a", "string[]", ["abc", "abcd"]))

    with pytest.raises(BadFileError, match="item 1 of metadata a is 4 bytes long, at most 3"):
        read(raw, 1)


def test_stops_at_a_limit_on_the_header(monkeypatch):
    monkeypatch.setattr(gguf_values, "MAX_HEADER_BYTES", 40)
    raw = pairs_of(Pair("a", "u8[]", [0] * 100))

    with pytest.raises(BadFileError, match="the header goes on past 40 bytes, its limit"):
        read(raw, 1)


def test_reads_a_quarter_of_a_million_tokens_and_merges_in_time():
    tokens = [f"<t{index}>" for index in range(248_320)]
    merges = [f"<t{index}> <t{index + 1}>" for index in range(247_587)]
    pairs = (Pair("tokens", "string[]", tokens), Pair("merges", "string[]", merges))
    raw = pairs_of(*pairs)

    start = time.process_time()
    metadata = read(raw, 2)
    values = metadata["tokens"], metadata["merges"]
    took_s = time.process_time() - start

    assert values == (tuple(tokens), tuple(merges))
    assert took_s < 1.5


def test_says_that_the_file_was_closed():
    metadata = read(pairs_of(Pair("k", "u8", 1), Pair("l", "u8", 2)), 2)
    assert metadata["k"] == 1

    metadata.release()

    assert metadata["k"] == 1
    with pytest.raises(AssertionError, match="metadata l was asked for after"):
        metadata["l"]
