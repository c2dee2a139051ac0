import pathlib

import pytest

from strata_jax.errors import BadFileError
from strata_jax.weights.gguf import GgufFile
from strata_jax.weights.metadata import read_config
from tests.gguf_maker import REAL, TINY, make_model

SHARED = pathlib.Path(__file__).parents[3] / "shared/models"
EMBEDDED = pathlib.Path(__file__).parents[2] / "strata_jax/models/strata-small/model-IQ3_S.gguf"


@pytest.fixture
def config(tmp_path):
    """Settings and warnings of a model with some metadata changed; `None` drops a key."""

    def read(pairs=None, sizes=TINY, drop=()):
        full = {
            key if key.startswith(("general.", "tokenizer.")) else f"qwen4exp.{key}": value
            for key, value in (pairs or {}).items()
        }
        made = make_model(tmp_path / "f.gguf", sizes, pairs=full, drop=drop, sparse=True)
        with GgufFile.open(made.path) as file:
            return read_config(file)

    return read


def test_reads_every_setting(config):
    result, warnings = config()

    assert warnings == ()
    assert result.layer_kinds == ("linear", "linear", "linear", "attention")
    assert (result.hidden, result.num_layers, result.num_draft_layers) == (64, 4, 1)
    assert (result.num_streams, result.low_rank) == (4, 32)
    assert (result.num_heads, result.num_kv_heads, result.head_dim) == (4, 2, 32)
    assert (result.rope_dim, result.rope_theta, result.rope_sections) == (16, 1e7, (3, 3, 2, 0))
    assert (result.num_experts, result.num_experts_active) == (4, 2)
    assert (result.expert_width, result.shared_width) == (64, 64)
    assert (result.conv_kernel, result.gdn_head_dim) == (4, 32)
    assert (result.gdn_key_heads, result.gdn_value_heads) == (2, 4)
    assert (result.index_heads, result.index_dim) == (4, 32)
    assert (result.index_budget, result.index_ratio) == (32, 4)
    assert (result.vocab_size, result.context_length, result.eos_id) == (512, 512, 511)
    assert result.eps == pytest.approx(1e-6)


def test_reads_the_embedded_model():
    with GgufFile.open(EMBEDDED) as file:
        result, warnings = read_config(file)

    assert warnings == ()
    assert result.layer_kinds.count("attention") == 2
    assert (result.num_experts, result.vocab_size, result.eos_id) == (16, 4096, 4089)
    assert result.ngram is not None
    assert (result.ngram.num_rows, result.ngram.num_heads) == (64896, 16)


def test_reads_the_released_sizes(config):
    result, _ = config(sizes=REAL)

    assert (result.num_layers, result.layer_kinds.count("attention")) == (48, 12)
    assert result.ngram is not None
    assert result.ngram.num_rows == 320_001_536


@pytest.mark.parametrize("folder", ["micro", "zoo_a", "zoo_b", "strata-small"])
def test_reads_the_shared_files(folder):
    if not SHARED.exists():
        pytest.skip(f"LOUD SKIP: {SHARED} is not there, the real files were not tried")
    for path in (SHARED / folder).glob("model-*.gguf"):
        with GgufFile.open(path) as file:
            result, warnings = read_config(file)
        assert warnings == ()
        assert result.num_draft_layers == 1


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("general.architecture", ("string", "llama"), "is 'llama', 'qwen4exp' expected"),
        ("general.architecture", ("string", "clip"), r"vision projector \(mmproj\)"),
        ("general.architecture", ("u32", 1), "has type u32, one string expected"),
        ("general.architecture", None, "general.architecture is missing"),
        ("block_count", ("u32", 0), "block_count is 0, 1 to 1032 expected"),
        ("block_count", ("u32", 1 << 30), "block_count is 1073741824, 1 to"),
        ("block_count", ("u32", 1), "block_count is 1, 1 to 1024 layers beside 1 draft"),
        ("nextn_predict_layers", ("u32", 9), "nextn_predict_layers is 9, 0 to 8"),
        ("embedding_length", ("u32", 1 << 17), "embedding_length is 131072, 1 to 65536"),
        ("embedding_length", ("u32", 48), "embedding_length is 48, a multiple of 32 expected"),
        ("expert_feed_forward_length", ("u32", 48), "is 48, a multiple of 32 expected"),
        ("expert_count", ("u32", 1 << 20), "expert_count is 1048576, 1 to 65536"),
        ("expert_used_count", ("u32", 5), "expert_used_count is 5, 1 to 4 expected"),
        ("hyper_connection.count", ("u32", 0), "hyper_connection.count is 0, 1 to 16"),
        ("context_length", ("u32", 0), "context_length is 0"),
        ("context_length", ("u64", 1 << 40), "context_length is 1099511627776"),
        ("attention.layer_norm_rms_epsilon", ("f32", 0.0), "epsilon is 0.0"),
        ("attention.layer_norm_rms_epsilon", ("f32", float("nan")), "epsilon is nan"),
        ("attention.head_count_kv", ("u32", 3), "is 3, a divisor of the 4 query heads"),
        ("attention.head_count", ("u32[]", [4] * 5), r"has type u32\[5\], one integer"),
        ("attention.value_length", ("u32", 64), "value_length is 64, 32 to 32 expected"),
        ("rope.dimension_count", ("u32", 15), "is 15, an even number expected"),
        ("rope.dimension_count", ("u32", 64), "is 64, 2 to 32 expected"),
        ("rope.dimension_sections", ("i32[]", [8, 1, 0, 0]), "a sum of at most 8 expected"),
        ("rope.dimension_sections", ("i32[]", [3, -3, 2, 0]), "values from 0 to 8 expected"),
        ("rope.dimension_sections", None, "rope.dimension_sections is missing"),
        ("rope.freq_base", ("f32", float("inf")), "freq_base is inf"),
        ("rope.scaling.type", ("string", "yarn"), "is 'yarn': .* not supported"),
        ("rope.scaling.type", ("string", "linear"), "is 'linear': .* not supported"),
        ("rope.scaling.factor", ("f32", 4.0), r"rope\.scaling\.factor is 4.0: .* not supported"),
        ("rope.scale_linear", ("f32", 2.0), "rope.scale_linear is 2.0"),
        ("ssm.group_count", ("u32", 3), "time_step_rank is 4, a multiple of the 3 key heads"),
        ("ssm.inner_size", ("u32", 64), "inner_size is 64, 128 to 128 expected"),
        ("ssm.conv_kernel", ("u32", 1), "conv_kernel is 1, 2 to 64"),
        ("attention.recurrent_layers", ("bool[]", [True] * 4), "an array of 5 values"),
        ("attention.recurrent_layers", ("bool[]", [True] * 5), "false for draft layers"),
        ("attention.compress_ratios", ("i32[]", [0, 0, 0, 4]), "an array of 5 values"),
        ("attention.compress_ratios", ("i32[]", [0, 0, 0, 1, 1]), "ratios above 1"),
        ("attention.compress_ratios", ("i32[]", [0, 0, 0, 5, 5]), "divide the budget of 32"),
        ("attention.compress_ratios", ("i32[]", [0, 0, 0, -4, 4]), "values from 0 to 4096"),
        ("attention.indexer.top_k", ("u32", 33), "divide the budget of 33 tokens"),
        ("attention.indexer.key_length", ("u32", 8), "is 16, at most the indexer's 8"),
        ("tokenizer.ggml.eos_token_id", ("u32", 512), "eos_token_id is 512, 0 to 511"),
        ("tokenizer.ggml.tokens", ("string[]", ["a"] * 513), "513 tokens, at most the 512 rows"),
        ("tokenizer.ggml.tokens", ("i32[]", [1]), "an array of strings expected"),
    ],
)
def test_refuses_a_value_by_name(config, key, value, message):
    with pytest.raises(BadFileError, match=rf"f\.gguf: .*{message}"):
        config({key: value})


REQUIRED = [
    "block_count",
    "context_length",
    "embedding_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.dimension_count",
    "rope.freq_base",
    "expert_count",
    "expert_used_count",
    "expert_feed_forward_length",
    "expert_shared_feed_forward_length",
    "ssm.conv_kernel",
    "ssm.state_size",
    "ssm.group_count",
    "ssm.time_step_rank",
    "ssm.inner_size",
    "hyper_connection.count",
    "hyper_connection.low_rank",
    "attention.indexer.head_count",
    "attention.indexer.key_length",
    "attention.indexer.top_k",
]


@pytest.mark.parametrize("key", REQUIRED)
def test_names_a_missing_key(config, key):
    with pytest.raises(BadFileError, match=f"metadata qwen4exp.{key} is missing"):
        config({key: None})


@pytest.mark.parametrize("key", REQUIRED)
@pytest.mark.parametrize("value", [(1 << 64) - 1, 0])
def test_refuses_zero_and_the_largest_number_everywhere(config, key, value):
    with pytest.raises(BadFileError, match="expected"):
        config({key: ("u64", value)})


def test_falls_back_to_the_interval_of_older_files(config):
    result, warnings = config({"attention.recurrent_layers": None})

    assert result.layer_kinds == ("linear", "linear", "linear", "attention")
    assert warnings == ()


def test_assumes_an_interval_of_four_without_the_key(config):
    gone = {"attention.recurrent_layers": None, "full_attention_interval": None}

    assert config(gone)[0].layer_kinds[3] == "attention"


@pytest.mark.parametrize("ratios", [None, ("i32[]", [0] * 5), ("i32[]", [0, 0, 0, 0, 4])])
def test_attends_to_everything_where_the_trunk_has_no_ratio(config, ratios):
    result, _ = config({"attention.compress_ratios": ratios})

    assert (result.index_budget, result.index_ratio, result.index_heads) == (0, 1, 4)


def test_needs_no_indexer_sizes_without_ratios(config):
    keys = ("attention.indexer.head_count", "attention.indexer.top_k", "attention.compress_ratios")

    result, _ = config(dict.fromkeys(keys))

    assert (result.index_budget, result.index_heads) == (0, 0)


@pytest.mark.parametrize(
    ("ratios", "message"),
    [([4, 0, 0, 4, 4], "ratios for linear layers"), ([0, 0, 0, 4, 0], "use the ratio of the oth")],
)
def test_warns_about_ratios_it_does_not_use(config, ratios, message):
    result, warnings = config({"attention.compress_ratios": ("i32[]", ratios)})

    assert result.index_ratio == 4
    assert message in warnings[0]


def test_refuses_different_ratios(config):
    ratios = ("i32[]", [0, 0, 0, 4, 0, 0, 0, 2])
    sizes = TINY.__class__(layers=8, drafts=0)

    with pytest.raises(BadFileError, match="the same ratio for all attention layers"):
        config({"attention.compress_ratios": ratios}, sizes)


@pytest.mark.parametrize("scaling", [{"rope.scaling.type": ("string", "none")}, {}])
def test_accepts_rope_that_is_not_scaled(config, scaling):
    config({**scaling, "rope.scaling.factor": ("f32", 1.0)})


def test_reads_a_model_without_draft_layer(config):
    result, warnings = config(sizes=TINY.__class__(drafts=0))

    assert result.num_draft_layers == 0
    assert warnings == ()


def test_warns_if_a_promised_draft_layer_is_not_there(config):
    result, (warning,) = config(drop=("blk.4.*",))

    assert result.num_draft_layers == 0
    assert "no tensor of blk.4 is in the file: there are no drafts" in warning


def test_refuses_a_file_of_only_the_draft_layer(config):
    ple = dict.fromkeys(("ple.layers", "ple.ngram_size"))

    with pytest.raises(BadFileError, match=r"holds the draft layer \(MTP\) only, the main model's"):
        config(ple, drop=("blk.[0-3].*", "output_hc*", "per_layer*", "token_embd*"))


def test_refuses_the_shared_draft_file():
    path = SHARED / "micro/mtp-only-f32.gguf"
    if not path.exists():
        pytest.skip(f"LOUD SKIP: {path} is not there")
    with (
        GgufFile.open(path) as file,
        pytest.raises(BadFileError, match=r"draft layer \(MTP\) only"),
    ):
        read_config(file)


def test_refuses_a_file_without_layers(config):
    with pytest.raises(BadFileError, match=r"tensors of blk.0 to blk.3 are missing"):
        config(drop=("blk.*",))


def test_refuses_a_file_without_embedding(config):
    with pytest.raises(BadFileError, match=r"tensor token_embd\.weight is missing"):
        config(drop=("token_embd*",))


def test_warns_about_ids_without_a_token(config):
    _, warnings = config({"tokenizer.ggml.tokens": ("string[]", ["a"] * 500)})

    assert "ids 500 to 511 have no token" in warnings[0]


def test_ends_answers_at_the_tables_token_if_the_tokenizer_names_none(config):
    result, (warning,) = config({"tokenizer.ggml.eos_token_id": None})

    assert result.eos_id == 509
    assert "eos_token_id is missing: answers end at token 509 of the n-gram table" in warning
