"""A gate's outcome as a table for people."""

import textwrap
from collections.abc import Sequence
from pathlib import Path

from strata_jax.gate.comparison import PROMISES, differing_flags
from strata_jax.gate.outcome import TIERS, Outcome, SideRun

_HEAD = ("", *TIERS, "swaps", "peer swaps", "ids", "verdict", "flags")
_UNKNOWN = "-"
_WIDTH = 98


def make_table(outcomes: Sequence[Outcome]) -> str:
    """One block a comparison: its sides, then what differs or was not exercised."""
    return "\n".join(_block(outcome) for outcome in outcomes)


def _block(outcome: Outcome) -> str:
    comparison = outcome.comparison
    contract = comparison.contract
    num_ids = sum(len(answer.ids) for run in outcome.runs for answer in run.answers)
    num_positions = sum(answer.logits.positions for run in outcome.runs for answer in run.answers)
    lines = [
        f"{comparison.name} on {Path(outcome.facts.path).name} ({outcome.facts.hash[:12]}): "
        f"{outcome.verdict.upper()}",
        *textwrap.wrap(
            f"promised {contract}: {PROMISES[contract]}",
            _WIDTH,
            initial_indent="  ",
            subsequent_indent="    ",
        ),
        f"  checked: {len(outcome.prompts)} prompts, {num_ids} ids, logits of {num_positions} "
        f"positions, {outcome.seconds:.0f} s",
        "",
        *_rows(outcome),
        "",
    ]
    for run in outcome.runs:
        lines += [f"  {run.side.name}: {line}" for line in _problems(run)]
    missing = [side.name for side in comparison.sides[len(outcome.runs) :]]
    if missing:
        lines.append(f"  not run, as there is nothing to compare with: {', '.join(missing)}")
    return "\n".join(lines).rstrip() + "\n"


def _rows(outcome: Outcome) -> list[str]:
    varied = sorted(differing_flags([run.side.flags for run in outcome.runs]))
    rows: list[tuple[str, ...]] = [_HEAD]
    for index, run in enumerate(outcome.runs):
        shown = " ".join(f"--{name}={run.flags[name]}" for name in varied if name in run.flags)
        verdict = run.verdict
        is_reference = index == 0 and verdict == "identical"
        rows.append(
            (
                run.side.name,
                *(_share(run, tier) for tier in TIERS),
                *(
                    str(run.counters.get(name, _UNKNOWN))
                    for name in ("swaps_primary", "swaps_peer")
                ),
                str(sum(len(answer.ids) for answer in run.answers)),
                "reference" if is_reference else verdict,
                shown,
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    return [f"  {_align(row, widths)}".rstrip() for row in rows]


def _align(row: tuple[str, ...], widths: list[int]) -> str:
    """Numbers to the right, words to the left."""
    last_number = _HEAD.index("ids")
    cells = [
        cell.rjust(width) if 0 < column <= last_number else cell.ljust(width)
        for column, (cell, width) in enumerate(zip(row, widths))
    ]
    return "  ".join(cells)


def _share(run: SideRun, tier: str) -> str:
    shares = run.shares
    return _UNKNOWN if shares is None else f"{100 * shares[tier]:.1f} %"


def _problems(run: SideRun) -> list[str]:
    if run.failure is not None:
        return [f"run failed: {run.failure}"]
    lengths = {answer.prompt.name: len(answer.prompt.ids) for answer in run.answers}
    lines = [
        f"differs: {line}"
        for difference in run.differences
        for line in difference.lines(lengths[difference.prompt])
    ]
    lines += [
        f"not exercised: {seen.text} expected, "
        f"{'not reported' if seen.found is None else seen.found} seen"
        for seen in run.seen
        if not seen.holds
    ]
    nan = sum(answer.logits.num_nan for answer in run.answers)
    return [*lines, *([f"note: {nan} logits are NaN"] if nan else [])]
