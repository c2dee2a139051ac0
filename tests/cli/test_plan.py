import json
import sys
from pathlib import Path

import pytest

from strata_jax.cli.files import embedded_model
from strata_jax.weights.pack import open_pack
from strata_jax.weights.profile import Profile, routed_model
from tests.cli.cpu_time import cpu_seconds
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


@pytest.mark.parametrize(
    ("flag", "expected"),
    [
        ("--window_rows=99", "window_rows: 99, expected 1 to 64"),
        ("--prefill=65", "prefill: 65 tiles, expected 1 to 64"),
        ("--max_context=99999999999999999999", "a whole number from 1 to 16777216 expected"),
    ],
)
def test_refuses_what_generate_refuses(flag: str, expected: str):
    outcome = run("plan", flag)

    assert (outcome.code, outcome.out) == (2, "")
    assert expected in outcome.err


def test_counts_no_draft_layer_that_has_no_room_for_drafts():
    """And says, as generate does, that a context is longer than the file's."""
    outcomes = [
        run("plan", "--json", "--max_context=99999", flag)
        for flag in ("--window_rows=1", "--mtp=off", "--window_rows=8")
    ]

    needs = [json.loads(outcome.out)["memory"]["needs"][0] for outcome in outcomes]
    parts = [any("draft" in name for name in need["parts"]) for need in needs]
    assert parts == [False, False, True]
    assert "max_context: 99999 is more than the file's" in outcomes[0].err


@pytest.mark.parametrize("flag", [(), ("--json",)])
def test_a_bad_file_is_one_line(flag: tuple[str, ...]):
    outcome = run("plan", "--model=/none", *flag)

    assert (outcome.code, outcome.out) == (4, "")
    assert outcome.err == "strata-jax: /none: cannot be opened: No such file or directory\n"


def test_shows_where_experts_would_go():
    outcome = run("plan", "--expert_cache=24", "--peer_device=1", "--peer_slots=8", "--json")

    memory = json.loads(outcome.out)["memory"]
    assert (outcome.code, outcome.err, memory["fits"]) == (0, "", True)
    assert memory["placement"]["primary"]["experts_by_layer"] == [3] * 8
    assert memory["placement"]["peer"]["experts"] == 8


def test_names_flags_without_effect():
    outcome = run("plan", "--expert_cache=0", "--adapt_swaps=8", "--peer_reserve_mib=5")

    assert outcome.code == 0
    assert "--adapt_swaps: no effect, the expert cache is off\n" in outcome.out
    assert "--peer_reserve_mib: no effect, there is no peer" in outcome.out


@pytest.mark.parametrize("flag", [(), ("--json",)])
def test_what_does_not_fit_is_shown_and_refused(flag: tuple[str, ...]):
    outcome = run("plan", "--device_memory_mib=1", *flag)

    assert outcome.code == 3
    assert outcome.err.count("\n") == 1
    assert "at most 1 MiB expected (--device_memory_mib=1)" in outcome.err
    assert "--device_memory_mib=" in outcome.err.partition(";")[2]
    if flag:
        assert json.loads(outcome.out)["memory"]["fits"] is False
    else:
        assert "DOES NOT FIT" in outcome.out


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (("--peer_device=1",), "--peer_device=1 needs the primary's cache"),
        (("--peer_device=0", "--expert_cache=8"), "--peer_device=0: device 0 is the primary"),
        (("--peer_device=7", "--expert_cache=8"), "--peer_device=7: there is no such device"),
        (
            ("--peer_device=1", "--expert_cache=0"),
            "--peer_device=1 and --expert_cache=0 contradict",
        ),
        (("--peer_device=1", "--layer_split=4"), "--layer_split is not supported; a second device"),
        (("--pear_device=1",), "unknown flag --pear_device; did you mean --peer_device?"),
    ],
)
def test_refuses_settings_that_cannot_be(args: tuple[str, ...], expected: str):
    outcome = run("plan", *args)

    assert (outcome.code, outcome.out) == (2, "")
    assert expected in outcome.err


def test_none_is_no_peer():
    assert run("plan", "--peer_device=-1").code == 0


def test_follows_a_profile(tmp_path: Path):
    path = tmp_path / "p.json"
    with open_pack(embedded_model()) as pack:
        Profile(model=routed_model(pack), ranked=((7, 15), (6, 0))).save(path)

    outcome = run("plan", f"--expert_profile={path}", "--expert_cache=2", "--json")

    placed = json.loads(outcome.out)["memory"]["placement"]["primary"]
    assert placed["experts_by_layer"] == [0] * 6 + [1, 1]


def test_refuses_another_models_profile(tmp_path: Path):
    path = make_model(tmp_path / "other.gguf", sparse=True).path
    profile = tmp_path / "p.json"
    with open_pack(path) as pack:
        Profile(model=routed_model(pack), ranked=((0, 0),)).save(profile)

    outcome = run("plan", f"--expert_profile={profile}")

    assert (outcome.code, outcome.out) == (4, "")
    assert "is a profile of another model" in outcome.err


def test_refuses_in_time_what_the_released_model_lacks(tmp_path: Path):
    """Contract P: exit code 3 within two seconds, from a fresh process."""
    path = make_model(tmp_path / "real.gguf", REAL, types=REAL_TYPES, sparse=True).path
    args = ["--device_memory_mib=24576", "--expert_cache=24576", "--json", f"--model={path}"]

    took_s, done = cpu_seconds([sys.executable, "-m", "strata_jax", "plan", *args])

    assert done.returncode == 3
    assert b"--expert_cache=" in done.stderr.partition(b";")[2]
    assert took_s < 2


CODE = """
import sys
from strata_jax.cli.main import main
code = main(sys.argv[1:], None, sys.stdout, sys.stderr)
print("jax" in sys.modules)
sys.exit(code)
"""


def test_generate_refuses_in_time_too():
    """Report 27: before JAX starts, which takes a second by itself."""
    args = ["generate", "--prompt_ids=1", "--device_memory_mib=1", "--platform=cpu"]

    took_s, done = cpu_seconds([sys.executable, "-c", CODE, *args])

    assert (done.returncode, done.stdout) == (3, b"False\n")
    assert b"--device_memory_mib=" in done.stderr.partition(b";")[2]
    assert took_s < 2
