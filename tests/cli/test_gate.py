import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from absl import flags

from strata_jax.cli import gate
from strata_jax.cli.context import Context, open_engine
from strata_jax.cli.files import embedded_model
from strata_jax.cli.flags import parse
from strata_jax.cli.interrupts import Interrupts
from strata_jax.cli.output import Output
from strata_jax.errors import UsageError
from strata_jax.gate.presets import PRESETS
from strata_jax.weights.pack import open_pack
from tests.cli.fake_engine import run
from tests.gate.gates import command
from tests.gguf_content import model_pairs
from tests.gguf_maker import TINY, make_model


@dataclasses.dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


@pytest.fixture(scope="module")
def model_hash() -> str:
    with open_pack(embedded_model()) as pack:
        return pack.file_hash()


@pytest.fixture
def compare(model_hash: str):
    """Runs the command with a fake process."""

    def compared(*args: str, out: io.StringIO | None = None, **scenario: Any) -> Outcome:
        values = flags.FlagValues()
        gate.define(values)
        parse("gate", values, [*args], {})
        out, err = out or io.StringIO(), io.StringIO()
        context = Context(
            output=Output(out, err), interrupts=Interrupts(), stdin=None, open_engine=open_engine
        )
        code = gate.compare(values, context, command(model_hash, **scenario))
        return Outcome(code, out.getvalue(), err.getvalue())

    return compared


def test_what_was_compared_comes_out_although_the_record_cannot_be_written(compare):
    written = io.StringIO()

    with pytest.raises(OSError, match="No space left"):
        compare("--preset=pcie", "--record=/dev/full", out=written)

    assert "IDENTICAL" in written.getvalue()
    assert Path("/dev/full").is_char_device()  # no file took the device's place


def test_prints_a_table(compare):
    outcome = compare("--preset=pcie")

    assert outcome.code == 0
    assert "pcie on model-IQ3_S.gguf" in outcome.out
    assert "IDENTICAL" in outcome.out
    assert "gate pcie, share 0: prompt 1 of 4" not in outcome.out
    assert "gate pcie, share 0: starting\n" in outcome.err


def test_prints_one_object(compare):
    outcome = compare("--preset=threads", "--json", "--max-tokens=5")

    record = json.loads(outcome.out)
    assert (outcome.code, record["verdict"], record["preset"]) == (0, "identical", "threads")
    assert record["comparisons"][0]["max_tokens"] == 5
    assert len(record["comparisons"][0]["sides"][0]["answers"][0]["ids"]) == 5


def test_writes_the_record_beside_the_table(compare, tmp_path: Path):
    outcome = compare("--preset=processes", f"--record={tmp_path}/gate.json")

    record = json.loads((tmp_path / "gate.json").read_text())
    assert (outcome.code, record["verdict"]) == (0, "identical")
    assert outcome.out.startswith("processes on")


def test_all_runs_every_preset(compare):
    outcome = compare("--preset=all", "--max_tokens=1", "--json")

    names = [each["name"] for each in json.loads(outcome.out)["comparisons"]]
    assert outcome.code == 0
    run = [preset for preset in PRESETS.values() if not preset.needs_gpu]
    assert len(names) == len(run) + 3  # single-vs-peer compares three times, drafts twice


@pytest.mark.parametrize(
    ("scenario", "code", "verdict"),
    [
        ({"when": {"threads": "2"}, "wrong_logit": [3, 3]}, 1, "differs"),
        ({"when": {"threads": "2"}, "die": 1}, 1, "failed"),
        ({"die": 1}, 1, "failed"),
        ({"tiers": {"swaps_primary": 0}}, 5, "not exercised"),
        (
            {"when": {"threads": "2"}, "tiers": {"swaps_primary": 0}, "wrong_id": 0},
            1,
            "differs",
        ),
    ],
)
def test_the_exit_code_is_the_verdict(compare, scenario: dict[str, Any], code: int, verdict: str):
    outcome = compare("--preset=threads", "--json", **scenario)

    assert (outcome.code, json.loads(outcome.out)["verdict"]) == (code, verdict)


def test_windows_that_were_not_as_wide_as_asked_are_exit_code_5(compare):
    outcome = compare("--preset=windows", when={"spec": "4"}, windows={"1": 3, "8": 2})

    assert outcome.code == 5
    assert "4 live rows: not exercised: live rows of the widest window == 4 expected, 8 seen" in (
        outcome.out
    )


def test_a_process_that_crashes_when_it_closes_is_exit_code_1(compare):
    outcome = compare("--preset=threads", "--json", when={"threads": "2"}, end_by=11)

    assert (outcome.code, json.loads(outcome.out)["verdict"]) == (1, "failed")


def test_hands_given_flags_to_all_sides(compare):
    outcome = compare(
        "--preset=pcie",
        "--threads=3",
        "--adapt-decay=0.5",
        "--deterministic",
        "--expert_cache=30",
        "--json",
    )

    for side in json.loads(outcome.out)["comparisons"][0]["sides"]:
        given = {name: side["flags"][name] for name in ("threads", "adapt_decay", "deterministic")}
        assert given == {"threads": "3", "adapt_decay": "0.5", "deterministic": "true"}
        assert side["flags"]["expert_cache"] == "30"


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ((), "--preset=NAME expected (single-vs-peer: N experts on one card"),
        (("--preset=residncy",), "unknown --preset=residncy; did you mean residency?"),
        (("--preset=xyzzy",), "unknown --preset=xyzzy; one of single-vs-peer, residency"),
        (("--preset=threads", "--threads=2"), "received --threads=2, but threads compares 1, 2, 3"),
        (("--preset=all", "--pcie_frac=1"), "received --pcie_frac=1.0, but hectic compares"),
        (("--preset=threads", "--max_tokens=9000"), "do not fit a context of 8192"),
        (("--preset=threads", "--record=/none/x"), "a file in an existing folder expected"),
    ],
)
def test_refuses_before_anything_runs(compare, args: tuple[str, ...], expected: str):
    with pytest.raises(UsageError) as error:
        compare(*args, die=1)

    assert expected in str(error.value)


def test_a_prompt_is_past_the_budget_in_force(compare):
    outcome = compare("--preset=threads", "--indexer_budget=512", "--json", "--max_tokens=1")

    prompts = json.loads(outcome.out)["comparisons"][0]["prompts"]
    assert max(prompt["tokens"] for prompt in prompts) > 512


def test_refuses_a_model_that_is_replaced_meanwhile(compare):
    with pytest.raises(UsageError, match="was replaced, start anew"):
        compare("--preset=threads", hash="f" * 64)


@pytest.mark.parametrize(
    ("args", "code", "expected"),
    [
        (("--preset=x",), 2, "strata-jax: gate: unknown --preset=x"),
        (("--preset=threads", "--model=/none"), 4, "strata-jax: /none: cannot be opened"),
        (("--preset=threads", "--max_tokens=0"), 2, "a whole number of at least 1 expected"),
        (("--preset=ple-io", "--peer_device=7"), 2, "has no side with a peer"),
        (
            ("--preset=hectic", "--peer_device=7"),
            2,
            "hectic, two cards: --peer_device=7: there is no",
        ),
        (("--preset=windows", "--window_rows=99"), 2, "1 live row: window_rows: 99, expected"),
        (("--preset=windows", "--window_rows=2"), 2, "3 live rows: spec: 3, expected 1 to window"),
        (("--preset=threads", "--timeout_s=1e300"), 2, "a number from 1 to 10000000 expected"),
        (("--preset=threads", "--prompt=x"), 2, "--prompt is a flag of generate, not of gate"),
        (("--preset=threads", "--expert_profile_save=x"), 2, "--expert_profile_save"),
        (("--preset=threads", "--routing_out=x"), 2, "--routing_out is a flag of"),
    ],
)
def test_bad_input_is_one_line(args: tuple[str, ...], code: int, expected: str):
    outcome = run("gate", *args, "--platform=cpu")

    assert (outcome.code, outcome.out) == (code, "")
    assert expected in outcome.err
    assert outcome.err.count("\n") == 1


def test_a_model_without_a_table_is_refused_for_ple_io_only(compare, tmp_path: Path):
    pairs = {pair.key: None for pair in model_pairs(TINY) if pair.key.startswith("qwen4exp.ple.")}
    drop = ("*.ple_*", "per_layer_token_embd.weight")
    path = make_model(tmp_path / "model.gguf", sparse=True, pairs=pairs, drop=drop).path

    with pytest.raises(UsageError, match="has no n-gram table"):
        compare("--preset=ple-io", f"--model={path}")
    with open_pack(path) as pack:
        outcome = compare(
            "--preset=all", f"--model={path}", "--max_tokens=1", hash=pack.file_hash()
        )
    assert "note: left out: gate: " in outcome.err
    assert "ple-io on" not in outcome.out


def test_ctrl_c_leaves_no_process(model_hash: str, tmp_path: Path):
    asked = tmp_path / "asked"
    worker = command(model_hash, touch=str(asked), hang_s=60)
    code = (
        "import sys; from strata_jax.cli import gate; from strata_jax.gate import runs; "
        f"runs.WORKER = {worker!r}; from strata_jax.cli.main import main; "
        "sys.exit(main(['gate', '--preset=threads'], None, sys.stdout, sys.stderr))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    while not asked.exists():
        assert process.poll() is None
        time.sleep(0.01)
    [child] = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()

    process.send_signal(signal.SIGINT)

    assert process.wait(10) == 130
    assert not _is_running(int(child))


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
def test_the_embedded_model_is_identical_with_misses_streamed_while_experts_move():
    outcome = run("gate", "--preset=pcie", "--max_tokens=8", "--platform=cpu", "--json")

    record = json.loads(outcome.out)
    sides = record["comparisons"][0]["sides"]
    assert (outcome.code, record["verdict"]) == (0, "identical"), outcome.err
    assert all(seen["holds"] for side in sides for seen in side["exercised"])
    assert sides[1]["counters"]["entries_stream"] > 0
    assert len({side["process"]["pid"] for side in sides}) == 3
