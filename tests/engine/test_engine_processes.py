"""The engine in processes of its own: one core, and a compile cache that outlives it."""

import json
import pathlib
import subprocess
import sys

import pytest

from tests.gguf_maker import TINY, make_model

ROOT = pathlib.Path(__file__).parents[2]

ONE_CORE = """
import os, sys
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # before any pool is made
from strata_jax.engine.engine import Engine, EngineOptions
from strata_jax.engine.request import Request, SamplingSettings
from strata_jax.weights.pack import open_pack

with open_pack(sys.argv[1]) as pack:
    engine = Engine.open(pack, EngineOptions(threads=int(sys.argv[2]), max_context=128))
    for seed in range(int(sys.argv[3])):
        ids = tuple((7 * seed + 3 * i) % 500 for i in range(1 + 9 * seed % 70))
        request = Request(ids=ids, settings=SamplingSettings(seed=seed), max_tokens=4)
        assert len(list(engine.start(request))) == 4
    engine.close()
print("done")
"""

WARM_START = """
import json, pathlib, sys
import jax
from strata_jax.engine.engine import Engine, EngineOptions
from strata_jax.engine.request import Request, SamplingSettings
from strata_jax.weights.pack import open_pack

hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event))
with open_pack(sys.argv[1]) as pack:
    options = EngineOptions(max_context=128, all_logits=True, cache_dir=pathlib.Path(sys.argv[2]))
    engine = Engine.open(pack, options)
    settings = SamplingSettings(temperature=0.0)
    answer = engine.start(Request(ids=tuple(range(70)), settings=settings, max_tokens=6))
    print(json.dumps({
        "ids": list(answer),
        "logits": answer.logits.tobytes().hex(),
        "hits": hits.count("/jax/compilation_cache/cache_hits"),
        "misses": hits.count("/jax/compilation_cache/cache_misses"),
    }))
    engine.close()
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_model(tmp_path_factory.mktemp("processes") / "tiny.gguf", TINY).path)


def run(code, *args):
    """A watchdog stands over it: a hang is a failure after a minute."""
    command = [sys.executable, "-c", code, *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("threads", [1, 3])
def test_requests_on_one_core_end(model, threads):
    assert run(ONE_CORE, model, threads, 40) == "done"


def test_a_second_start_compiles_nothing_and_answers_the_same(model, tmp_path):
    cold = json.loads(run(WARM_START, model, tmp_path))
    warm = json.loads(run(WARM_START, model, tmp_path))

    assert (cold["hits"], warm["misses"]) == (0, 0)
    assert warm["hits"] == cold["misses"] >= 3
    assert warm["ids"] == cold["ids"]
    assert warm["logits"] == cold["logits"]


def test_a_damaged_cache_entry_costs_a_compilation_and_nothing_else(model, tmp_path):
    cold = json.loads(run(WARM_START, model, tmp_path))
    for entry in tmp_path.iterdir():
        if entry.name.endswith("-cache"):
            entry.write_bytes(entry.read_bytes()[:100])

    again = json.loads(run(WARM_START, model, tmp_path))

    assert again["logits"] == cold["logits"]
