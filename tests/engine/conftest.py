"""A small random model, open in an engine."""

import dataclasses
import pathlib

import numpy as np
import pytest

from strata_jax.engine.engine import Engine, EngineOptions
from strata_jax.engine.request import Request, SamplingSettings
from strata_jax.weights.pack import open_pack
from tests.gguf_maker import TINY, make_model
from tests.stepper import Stepper

EMBEDDED = pathlib.Path(__file__).parents[2] / "strata_jax/models/strata-small/model-IQ3_S.gguf"
GREEDY = SamplingSettings(temperature=0.0)


@pytest.fixture(scope="session")
def tiny_pack(tmp_path_factory):
    """Four layers of width 64, float32, indexer budget 32, vocabulary 512, context 512."""
    sizes = dataclasses.replace(TINY, drafts=0)
    with open_pack(make_model(tmp_path_factory.mktemp("engine") / "tiny.gguf", sizes).path) as pack:
        yield pack


@pytest.fixture(scope="session")
def embedded_pack():
    """The model that comes with the package."""
    with open_pack(EMBEDDED) as pack:
        yield pack


@pytest.fixture(scope="session")
def stepper(tiny_pack):
    """The same model, read by hand."""
    return Stepper(tiny_pack)


@pytest.fixture(scope="session")
def ids():
    """Ids of the small model."""
    return np.random.default_rng(7).integers(0, TINY.vocab, 400).tolist()


@pytest.fixture(scope="module")
def engine(tiny_pack):
    """The small model, all logits kept."""
    engine = Engine.open(tiny_pack, EngineOptions(all_logits=True))
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def request_of():
    """(ids, max_tokens, settings) -> a request, greedy by default."""

    def make(ids, max_tokens=4, settings=GREEDY, stop_ids=()):
        stop = frozenset(stop_ids)
        return Request(ids=tuple(ids), settings=settings, max_tokens=max_tokens, stop_ids=stop)

    return make
