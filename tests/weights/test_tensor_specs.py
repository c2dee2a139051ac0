import dataclasses

import pytest

from strata_jax.weights.gguf import GgufFile
from strata_jax.weights.metadata import read_config
from strata_jax.weights.tensor_specs import expected_tensors
from tests.gguf_content import model_tensors
from tests.gguf_maker import REAL, TINY, make_model


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    made = make_model(tmp_path_factory.mktemp("m") / "f.gguf", sparse=True)
    with GgufFile.open(made.path) as file:
        return read_config(file)[0]


@pytest.mark.parametrize("fused", [False, True])
def test_lists_the_tensors_of_the_format(config, fused):
    expected = dict(model_tensors(TINY, fused))

    specs = {spec.name: spec for spec in expected_tensors(config, expected)}

    missing_ok = {name for name, spec in specs.items() if spec.optional}
    assert specs.keys() - missing_ok == expected.keys() - {"output.weight"}
    assert all(specs[name].shape == shape for name, shape in expected.items())


def test_lists_the_released_shapes(tmp_path):
    made = make_model(tmp_path / "f.gguf", REAL, sparse=True)
    with GgufFile.open(made.path) as file:
        specs = {s.name: s for s in expected_tensors(read_config(file)[0], file.tensors)}

    # As published for the released checkpoint (docs, gguf.md).
    assert specs["per_layer_token_embd.weight"].shape == (160, 320_001_536)
    assert specs["blk.0.attn_qkv.weight"].shape == (2560, 10240)
    assert specs["blk.0.ssm_out.weight"].shape == (6144, 2560)
    assert specs["blk.3.attn_q.weight"].shape == (2560, 12288)
    assert specs["blk.47.ffn_down_exps.weight"].shape == (640, 2560, 512)
    assert specs["blk.48.nextn.eh_proj.weight"].shape == (5120, 2560)
    assert specs["blk.1.ple_conv1d.weight"].shape == (4, 10240)


def test_puts_every_tensor_into_one_tier(config):
    tiers = {spec.name: spec.tier for spec in expected_tensors(config, ())}

    assert tiers["blk.0.ffn_up_exps.weight"] == "experts"
    assert tiers["blk.4.ffn_up_exps.weight"] == "draft"
    assert tiers["per_layer_token_embd.weight"] == "ngram"
    assert tiers["output.weight"] == "embedding"
    assert tiers["blk.0.ffn_up_shexp.weight"] == "dense"


def test_needs_no_indexer_where_everything_is_attended_to(config):
    dense = dataclasses.replace(config, index_budget=0, index_ratio=1)
    unknown = dataclasses.replace(dense, index_heads=0, index_dim=0)

    indexer = [spec for spec in expected_tensors(dense, ()) if ".indexer." in spec.name]

    assert len(indexer) == 8
    assert all(spec.optional for spec in indexer)
    assert not [spec for spec in expected_tensors(unknown, ()) if ".indexer." in spec.name]


def test_leaves_out_what_the_settings_leave_out(config):
    bare = dataclasses.replace(config, ngram=None, num_draft_layers=0)

    names = [spec.name for spec in expected_tensors(bare, ())]

    assert not [name for name in names if "ple" in name or "per_layer" in name]
    assert not [name for name in names if name.startswith("blk.4.")]
