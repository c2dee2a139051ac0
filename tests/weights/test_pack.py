import pathlib
import struct
import time

import numpy as np
import pytest

from strata_jax.errors import BadFileError
from strata_jax.weights.gguf_types import SUPPORTED, GgmlType
from strata_jax.weights.pack import open_pack
from tests.gguf_content import Sizes
from tests.gguf_maker import BLOCKY, REAL, REAL_TYPES, TINY, make_model
from tests.gguf_writer import Tensor, patch

SHARED = pathlib.Path(__file__).parents[3] / "shared/models"
EMBEDDED = pathlib.Path(__file__).parents[2] / "strata_jax/models/strata-small/model-IQ3_S.gguf"


@pytest.fixture
def model(tmp_path):
    """Opens a model made as the arguments say; nothing but holes inside unless `sparse=False`."""

    def made(*args, **kwargs):
        options = {"sparse": True, **kwargs}
        return open_pack(make_model(tmp_path / "f.gguf", *args, **options).path)

    return made


def test_opens_the_embedded_model():
    with open_pack(EMBEDDED) as pack:
        assert pack.warnings == ()
        assert len(pack.specs) == len(pack.file.tensors) == 246
        assert pack.config.num_layers == 8
        assert pack.tensor("blk.0.ffn_gate_exps.weight").type is GgmlType.IQ3_S
        assert pack.view("blk.8.nextn.eh_proj.weight").nbytes == 512 * 256 // 256 * 210
        norm = pack.vector("output_hc_norm.weight")
        assert norm.shape == (1024,)
        assert np.isfinite(norm).all()


@pytest.mark.parametrize("name", ["micro/model-f32", "zoo_a/model-IQ3_S", "zoo_a/model-Q2_0"])
def test_opens_the_shared_files(name):
    path = SHARED / f"{name}.gguf"
    if not path.exists():
        pytest.skip(f"LOUD SKIP: {path} is not there, the real file was not tried")
    with open_pack(path) as pack:
        assert pack.warnings == ()
        assert len(pack.specs) == 145


def test_opens_the_shared_file_of_ragged_rows():
    path = SHARED / "zoo_b/model-Q4_K_M.gguf"
    if not path.exists():
        pytest.skip(f"LOUD SKIP: {path} is not there, the real file was not tried")
    with open_pack(path) as pack:
        assert pack.warnings == ()
        assert pack.tensor("blk.4.ffn_down_exps.weight").type is GgmlType.Q8_0


def test_gives_tensors_by_name(model):
    pack = model()

    assert pack.has("output.weight")
    assert not pack.has("blk.0.attn_q.weight")
    assert pack.address("blk.0.ssm_a") == pack.view("blk.0.ssm_a").ctypes.data
    assert pack.address("blk.0.ssm_a") % 32 == 0
    with pytest.raises(BadFileError, match=r"tensor blk.0.attn_q.weight is not part of the model"):
        pack.view("blk.0.attn_q.weight")


@pytest.mark.parametrize("type_id", [0, 1, 30])
def test_gives_small_tensors_as_float32(model, type_id):
    name = "blk.1.ple_conv1d.weight"
    values = np.arange(-512, 512, dtype=np.float32) / 4  # float16 holds these
    upper_halves = (values.view(np.uint32) >> 16).astype(np.uint16)
    raw = {0: values, 1: values.astype(np.float16), 30: upper_halves}[type_id].tobytes()

    pack = model(types={name: type_id})
    patch(pathlib.Path(pack.file.paths[0]), pack.tensor(name).offset, raw)
    vector = pack.vector(name)

    assert vector.shape == (256, 4)
    assert vector.dtype == np.float32
    if type_id == 30:  # bfloat16 drops the lower half
        values = (upper_halves.astype(np.uint32) << 16).view(np.float32)
    assert np.array_equal(vector.reshape(-1), values)


def test_gives_no_quantised_tensor_as_a_vector(model):
    with pytest.raises(BadFileError, match=r"blk\.0\.attn_qkv\.weight is Q8_0 and has"):
        model(types={"*attn_qkv*": 8}).vector("blk.0.attn_qkv.weight")


@pytest.mark.parametrize("kind", sorted(SUPPORTED), ids=lambda kind: kind.name)
def test_takes_every_supported_type(model, kind):
    matrices = ("*_exps.*", "token_embd*", "*attn_qkv*", "*ssm_out*", "*hc_attn_down*")

    pack = model(BLOCKY, types=dict.fromkeys(matrices, int(kind)), sparse=False)

    assert pack.tensor("blk.0.ffn_up_exps.weight").type is kind
    assert pack.warnings == ()


@pytest.mark.parametrize("drafts", [0, 1, 2])
def test_opens_models_with_any_number_of_draft_layers(model, drafts):
    pack = model(Sizes(drafts=drafts))

    assert pack.config.num_draft_layers == drafts
    assert pack.has("blk.5.nextn.hnorm.weight") == (drafts == 2)
    assert pack.warnings == ()


def test_opens_a_tied_model(model):
    pack = model(drop=("output.weight",))

    assert not pack.has("output.weight")
    assert pack.warnings == ()


def test_opens_fused_experts(model):
    pack = model(fused=True)

    assert pack.tensor("blk.0.ffn_gate_up_exps.weight").shape == (64, 128, 4)
    assert not pack.has("blk.0.ffn_gate_exps.weight")
    assert pack.warnings == ()


def test_opens_shards(tmp_path):
    made = make_model(tmp_path / "f.gguf", shards=4, sparse=True)

    with open_pack(made.path) as pack:
        assert pack.warnings == ()
        assert {pack.tensor(name).shard for name in pack.specs} == {0, 1, 2, 3}


def float32(name, *shape):
    return Tensor(name, shape, 0, 4 * int(np.prod(shape)))


@pytest.mark.parametrize("shape", [(64,), (64, 1), (64, 1, 1)])
def test_takes_the_shared_experts_gate_with_and_without_a_last_one(model, shape):
    name = "blk.0.ffn_gate_inp_shexp.weight"

    pack = model(drop=(name,), extra=[float32(name, *shape)])

    assert pack.tensor(name).shape == (64,)
    assert pack.vector(name).shape == (64,)


def test_gives_a_single_expert_its_axis_even_if_the_file_drops_it(model):
    names = [f"blk.{block}.ffn_up_exps.weight" for block in range(5)]
    sizes = Sizes(experts=1, experts_active=1)

    pack = model(sizes, drop=names, extra=[float32(name, 64, 64) for name in names])

    assert pack.tensor(names[0]).shape == (64, 64, 1)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("blk.4.nextn.embed_tokens.weight", (64, 512)),
        ("blk.4.nextn.shared_head_head.weight", (64, 512)),
        ("blk.4.nextn.shared_head_norm.weight", (64,)),
    ],
)
def test_takes_variants_of_the_draft_layer_and_checks_their_shape(model, name, shape):
    assert model(extra=[float32(name, *shape)]).has(name)
    with pytest.raises(BadFileError, match=rf"tensor {name} is \[32\]"):
        model(extra=[float32(name, 32)])


REQUIRED = [
    "token_embd.weight",
    "output_hc_norm.weight",
    "output_hc_up.weight",
    "per_layer_token_embd.weight",
    "blk.0.hc_attn_inject.weight",
    "blk.2.hc_ffn_down.weight",
    "blk.0.ffn_gate_inp.weight",
    "blk.0.ffn_up_exps.weight",
    "blk.3.ffn_gate_exps.weight",
    "blk.3.ffn_down_shexp.weight",
    "blk.0.ssm_a",
    "blk.0.ssm_dt.bias",
    "blk.2.ssm_conv1d.weight",
    "blk.3.attn_q.weight",
    "blk.3.indexer.k_proj.weight",
    "blk.1.ple_conv1d.weight",
    "blk.4.nextn.hnorm.weight",
    "blk.4.attn_output.weight",
]


@pytest.mark.parametrize("name", REQUIRED)
def test_names_a_missing_tensor(model, name):
    with pytest.raises(BadFileError, match=rf"f\.gguf: .*{name}"):
        model(drop=(name,))


def test_names_many_missing_tensors_in_one_line(model):
    with pytest.raises(BadFileError, match=r"missing 15 of \d+ tensors: blk.\{0-4\}.ffn_up_exps"):
        model(drop=("*ffn_down_exps*", "*ffn_up_exps*", "*ffn_gate_inp.*"))


@pytest.mark.parametrize("name", REQUIRED)
def test_names_a_tensor_of_the_wrong_shape(model, name):
    with pytest.raises(BadFileError, match=rf"{name} is \[32, 32\]|32 rows"):
        model(drop=(name,), extra=[float32(name, 32, 32)])


def test_does_not_take_a_transposed_matrix(model):
    name = "blk.0.attn_gate.weight"

    with pytest.raises(BadFileError, match=rf"tensor {name} is \[128, 64\], \[64, 128\] expected"):
        model(drop=(name,), extra=[float32(name, 128, 64)])


@pytest.mark.parametrize(
    ("pattern", "kind"),
    [
        ("*norm.weight", GgmlType.Q8_0),
        ("*.ssm_conv1d.weight", GgmlType.Q8_0),
        ("*.ssm_norm.weight", GgmlType.Q5_0),
        ("*.ple_norm_key.weight", GgmlType.Q4_K),
    ],
)
def test_refuses_quantised_vectors(model, pattern, kind):
    sizes = Sizes(hidden=256, conv=32)

    with pytest.raises(BadFileError, match=rf"is {kind.name}, F32, F16 or BF16 expected"):
        model(sizes, types={pattern: int(kind)})


@pytest.mark.parametrize("name", ["ffn_gate_inp", "indexer.q_proj", "indexer.k_proj"])
@pytest.mark.parametrize("kind", [GgmlType.Q6_K, GgmlType.Q4_0, GgmlType.Q2_0, GgmlType.IQ3_S])
def test_refuses_what_chooses_experts_or_blocks_in_few_bits(model, name, kind):
    with pytest.raises(
        BadFileError, match=rf"tensor blk.\d.{name}.weight is {kind.name}, at least"
    ):
        model(BLOCKY, types={f"*.{name}.weight": int(kind)})


def test_warns_about_a_router_in_eight_bits(model):
    (warning,) = model(types={"*ffn_gate_inp.weight": 8, "*indexer.?_proj*": 8}).warnings

    assert "quantised to Q8_0" in warning
    assert "blk.{0-4}.ffn_gate_inp.weight, blk.{3-4}.indexer.q_proj.weight" in warning


def test_refuses_types_that_are_not_for_weights(model):
    name = "blk.0.attn_gate.weight"
    integers = Tensor(name, (64, 128), int(GgmlType.I32), 4 * 64 * 128)

    with pytest.raises(BadFileError, match=rf"tensor {name} is I32, a type for weights expected"):
        model(drop=(name,), extra=[integers])


@pytest.mark.parametrize(("type_id", "words"), [(40, "NVFP4 .* use MXFP4"), (43, "FP8 .* Q8_0")])
def test_refuses_nvfp4_and_fp8_with_what_to_use_in_place(tmp_path, type_id, words):
    made = make_model(tmp_path / "f.gguf", sparse=True)
    at = made.layouts[0].types["blk.0.ffn_up_exps.weight"]
    patch(made.path, at, struct.pack("<I", type_id))

    with pytest.raises(BadFileError, match=rf"tensor blk.0.ffn_up_exps.weight has .*{words}"):
        open_pack(made.path)


def test_names_tensors_that_are_not_used(model):
    pack = model(extra=[float32("output_norm.weight", 64), float32("blk.9.ssm_a", 4)])

    assert pack.warnings[0].endswith("not used: output_norm.weight, blk.9.ssm_a")
    assert not pack.has("output_norm.weight")


def test_warns_about_a_draft_layer_the_metadata_does_not_count(model):
    pairs = {
        "qwen4exp.nextn_predict_layers": None,
        "qwen4exp.block_count": ("u32", 4),
        "qwen4exp.attention.recurrent_layers": None,
        "qwen4exp.attention.compress_ratios": ("i32[]", [0, 0, 0, 4]),
    }

    (warning,) = model(pairs=pairs).warnings

    assert "not used: blk.4." in warning
    assert "and 20 more" in warning


@pytest.mark.parametrize(
    "name",
    ["blk.0.attn_qkv.bias", "blk.0.ffn_up_exps.scale", "output.bias", "token_embd.input_scale"],
)
def test_refuses_what_would_change_a_known_weight(model, name):
    with pytest.raises(BadFileError, match=rf"tensor {name} is not supported beside"):
        model(extra=[float32(name, 64)])


def test_refuses_fused_and_separate_experts_together(model):
    extra = [float32("blk.2.ffn_up_exps.weight", 64, 64, 4)]

    with pytest.raises(BadFileError, match=r"blk.2.ffn_up_exps.weight is not supported beside"):
        model(fused=True, extra=extra)


def test_passes_over_rope_factors_that_are_all_one(model):
    ones = Tensor("rope_freqs.weight", (8,), 0, 32, np.ones(8, np.float32).tobytes())
    twos = Tensor("rope_freqs.weight", (8,), 0, 32, np.full(8, 2, np.float32).tobytes())

    assert model(extra=[ones]).warnings == ()
    assert "not used: rope_freqs.weight" in model(extra=[twos]).warnings[0]


@pytest.mark.parametrize("ratios", [[0] * 5, [0, 0, 0, 0, 4]])
def test_warns_if_a_converter_lost_the_sparse_attention(model, ratios):
    pairs = {"qwen4exp.attention.compress_ratios": ("i32[]", ratios)}

    (warning,) = model(pairs=pairs).warnings

    assert "attends to everything" in warning
    assert "convert the model anew" in warning


def test_warns_once_if_the_indexers_sizes_are_lost_too(model):
    names = ("compress_ratios", "indexer.head_count", "indexer.key_length", "indexer.top_k")
    pairs = {f"qwen4exp.attention.{name}": None for name in names}

    (warning,) = model(pairs=pairs).warnings

    assert "attends to everything" in warning


def test_is_silent_about_a_model_that_never_had_an_indexer(model):
    pairs = {"qwen4exp.attention.compress_ratios": None}

    assert model(pairs=pairs, drop=("*.indexer.*",)).warnings == ()


def test_closes_the_file_behind_an_error(tmp_path):
    made = make_model(tmp_path / "gone.gguf", drop=("blk.0.ssm_a",))

    with pytest.raises(BadFileError):
        open_pack(made.path)

    assert str(made.path) not in pathlib.Path("/proc/self/maps").read_text()


def test_hashes_content_and_not_names(tmp_path):
    hashes = []
    for name, seed in (("a.gguf", 0), ("b.gguf", 0), ("c.gguf", 1)):
        with open_pack(make_model(tmp_path / name, seed=seed).path) as pack:
            hashes.append(pack.file_hash())

    assert hashes[0] == hashes[1] != hashes[2]
    assert len(hashes[0]) == 64


@pytest.mark.parametrize("where", ["first", "last", "metadata"])
def test_hashes_the_ends_of_tensors_and_the_header(tmp_path, where):
    made = make_model(tmp_path / "f.gguf")
    with open_pack(made.path) as pack:
        before = pack.file_hash()
        info = pack.tensor("token_embd.weight")
    at = {
        "first": info.offset,
        "last": info.offset + info.nbytes - 1,
        "metadata": made.layouts[0].values["qwen4exp.rope.freq_base"],
    }[where]
    patch(made.path, at, b"\x01")

    with open_pack(made.path) as pack:
        assert pack.file_hash() != before


def test_hashes_a_file_of_the_released_size_in_a_second(tmp_path):
    made = make_model(tmp_path / "f.gguf", REAL, types=REAL_TYPES, sparse=True)

    with open_pack(made.path) as pack:
        start = time.perf_counter()
        pack.file_hash()
        assert time.perf_counter() - start < 1


def test_says_that_a_file_was_replaced(tmp_path):
    made = make_model(tmp_path / "f.gguf", TINY)
    with open_pack(made.path) as pack:
        made.path.unlink()
        with pytest.raises(BadFileError, match="cannot be read: No such file"):
            pack.file_hash()
        made.path.write_bytes(b"other")
        with pytest.raises(BadFileError, match="was replaced while it was open"):
            pack.file_hash()
