"""Small models of random weights: one float32, one quantised, and ways to read them."""

import dataclasses

import numpy as np
import pytest

from strata_jax.weights.pack import open_pack
from tests.gguf_maker import BLOCKY, TINY, make_model
from tests.stepper import Stepper

QUANTISED = {
    "*_exps.*": 21,  # IQ3_S
    "*_shexp.*": 8,  # Q8_0
    "*ffn_gate_inp_shexp.*": 0,
    "*attn_*.weight": 12,  # Q4_K
    "*attn_gate.*": 13,  # Q5_K
    "*_norm.*": 0,
    "*hc_*_down.*": 30,  # BF16
    "*hc_*_up.*": 1,  # F16
    "*hc_*_inject.*": 8,
    "*ssm_out.*": 23,  # IQ4_XS
    "*ple_key.*": 2,  # Q4_0
    "*ple_value.*": 7,  # Q5_1
    "token_embd.*": 14,  # Q6_K
    "output.weight": 14,
    "per_layer_token_embd.*": 20,  # IQ4_NL
}
"""Types by tensor: the native side takes them on different paths."""


@pytest.fixture(scope="session")
def tiny_pack(tmp_path_factory):
    """Four layers of width 64, float32, indexer budget 32."""
    made = make_model(tmp_path_factory.mktemp("tiny") / "tiny.gguf", TINY)
    with open_pack(made.path) as pack:
        yield pack


@pytest.fixture(scope="session")
def blocky_pack(tmp_path_factory):
    """Four layers of width 256 in eleven quantised and unquantised types."""
    sizes = dataclasses.replace(BLOCKY, drafts=0)
    made = make_model(tmp_path_factory.mktemp("blocky") / "blocky.gguf", sizes, types=QUANTISED)
    with open_pack(made.path) as pack:
        yield pack


@pytest.fixture(scope="session")
def tiny(tiny_pack):
    """The float32 model on native ops."""
    return Stepper(tiny_pack, kv="f32")


@pytest.fixture(scope="session")
def tiny_plain(tiny_pack):
    """The float32 model on the plain op set."""
    return Stepper(tiny_pack, plain=True)


@pytest.fixture(scope="session")
def blocky(blocky_pack):
    """The quantised model on native ops."""
    return Stepper(blocky_pack, kv="f32")


@pytest.fixture(scope="session")
def tiny_half(tiny_pack):
    """The float32 model with a cache in half precision."""
    return Stepper(tiny_pack, kv="fp16")


@pytest.fixture(scope="session")
def blocky_int8(blocky_pack):
    """The quantised model with a cache of 8 bits."""
    return Stepper(blocky_pack, kv="int8")


@pytest.fixture(params=["tiny", "tiny_half", "blocky", "blocky_int8"])
def native(request):
    """Both models on native ops, with caches of every type."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def ids():
    """Ids that both models have, an end of text among them."""
    ids = np.random.default_rng(0).integers(0, 500, 320)
    ids[[5, 77, 130]] = TINY.vocab - 3
    return ids
