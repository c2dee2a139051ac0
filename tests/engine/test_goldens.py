"""Logits against what independent implementations say about the same files."""

import hashlib
import pathlib

import numpy as np
import pytest

from strata_jax.engine.engine import Engine, EngineOptions
from strata_jax.weights.pack import open_pack
from tests.gguf_maker import TINY, make_model
from tests.stepper import Stepper

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
SHARED = pathlib.Path(__file__).parents[3] / "shared"
QUANTISED = ["zoo_a/IQ3_S", "zoo_a/Q2_0", "zoo_b/Q4_K_M", "strata-small/IQ3_S"]
KL_SLACK = 1.05
TOP1_SLACK = 0.02
MAX_DIFFERENCE = 5e-5


def shared_prompts(name):
    """The stored vectors of a model file, or a skip."""
    paths = sorted((SHARED / "golden" / name).glob("*.npz"))
    if not paths:
        pytest.skip(
            f"LOUD SKIP: {SHARED}/golden/{name} is not there: the full vectors were not tried"
        )
    return [dict(np.load(path)) for path in paths]


def prompt_logits(pack, prompts, request_of, kv):
    """Float64 logits of every position of each prompt, through the engine."""
    engine = Engine.open(pack, EngineOptions(max_context=512, all_logits=True, kv=kv))
    found = []
    for ids in prompts:
        generation = engine.start(request_of(ids.tolist(), max_tokens=0))
        assert list(generation) == []
        found.append(generation.logits.astype(np.float64))
    engine.close()
    return found


def log_softmax(x):
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def with_rest(log_probs):
    """Probabilities [P, n + 1]: those given, and all others together."""
    probs = np.exp(log_probs)
    return np.c_[probs, np.maximum(1 - probs.sum(axis=1), 1e-12)]


def assert_as_good_as_the_peer(kl, top1, peer_kl, peer_top1):
    """Mean KL and top-1 agreement over all positions against those of llama.cpp."""
    kl, top1, peer_kl, peer_top1 = map(np.concatenate, (kl, top1, peer_kl, peer_top1))
    assert kl.mean() <= KL_SLACK * peer_kl.mean()
    assert top1.mean() >= peer_top1.mean() - TOP1_SLACK


@pytest.mark.parametrize("kv", ["fp16", "int8", "f32"])
def test_the_embedded_model_is_as_near_to_its_exact_logits_as_the_peer(
    embedded_pack, request_of, kv
):
    golden = np.load(GOLDEN / "strata-small-IQ3_S.npz")
    names = ("short", "chat", "long")
    kl, top1 = [], []

    prompts = [golden[f"{name}.ids"] for name in names]
    logits = prompt_logits(embedded_pack, prompts, request_of, kv)

    for name, rows in zip(names, logits, strict=True):
        rows, top = rows[golden[f"{name}.positions"]], golden[f"{name}.top_ids"].astype(int)
        exact = golden[f"{name}.top_logits"] - golden[f"{name}.logsumexp"][:, None]
        ours = np.take_along_axis(log_softmax(rows), top, axis=1)
        # The divergence of the 20 largest and of all others as one: a lower bound of the whole.
        p, q = map(with_rest, (exact, ours))
        kl.append((p * np.log(p / q)).sum(axis=1))
        top1.append(rows.argmax(axis=1) == top[:, 0])
    peer = [[golden[f"{name}.llama_cpp_{x}"] for name in names] for x in ("kl", "top1")]
    assert_as_good_as_the_peer(kl, top1, *peer)


def test_a_random_float32_model_equals_the_plain_op_set_on_record(tmp_path, request_of):
    golden = np.load(GOLDEN / "tiny-f32.npz")
    path = make_model(tmp_path / "tiny.gguf", TINY).path
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert digest == golden["sha256"], "the file is made otherwise: see tests/golden/README.md"

    with open_pack(path) as pack:
        (logits,) = prompt_logits(pack, [golden["ids"]], request_of, "f32")

    assert np.abs(logits[golden["positions"]] - golden["logits"]).max() < MAX_DIFFERENCE


@pytest.mark.parametrize(
    ("kv", "largest"), [("f32", MAX_DIFFERENCE), ("fp16", 2e-4), ("int8", 5e-3)]
)
def test_the_float32_file_equals_the_independent_logits(request_of, kv, largest):
    prompts = shared_prompts("micro/f32")

    with open_pack(SHARED / "models/micro/model-f32.gguf") as pack:
        logits = prompt_logits(pack, [prompt["ids"] for prompt in prompts], request_of, kv)

    differences = [
        np.abs(rows[prompt["positions"]] - prompt["logits"]).max()
        for prompt, rows in zip(prompts, logits, strict=True)
    ]
    assert max(differences) < largest


@pytest.mark.parametrize(("form", "rows"), [("window", 8), ("tile", 64)])
def test_the_plain_op_set_equals_the_independent_logits(form, rows):
    prompts = shared_prompts("micro/f32")

    with open_pack(SHARED / "models/micro/model-f32.gguf") as pack:
        stepper = Stepper(pack, plain=True)
        logits = [stepper.read(prompt["ids"], steps=rows, form=form)[0] for prompt in prompts]

    for prompt, found in zip(prompts, logits, strict=True):
        assert np.abs(found[prompt["positions"]] - prompt["logits"]).max() < MAX_DIFFERENCE


@pytest.mark.parametrize("kv", ["fp16", "int8", "f32"])
@pytest.mark.parametrize("name", QUANTISED)
def test_a_quantised_file_is_as_near_to_its_exact_logits_as_the_peer(request_of, name, kv):
    prompts = shared_prompts(name)
    model, kind = name.split("/")

    with open_pack(SHARED / f"models/{model}/model-{kind}.gguf") as pack:
        logits = prompt_logits(pack, [prompt["ids"] for prompt in prompts], request_of, kv)

    kl, top1 = [], []
    for prompt, rows in zip(prompts, logits, strict=True):
        exact, ours = log_softmax(prompt["logits"].astype(float)), rows[prompt["positions"]]
        kl.append((np.exp(exact) * (exact - log_softmax(ours))).sum(axis=1))
        top1.append(ours.argmax(axis=1) == exact.argmax(axis=1))
    peer = [[prompt[f"llama_cpp_{x}"] for prompt in prompts] for x in ("kl", "top1")]
    assert_as_good_as_the_peer(kl, top1, *peer)
