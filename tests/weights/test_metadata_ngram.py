import pytest

from strata_jax.errors import BadFileError
from strata_jax.weights.gguf import GgufFile
from strata_jax.weights.metadata import read_config
from tests.gguf_content import Sizes, head_sizes, multipliers, ngram_rows
from tests.gguf_maker import TINY, make_model

SIZES = head_sizes(TINY)  # 101 ... 137; the table is padded
OFFSETS = [sum(SIZES[:head]) for head in range(8)]


@pytest.fixture
def ngram(tmp_path):
    def read(pairs=None, sizes=TINY, drop=()):
        full = {f"qwen4exp.{key}": value for key, value in (pairs or {}).items()}
        made = make_model(tmp_path / "f.gguf", sizes, pairs=full, drop=drop, sparse=True)
        with GgufFile.open(made.path) as file:
            return read_config(file)[0].ngram

    return read


def test_reads_every_setting(ngram):
    result = ngram()

    assert (result.layer, result.ngram_size, result.heads_per_ngram) == (1, 3, 4)
    assert (result.conv_kernel, result.eos_id, result.image_id) == (4, 509, 508)
    assert (result.row_width, result.num_rows, result.num_heads) == (8, ngram_rows(TINY), 8)
    assert result.multipliers == tuple(multipliers(512))
    assert result.head_offsets == tuple(OFFSETS)
    assert result.head_sizes == tuple(SIZES)


def test_makes_the_multipliers_of_real_files():
    # From metadata of files that llama.cpp's converter wrote (vocabularies of 1024 and 4096).
    assert multipliers(1024) == [4295158889766209, 8433018892997163, 1270917961435699]
    assert multipliers(4096) == [2043359076095531, 1677619451946387, 1270917961443223]


def test_hashes_images_as_eos_without_the_key(ngram):
    assert ngram({"ple.image_token_id": None}).image_id == 509


def test_is_absent_where_neither_table_nor_keys_are(tmp_path):
    made = make_model(tmp_path / "f.gguf", drop=("per_layer*", "*.ple_*"), sparse=True)
    pairs = {key: None for key in made.layouts[0].values if key.startswith("qwen4exp.ple.")}
    made = make_model(made.path, pairs=pairs, drop=("per_layer*", "*.ple_*"), sparse=True)

    with GgufFile.open(made.path) as file:
        assert read_config(file)[0].ngram is None


def test_refuses_keys_without_a_table(ngram):
    with pytest.raises(BadFileError, match=r"per_layer_token_embd\.weight is missing, but qwen4ex"):
        ngram(drop=("per_layer*",))


def with_item(values, index, value):
    return ("u64[]", [*values[:index], value, *values[index + 1 :]])


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("head_offsets", with_item(OFFSETS, 7, OFFSETS[7] + 1), "head 7 .* leaves a gap after"),
        (
            "head_offsets",
            with_item(OFFSETS, 7, OFFSETS[7] + 300),
            "n-gram head 7 has 137 rows from",
        ),
        ("head_offsets", with_item(OFFSETS, 7, 1 << 31), "n-gram head 7 .* from row 2147483648"),
        ("head_offsets", with_item(OFFSETS, 2, (1 << 64) - 1), "n-gram head 2 .* 18446744073709"),
        ("head_offsets", with_item(OFFSETS, 3, OFFSETS[3] - 1), "n-gram head 3 .* and overlaps"),
        (
            "head_offsets",
            with_item(OFFSETS, 0, 1),
            "n-gram head 0 starts at row 1 .* row 0 expected",
        ),
        ("head_offsets", ("i32[]", [*OFFSETS[:7], -1]), "values from 0 to"),
        ("head_offsets", ("u64[]", OFFSETS[:7]), "an array of 8 values"),
        ("head_vocab_sizes", with_item(SIZES, 4, 0), "n-gram head 4 has 0 rows"),
        ("head_vocab_sizes", with_item(SIZES, 7, 1 << 31), "n-gram head 7 has 2147483648 rows"),
        (
            "head_vocab_sizes",
            with_item(SIZES, 0, 150),
            "n-gram head 1 .* overlaps the heads before it",
        ),
        ("layer_multipliers", ("u64[]", [3, 4, 5]), "odd numbers whose product with 511"),
        ("layer_multipliers", ("u64[]", [3, 5, (1 << 55) + 1]), "is under 2^63"),
        ("layer_multipliers", ("u64[]", [3, 5]), "an array of 3 values"),
        ("layers", ("i32[]", [3]), "a linear layer expected"),
        ("layers", ("i32[]", [4]), "values from 0 to 3"),
        ("layers", ("i32[]", [0, 1]), "an array of 1 values"),
        ("layers", None, "ple.layers is missing"),
        ("ngram_size", ("u32", 9), "ngram_size is 9, 2 to 8"),
        ("ngram_size", ("u32", 2), "heads that make up the hidden width 64"),
        ("heads_per_ngram", ("u32", 0), "heads_per_ngram is 0"),
        ("conv_kernel", ("u32", 65), "conv_kernel is 65"),
        ("eos_token_id", ("u32", 512), "eos_token_id is 512, 0 to 511"),
        ("image_token_id", ("u32", 512), "image_token_id is 512, 0 to 511"),
    ],
)
def test_refuses_a_value_by_name(ngram, key, value, message):
    with pytest.raises(BadFileError, match=message.replace("^", r"\^")):
        ngram({f"ple.{key}": value})


def test_refuses_a_table_with_more_rows_than_31_bits(ngram):
    with pytest.raises(BadFileError, match=r"has \d+ rows, under 2\^31 expected"):
        ngram(sizes=Sizes(ngram_base=1 << 28))
