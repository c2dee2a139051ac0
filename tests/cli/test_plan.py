import json
from pathlib import Path

import pytest

from tests.cli.fake_engine import run
from tests.gguf_maker import REAL, REAL_TYPES, make_model


def test_lists_tiers_and_tensors():
    outcome = run("plan")

    assert (outcome.code, outcome.err) == (0, "")
    assert "experts" in outcome.out
    assert "per_layer_token_embd.weight" in outcome.out


def test_prints_one_object():
    outcome = run("plan", "--json", "--max-context=100")

    result = json.loads(outcome.out)
    assert (outcome.code, outcome.err, result["max_context"]) == (0, "", 100)
    assert sum(tier["num_tensors"] for tier in result["tiers"]) == len(result["tensors"])


def test_plans_the_released_sizes_from_headers(tmp_path: Path):
    path = make_model(tmp_path / "real.gguf", REAL, types=REAL_TYPES, sparse=True).path

    outcome = run("plan", f"--model={path}", "--json")

    sizes = {tier["name"]: tier["bytes"] for tier in json.loads(outcome.out)["tiers"]}
    assert outcome.code == 0
    assert sizes["ngram"] > 20e9


@pytest.mark.parametrize("flag", [(), ("--json",)])
def test_a_bad_file_is_one_line(flag: tuple[str, ...]):
    outcome = run("plan", "--model=/none", *flag)

    assert (outcome.code, outcome.out) == (4, "")
    assert outcome.err == "strata-jax: /none: cannot be opened: No such file or directory\n"
