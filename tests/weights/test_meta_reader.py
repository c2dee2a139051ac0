import pytest

from strata_jax.errors import BadFileError
from strata_jax.weights.gguf import GgufFile
from strata_jax.weights.meta_reader import MetaReader
from tests.gguf_writer import Pair, write_gguf


@pytest.fixture
def meta(tmp_path):
    def reader(kind, value, key="qwen4exp.k"):
        path = tmp_path / "f.gguf"
        write_gguf(path, [Pair(key, kind, value)], [])
        return MetaReader(GgufFile.open(path))

    return reader


@pytest.mark.parametrize("kind", ["u8", "i8", "u16", "i16", "u32", "i32", "u64", "i64"])
def test_takes_integers_of_any_width(meta, kind):
    assert meta(kind, 100).integer("k", 0, 100) == 100


@pytest.mark.parametrize(
    ("kind", "value"), [("f32", 5.0), ("bool", True), ("string", "5"), ("u32[]", [5])]
)
def test_takes_nothing_else_for_an_integer(meta, kind, value):
    with pytest.raises(BadFileError, match=r"metadata qwen4exp\.k has type .*, one integer expec"):
        meta(kind, value).integer("k", 0, 100)


@pytest.mark.parametrize("value", [0, 101, 1 << 63])
def test_says_which_range_is_expected(meta, value):
    with pytest.raises(BadFileError, match=rf"k is {value}, 1 to 100 expected"):
        meta("u64", value).integer("k", 1, 100)


def test_uses_a_default_only_where_the_key_is_absent(meta):
    assert meta("u32", 7).integer("other", 1, 10, default=3) == 3
    assert meta("u32", 7).integer("k", 1, 10, default=3) == 7
    with pytest.raises(BadFileError, match=r"metadata qwen4exp\.other is missing"):
        meta("u32", 7).integer("other", 1, 10)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 1e30])
def test_refuses_numbers_that_are_not_finite_or_out_of_range(meta, value):
    with pytest.raises(BadFileError, match=r"k is .*, 0 to 1000 expected"):
        meta("f32", value).number("k", 0.0, 1000.0)


def test_takes_arrays_of_the_expected_length(meta):
    assert meta("i32[]", [1, 2, 3]).integers("k", (3, 4), 0, 9) == (1, 2, 3)
    with pytest.raises(BadFileError, match=r"k is \[1, 2\], an array of 3 or 4 values expected"):
        meta("i32[]", [1, 2]).integers("k", (3, 4), 0, 9)
    with pytest.raises(BadFileError, match=r"k is \[1, -2, 3\], values from 0 to 9 expected"):
        meta("i32[]", [1, -2, 3]).integers("k", (3,), 0, 9)
    with pytest.raises(BadFileError, match=r"k has type u32, an array of integers expected"):
        meta("u32", 1).integers("k", (3,), 0, 9)


def test_does_not_print_a_long_array(meta):
    with pytest.raises(BadFileError, match=r"k is i32\[1000000\], an array of 3 values expected"):
        meta("i32[]", [0] * 1_000_000).integers("k", (3,), 0, 9)


@pytest.mark.parametrize("kind", ["bool[]", "u8[]", "i32[]"])
def test_takes_flags_as_bools_or_zeros_and_ones(meta, kind):
    assert meta(kind, [1, 0]).flags("k", 2) == (True, False)


def test_counts_strings_without_reading_them(meta):
    assert meta("string[]", ["a", "b"]).string_count("k") == 2
    with pytest.raises(BadFileError, match="an array of strings expected"):
        meta("i32[]", [1]).string_count("k")


def test_leaves_keys_with_a_prefix_of_their_own(meta):
    assert meta("string", "x", key="general.name").text("general.name") == "x"


def test_starts_every_warning_with_the_file(meta):
    reader = meta("u32", 1)

    reader.warn("odd")

    assert reader.warnings == [f"{reader.path}: odd"]
