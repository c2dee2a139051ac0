import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from strata_jax.errors import UsageError
from strata_jax.gate.judge import check_common, run_comparison
from strata_jax.gate.outcome import Outcome
from strata_jax.gate.presets import PRESETS, comparisons
from tests.gate.gates import FACTS, job, threads_comparison

TWO = {"threads": "2"}


def _run(*counts: int, common: dict[str, str] | None = None, **scenario: Any) -> Outcome:
    comparison = threads_comparison(*(counts or (1, 2)))
    return run_comparison(comparison, job(common=common, **scenario), lambda _: None)


def test_equal_sides_are_identical():
    outcome = _run(1, 2, 3)

    assert outcome.verdict == "identical"
    assert [run.side.name for run in outcome.runs] == ["1 threads", "2 threads", "3 threads"]
    assert len({run.pid for run in outcome.runs}) == 3
    assert [len(run.answers) for run in outcome.runs] == [2, 2, 2]
    assert outcome.runs[1].counters["entries_host"] == 200


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_passes_where_everything_is_exercised(name: str):
    for comparison in comparisons(name, FACTS)[0]:
        outcome = run_comparison(comparison, job(), lambda _: None)

        seen = {seen.text: seen.found for run in outcome.runs for seen in run.seen}
        assert outcome.verdict == "identical", seen


def test_tells_which_side_and_prompt_run():
    lines = []

    run_comparison(threads_comparison(1, 2), job(), lines.append)

    assert lines[:3] == [
        "gate threads, 1 threads: starting",
        "gate threads, 1 threads: prompt 1 of 2",
        "gate threads, 1 threads: prompt 2 of 2",
    ]


def test_one_bit_of_one_logit_differs():
    run = _run(when=TWO, wrong_logit=[4, 9]).runs[1]

    assert run.verdict == "differs"
    first, second = run.differences
    assert (first.prompt, first.ids, first.finish_reasons, first.positions) == (
        "first",
        None,
        None,
        None,
    )
    assert first.logits is not None
    assert (first.logits.position, first.logits.token_id) == (4, 9)
    assert second.prompt == "second"


def test_one_id_differs():
    run = _run(when=TWO, wrong_id=2).runs[1]

    assert run.verdict == "differs"
    assert run.differences[0].ids is not None
    assert run.differences[0].ids.index == 2
    assert run.differences[0].logits is None


def test_one_end_differs():
    run = _run(when=TWO, finish_reason="stop").runs[1]

    assert run.differences[0].finish_reasons == ("length", "stop")


def test_a_shorter_answer_differs():
    run = _run(when=TWO, shorter=1).runs[1]

    assert run.differences[0].ids is not None
    assert run.differences[0].ids.other is None
    assert run.differences[0].positions == (6, 5)


def test_a_difference_does_not_hide_later_sides():
    outcome = _run(1, 2, 3, when=TWO, wrong_id=0)

    assert [run.verdict for run in outcome.runs] == ["identical", "differs", "identical"]
    assert outcome.verdict == "differs"


def test_what_was_not_exercised_is_not_identical():
    outcome = _run(when=TWO, tiers={"entries_host": 0})

    assert [run.verdict for run in outcome.runs] == ["identical", "not exercised"]
    assert outcome.verdict == "not exercised"
    missed = [seen for seen in outcome.runs[1].seen if not seen.holds]
    assert [(seen.text, seen.found) for seen in missed] == [("entries_host > 0", 0)]


@pytest.mark.parametrize("fault", [{"without": ["tiers"]}, {"tiers": {"entries_host": None}}])
def test_what_was_not_reported_was_not_exercised(fault: dict[str, Any]):
    outcome = _run(**fault)

    assert outcome.verdict == "not exercised"
    assert [seen.found for seen in outcome.runs[0].seen if not seen.holds] == [None]


def test_a_mode_that_fell_back_was_not_exercised():
    comparison = comparisons("ple-io", FACTS)[0][0]

    outcome = run_comparison(comparison, job(mode="mmap"), lambda _: None)

    assert [run.verdict for run in outcome.runs] == ["not exercised", "identical", "not exercised"]


@pytest.mark.parametrize("windows", [{"1": 9}, {"1": 9, "8": 4}, None])
def test_windows_of_other_live_rows_are_not_exercised(windows: dict[str, int] | None):
    """A window width that was asked for and not taken would compare one width with itself."""
    comparison = comparisons("windows", FACTS)[0][0]

    outcome = run_comparison(comparison, job(when={"spec": "3"}, windows=windows), lambda _: None)

    verdicts = {run.side.name: run.verdict for run in outcome.runs}
    assert verdicts.pop("3 live rows") == "not exercised"
    assert set(verdicts.values()) == {"identical"}
    assert outcome.verdict == "not exercised"


def test_logits_without_a_number_show_nothing():
    outcome = _run(all_nan=True)

    assert outcome.verdict == "not exercised"
    assert [seen.text for seen in outcome.runs[0].seen if not seen.holds] == [
        "positions with nothing but NaN == 0"
    ]


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ({"die": 1}, "prompt first: the process died"),
        ({"code": 3}, "prompt first: generate ended with exit code 3"),
        ({"no_logits": True}, "prompt first: its logits cannot be read"),
        ({"type": "d"}, "float64 [6, 50], float32 [positions, V] expected"),
        ({"without": ["ids"]}, "prompt first: its result has no ids"),
        ({"from_request": 1, "die": 1}, "prompt second: the process died"),
        ({"end_by": 11}, "end: it died at its end (signal 11)"),
    ],
)
def test_a_failed_run_is_told_apart(fault: dict[str, Any], expected: str):
    outcome = _run(1, 2, 3, when=TWO, **fault)

    assert [run.verdict for run in outcome.runs] == ["identical", "failed", "identical"]
    assert outcome.verdict == "failed"
    assert expected in (outcome.runs[1].failure or "")


def test_nothing_is_compared_with_a_reference_that_failed():
    outcome = _run(when={"threads": "1"}, die=1)

    assert [run.verdict for run in outcome.runs] == ["failed"]


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ({"hash": "f" * 16}, "ran a model of hash ffffffffffff, 0123456789ab expected"),
        ({"longer_prompt": 1}, "prompt first has 4 tokens there, 3 expected"),
        ({"versions": {"numpy": "1"}}, "equal versions expected"),
        ({"width": 7}, "7 logits a position, the reference has 50"),
    ],
)
def test_refuses_sides_that_cannot_be_compared(fault: dict[str, Any], expected: str):
    with pytest.raises(UsageError, match=expected):
        _run(when=TWO, **fault)


def test_refuses_a_flag_in_which_the_sides_differ():
    with pytest.raises(UsageError, match="received --threads=4, but threads compares 1, 2"):
        check_common(threads_comparison(1, 2), {"threads": "4"})


def test_given_flags_overrule_what_all_sides_share():
    comparison = comparisons("threads", FACTS)[0][0]

    outcome = run_comparison(comparison, job(common={"expert_cache": "40"}), lambda _: None)

    assert {run.flags["expert_cache"] for run in outcome.runs} == {"40"}


def test_a_ranking_goes_in_rounds_over_the_layers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    comparison = comparisons("processes", FACTS)[0][0]
    seen = []

    def look(_: str) -> None:
        seen.extend(json.loads(path.read_text()) for path in tmp_path.glob("*/ranking.json"))

    outcome = run_comparison(comparison, job(), look)

    ranking = seen[0]
    assert ranking["format"] == "strata-profile-1"
    assert (ranking["model"], ranking["layers"], ranking["experts"]) == (FACTS.hash, 8, 16)
    assert ranking["ranked"][:9] == [[layer, 0] for layer in range(8)] + [[0, 1]]
    assert len(ranking["ranked"]) == 128
    assert outcome.runs[0].flags["expert_profile"] == outcome.runs[1].flags["expert_profile"]
    assert list(tmp_path.iterdir()) == []


def test_only_given_flags_may_set_a_ranking_of_their_own():
    comparison = dataclasses.replace(threads_comparison(1, 2), needs_ranking=True)

    outcome = run_comparison(comparison, job(common={"expert_profile": "mine"}), lambda _: None)

    assert {run.flags["expert_profile"] for run in outcome.runs} == {"mine"}
