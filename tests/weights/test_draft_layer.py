import dataclasses
import math
import pathlib

import pytest

from strata_jax.errors import BadFileError
from strata_jax.ops.roles import Role
from strata_jax.weights.draft_layer import find_draft_layer
from strata_jax.weights.pack import open_pack
from tests.gguf_maker import TINY, make_model
from tests.gguf_writer import Tensor

SHARED = pathlib.Path(__file__).parents[3] / "shared"
NO_TRUNK = ("blk.[0-3].*", "output_hc*", "per_layer*")
"""What a file of only the draft layer leaves out."""
NO_PLE = {
    f"qwen4exp.ple.{key}": None
    for key in (
        "ngram_size",
        "heads_per_ngram",
        "conv_kernel",
        "eos_token_id",
        "image_token_id",
        "layers",
        "head_vocab_sizes",
        "head_offsets",
        "layer_multipliers",
    )
} | {"qwen4exp.embedding_length_per_layer_input": None}


@pytest.fixture
def trunk(tmp_path):
    """A model without a draft layer."""
    path = make_model(tmp_path / "trunk.gguf", dataclasses.replace(TINY, drafts=0)).path
    with open_pack(path) as pack:
        yield pack


@pytest.fixture
def beside(tmp_path, trunk):
    """Finds a draft layer in a file that is made with these settings."""
    found = []

    def find(sizes=TINY, drop=(), pairs=NO_PLE, **settings):
        drop = (*NO_TRUNK, *drop)
        path = make_model(tmp_path / "mtp.gguf", sizes, drop=drop, pairs=pairs, **settings).path
        layer = find_draft_layer(trunk, path)
        assert layer is not None
        found.append(layer)
        return layer

    yield find
    for layer in found:
        layer.close()


def zeros(name, *shape):
    """Of zeros, float32."""
    size = 4 * math.prod(shape)
    return Tensor(name, shape, 0, size, bytes(size))


def test_finds_the_layer_of_the_models_own_file(tmp_path):
    with open_pack(make_model(tmp_path / "tiny.gguf").path) as pack:
        layer = find_draft_layer(pack)

        assert layer is not None
        assert (layer.block, layer.prefix, layer.notes) == (4, "blk.4.", ())
        assert layer.pack is pack
        layer.close()
        assert pack.view("token_embd.weight").size


def test_finds_none_where_there_is_none(trunk):
    assert find_draft_layer(trunk) is None


def test_takes_a_file_of_only_the_draft_layer(beside, trunk):
    layer = beside()

    (note,) = layer.notes
    assert "those of the model's own file are used: token_embd.weight, output.weight" in note
    assert {m.layer for m in layer.matrices()} == {0}
    roles = [m.role for m in layer.matrices()]
    assert len(set(roles)) == len(roles)
    assert {Role.EH_PROJ, Role.OUTPUT_HC_UP, Role.ATTN_Q, Role.FFN_DOWN_EXPS} <= set(roles)
    assert not {Role.TOKEN_EMBD, Role.OUTPUT} & set(roles)


def test_borrows_embedding_and_head_from_the_model(beside):
    assert beside(drop=["token_embd*", "output.weight"]).notes == ()


def test_takes_a_whole_model_for_its_draft_layer(tmp_path, trunk):
    path = make_model(tmp_path / "whole.gguf").path

    layer = find_draft_layer(trunk, path)

    assert layer is not None
    with layer:
        (note,) = layer.notes
        assert "those of the model's own file are used: " in note
        assert "blk.{0-3}.hc_attn_norm.weight" in note


def test_takes_an_embedding_and_a_head_of_its_own(beside):
    table = (TINY.hidden, TINY.vocab)
    extra = [
        zeros("blk.4.nextn.embed_tokens.weight", *table),
        zeros("blk.4.nextn.shared_head_head.weight", *table),
    ]

    layer = beside(extra=extra)

    assert layer.has(Role.TOKEN_EMBD)
    assert layer.has(Role.OUTPUT)
    assert not beside().has(Role.OUTPUT)


def test_names_a_norm_that_it_does_not_use(beside):
    extra = [zeros("blk.4.nextn.shared_head_norm.weight", TINY.hidden)]

    notes = beside(extra=extra).notes

    assert any("not used: blk.4.nextn.shared_head_norm.weight" in note for note in notes)


def test_names_tensors_that_nobody_knows(beside):
    notes = beside(extra=[zeros("blk.4.nextn.odd.weight", 32)]).notes

    assert any("not used: blk.4.nextn.odd.weight" in note for note in notes)


@pytest.mark.parametrize("name", ["nextn.eh_proj.weight", "attn_k.weight", "ffn_up_exps.weight"])
def test_names_what_is_missing(beside, name):
    with pytest.raises(BadFileError, match=rf"mtp\.gguf: missing 1 of \d+ tensors: blk\.4\.{name}"):
        beside(drop=[f"blk.4.{name}"])


def test_refuses_a_bias_of_a_known_weight(beside):
    with pytest.raises(BadFileError, match=r"blk.4.nextn.eh_proj.bias is not supported beside"):
        beside(extra=[zeros("blk.4.nextn.eh_proj.bias", TINY.hidden)])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"vocab": 2 * TINY.vocab}, "vocab_size is"),
        ({"experts": 2 * TINY.experts}, "num_experts is"),
        ({"index_budget": 2 * TINY.index_budget}, "index_budget is"),
    ],
)
def test_refuses_the_draft_layer_of_another_model(beside, change, text):
    with pytest.raises(BadFileError, match=f"is the draft layer of another model than .*{text}"):
        beside(dataclasses.replace(TINY, **change))


def test_takes_a_file_of_another_context_length(beside):
    beside(dataclasses.replace(TINY, context=2 * TINY.context))


def test_refuses_a_file_without_a_draft_layer(trunk):
    with pytest.raises(BadFileError, match=r"trunk\.gguf: has no draft layer \(MTP\)"):
        find_draft_layer(trunk, trunk.file.paths[0])


def test_names_a_file_that_is_not_there(trunk, tmp_path):
    with pytest.raises(BadFileError, match=r"none\.gguf: cannot be opened"):
        find_draft_layer(trunk, tmp_path / "none.gguf")


def test_uses_the_first_of_several(tmp_path):
    path = make_model(tmp_path / "two.gguf", dataclasses.replace(TINY, drafts=2)).path
    with open_pack(path) as pack:
        layer = find_draft_layer(pack)

        assert layer is not None
        assert layer.block == 4
        assert "has 2 draft layers; the first is used" in layer.notes[0]


def test_takes_the_shared_file():
    models = SHARED / "models/micro"
    if not models.exists():
        pytest.skip(f"LOUD SKIP: {models} is not there: no file of llama.cpp's was tried")
    with open_pack(models / "model-f32.gguf") as pack:
        layer = find_draft_layer(pack, models / "mtp-only-f32.gguf")
        assert layer is not None
        assert layer.pack.config.hidden == 64
        layer.close()
