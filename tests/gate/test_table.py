from typing import Any

from strata_jax.gate.judge import run_comparison
from strata_jax.gate.presets import comparisons
from strata_jax.gate.table import make_table
from tests.gate.gates import FACTS, job, threads_comparison


def _table(**scenario: Any) -> str:
    outcome = run_comparison(threads_comparison(1, 2), job(**scenario), lambda _: None)
    return make_table([outcome])


def test_shows_the_verdict_the_promise_and_the_sides():
    lines = _table().splitlines()

    assert lines[0] == "threads on fake.gguf (0123456789ab): IDENTICAL"
    assert lines[1].startswith("  promised T: placement invariance")
    assert max(map(len, lines[:-3])) <= 98
    assert lines[-5].startswith("  checked: 2 prompts, 16 ids, logits of 22 positions, ")
    assert " ".join(lines[-3].split()) == (
        "primary peer stream host file swaps peer swaps ids verdict flags"
    )
    assert lines[-2].split()[-2:] == ["reference", "--threads=1"]
    assert lines[-1].split()[-2:] == ["identical", "--threads=2"]


def test_columns_stand_under_each_other():
    outcome = run_comparison(comparisons("pcie", FACTS)[0][0], job(), lambda _: None)

    lines = make_table([outcome]).splitlines()

    assert [line[: line.index("%")] for line in lines[-3:]] == [
        "  share 0     35.3 ",
        "  share 0.5   35.3 ",
        "  share 1     35.3 ",
    ]


def test_shows_what_differs():
    text = _table(when={"threads": "2"}, wrong_logit=[4, 9])

    assert "DIFFERS" in text
    assert "  2 threads: differs: prompt first: position 4 (answer), logit of id 9: 209.0" in text


def test_shows_what_was_not_exercised():
    text = _table(tiers={"entries_host": 0})

    assert "NOT EXERCISED" in text
    assert "  1 threads: not exercised: entries_host > 0 expected, 0 seen" in text


def test_shows_what_was_not_reported():
    text = _table(without=["tiers"])

    assert "entries_host > 0 expected, not reported seen" in text
    assert (
        "  1 threads        -     -       -     -     -      -           -    8  not exercised"
        in text
    )


def test_shows_a_run_that_failed_and_what_was_left_out():
    text = _table(die=1)

    assert "FAILED" in text
    assert "  1 threads: run failed: prompt first: the process died (exit code 1)" in text
    assert "not run, as there is nothing to compare with: 2 threads" in text


def test_mentions_nans():
    assert "  1 threads: note: 100 logits are NaN" in _table(all_nan=True)


def test_blocks_are_apart():
    outcome = run_comparison(threads_comparison(1, 2), job(), lambda _: None)

    assert "\n\nthreads on fake.gguf" in make_table([outcome, outcome])
