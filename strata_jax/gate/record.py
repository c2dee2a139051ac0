"""A gate's record: everything needed to run it again and to compare two of them, as JSON.

Layout ("strata-gate-1"): verdict and exit code; versions and the native library's hash; then one entry
a comparison and model, with what was promised and checked, the prompts, and a list of sides, each with
all its flags, process, counters, answers (ids, hashes, timings, what `generate` reported of tiers) and
differences from the first side.
"""

import dataclasses
import hashlib
import importlib.util
import json
import os
import platform
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from strata_jax.errors import UsageError
from strata_jax.gate.comparison import PROMISES
from strata_jax.gate.outcome import EXIT_CODES, Answer, Outcome, Seen, SideRun, Verdict, worst
from strata_jax.gate.prompts import Prompt
from strata_jax.gate.runs import to_args
from strata_jax.weights.profile import write_atomically

FORMAT = "strata-gate-1"
CHECKED = ("generated ids, one by one", "reasons to end")
CHECKED_LOGITS = (
    "float32 logits of every position read, prompt included, bit for bit; NaNs by position"
)
"""Where they are asked for."""
_NATIVE = "strata_jax._native"
_LEFT_OUT = frozenset(
    {"ids", "text", "finish_reason", "prompt_tokens", "model", "versions", "flags", "plan"}
)
"""Of a result: what stands elsewhere in the record, and the text, which the ids decide."""


def make_record(
    preset: str, outcomes: Sequence[Outcome], began: float, library: Mapping[str, str | None]
) -> dict[str, Any]:
    """The record of one `strata-jax gate`.

    Args:
        preset: its name.
        outcomes: of every model and comparison, at least one.
        began: seconds since 1970.
        library: `native_library` before the first run.

    Raises:
        UsageError: if it is another one by now: sides may have run different code.
    """
    if library != native_library():
        raise UsageError(
            f"gate: {library['file']} was rebuilt while the gate ran, the same code on all sides "
            "expected; start anew"
        )
    verdict: Verdict = worst([outcome.verdict for outcome in outcomes])
    return {
        "format": FORMAT,
        "preset": preset,
        "verdict": verdict,
        "exit_code": EXIT_CODES[verdict],
        "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(began)),
        "versions": _versions(outcomes),
        "native_library": dict(library),
        "machine": {
            "processor": platform.machine(),
            "usable_cores": len(os.sched_getaffinity(0)),
            "system": f"{platform.system()} {platform.release()}",
        },
        "comparisons": [_comparison(outcome) for outcome in outcomes],
    }


def write_record(record: dict[str, Any], path: Path) -> None:
    """Writes it whole or not at all. OSError if that cannot be done."""
    write_atomically(path, json.dumps(record, indent=1, allow_nan=False) + "\n")


def native_library() -> dict[str, str | None]:
    """File and sha256 of the library whose arithmetic was used; None where it is not built."""
    spec = importlib.util.find_spec(_NATIVE)
    if spec is None or spec.origin is None:
        return {"file": None, "sha256": None}
    with Path(spec.origin).open("rb") as file:
        return {"file": spec.origin, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def ids_hash(ids: Sequence[int]) -> str:
    """sha256 of ids as little-endian int64."""
    return hashlib.sha256(np.asarray(ids, "<i8").tobytes()).hexdigest()


def _versions(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """What the runs say, which is the same in all of one gate."""
    answers = [answer for each in outcomes for run in each.runs for answer in run.answers]
    return dict(answers[0].result["versions"]) if answers else {}


def _comparison(outcome: Outcome) -> dict[str, Any]:
    comparison = outcome.comparison
    return {
        "name": comparison.name,
        "verdict": outcome.verdict,
        "promise": {
            "contract": comparison.contract,
            "text": PROMISES[comparison.contract],
        },
        "checked": [*CHECKED, *(() if comparison.ids_only else (CHECKED_LOGITS,))],
        "may_differ": sorted(comparison.varied),
        "ranking": "all experts in rounds over the layers" if comparison.needs_ranking else None,
        "model": dataclasses.asdict(outcome.facts),
        "max_tokens": outcome.max_tokens,
        "prompts": [_prompt(prompt) for prompt in outcome.prompts],
        "sides": [_side(run) for run in outcome.runs],
        "not_run": [side.name for side in comparison.sides[len(outcome.runs) :]],
        "seconds": round(outcome.seconds, 3),
    }


def _prompt(prompt: Prompt) -> dict[str, Any]:
    return {
        "name": prompt.name,
        "tokens": len(prompt.ids),
        "ids": list(prompt.ids),
        "ids_sha256": ids_hash(prompt.ids),
        "flags": dict(prompt.flags),
    }


def _side(run: SideRun) -> dict[str, Any]:
    return {
        "name": run.side.name,
        "verdict": run.verdict,
        "failure": run.failure,
        "flags": dict(run.flags),
        "command": shlex.join(["strata-jax", "generate", *to_args(run.flags)]),
        "process": {"command": shlex.join(run.command), "pid": run.pid},
        "plan": run.answers[0].result.get("plan") if run.answers else None,
        "counters": run.counters,
        "shares": run.shares,
        "exercised": [_seen(seen) for seen in run.seen],
        "notes": _notes(run),
        "answers": [_answer(answer) for answer in run.answers],
        "differences": [dataclasses.asdict(each) for each in run.differences],
        "seconds": round(run.seconds, 3),
    }


def _notes(run: SideRun) -> list[str]:
    """What was said once: what is off, where things lie; without progress and figures."""
    lines = run.answers[0].lines if run.answers else ()
    return [line for line in lines if line.startswith("note: ")]


def _seen(seen: Seen) -> dict[str, Any]:
    return {"required": seen.text, "seen": seen.found, "holds": seen.holds}


def _answer(answer: Answer) -> dict[str, Any]:
    others = {key: value for key, value in answer.result.items() if key not in _LEFT_OUT}
    return {
        "prompt": answer.prompt.name,
        "ids": list(answer.ids),
        "ids_sha256": ids_hash(answer.ids),
        "finish_reason": answer.result["finish_reason"],
        "logits": dataclasses.asdict(answer.logits),
        "seconds": round(answer.seconds, 3),
        **others,
    }
