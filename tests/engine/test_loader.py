"""From a file's vectors to the parameter tree."""

import jax
import numpy as np
import pytest

from strata_jax.engine.loader import load_params, primary_sharding
from strata_jax.model.params import AttentionParams, LinearParams
from strata_jax.weights.pack import open_pack
from tests.gguf_maker import TINY, make_model


@pytest.fixture(scope="module")
def params(tiny_pack):
    return load_params(tiny_pack, primary_sharding("cpu"))


def test_every_layer_gets_the_mixer_of_its_kind(params, tiny_pack):
    kinds = {LinearParams: "linear", AttentionParams: "attention"}

    assert (
        tuple(kinds[type(layer.mixer)] for layer in params.layers) == tiny_pack.config.layer_kinds
    )


def test_vectors_are_the_files_own(params, tiny_pack):
    streams = (TINY.streams, TINY.hidden)
    expected = {
        "blk.2.hc_ffn_norm.weight": params.layers[2].ffn_mixer.norm,
        "blk.0.hc_attn_norm.weight": params.layers[0].attn_mixer.norm,
        "output_hc_norm.weight": params.output_mixer.norm,
        "blk.0.ssm_a": params.layers[0].mixer.decay,
        "blk.0.ssm_dt.bias": params.layers[0].mixer.dt_bias,
        "blk.0.ssm_norm.weight": params.layers[0].mixer.norm,
        "blk.3.attn_q_norm.weight": params.layers[3].mixer.q_norm,
        "blk.3.attn_k_norm.weight": params.layers[3].mixer.k_norm,
        "blk.3.indexer.q_norm.weight": params.layers[3].mixer.index_q_norm,
        "blk.3.indexer.k_norm.weight": params.layers[3].mixer.index_k_norm,
        "blk.1.ple_norm_key.weight": params.ngram.norm_key,
        "blk.1.ple_norm_query.weight": params.ngram.norm_query,
        "blk.1.ple_norm_conv.weight": params.ngram.norm_conv,
    }
    for name, found in expected.items():
        assert np.array_equal(np.asarray(found).ravel(), tiny_pack.vector(name).ravel()), name
    assert params.layers[0].attn_mixer.norm.shape == streams


def test_convolutions_have_their_taps_first(params, tiny_pack):
    file = tiny_pack.vector("blk.0.ssm_conv1d.weight")  # [channels, taps]

    assert np.array_equal(params.layers[0].mixer.conv_weight, file.T)
    assert params.ngram.conv_weight.shape == (TINY.conv, TINY.streams * TINY.hidden)


def test_rotation_frequencies_fall_from_one_by_powers_of_theta(params):
    freq = np.asarray(params.layers[3].mixer.inv_freq, np.float64)

    exact = 1e7 ** (-np.arange(0, TINY.rope_dim, 2) / TINY.rope_dim)
    np.testing.assert_allclose(freq, exact, rtol=1e-6)
    assert freq[0] == 1.0


def test_everything_lies_on_the_primary_mesh_in_float32(params):
    for leaf in jax.tree.leaves(params):
        assert leaf.dtype == np.float32
        assert leaf.sharding == primary_sharding("cpu")


def test_a_file_without_an_indexer_needs_no_norms_for_it(tmp_path):
    dense = {"qwen4exp.attention.compress_ratios": ("i32[]", [0] * 5)}
    with open_pack(make_model(tmp_path / "dense.gguf", pairs=dense).path) as pack:
        mixer = load_params(pack, primary_sharding("cpu")).layers[3].mixer

    assert isinstance(mixer, AttentionParams)
    assert np.all(np.asarray(mixer.index_q_norm) == 1)


@pytest.mark.parametrize("kind", [1, 30], ids=["F16", "BF16"])
def test_half_precision_vectors_are_widened(tmp_path, kind):
    made = make_model(tmp_path / "half.gguf", types={"*_norm.weight": kind})
    with open_pack(made.path) as pack:
        norm = load_params(pack, primary_sharding("cpu")).output_mixer.norm
        assert np.array_equal(np.asarray(norm).ravel(), pack.vector("output_hc_norm.weight"))

    assert norm.dtype == np.float32
    assert 0.5 < float(norm.mean()) < 1.5
