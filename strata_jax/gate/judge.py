"""Runs the sides of a comparison one after another and judges them against the first."""

import dataclasses
import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from strata_jax.errors import UsageError
from strata_jax.gate.compare import (
    Difference,
    compare_ids,
    compare_logits,
    load_logits,
    summarise,
)
from strata_jax.gate.comparison import Comparison, Side, differing_flags
from strata_jax.gate.draft_sides import ANSWERS
from strata_jax.gate.facts import ModelFacts
from strata_jax.gate.outcome import Answer, Outcome, SideRun
from strata_jax.gate.prompts import Prompt
from strata_jax.gate.runs import WORKER, RunError, Worker, to_args
from strata_jax.weights.profile import Profile
from strata_jax.weights.routing import RoutedModel

_ANSWERS_FILE = "answers.json"
_RESULT_KEYS = ("ids", "finish_reason", "prompt_tokens", "model", "versions")

Report = Callable[[str], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """What all comparisons on one model share."""

    facts: ModelFacts
    prompts: tuple[Prompt, ...]
    max_tokens: int
    common: Mapping[str, str]
    """Flags given for all sides; they overrule what a preset sets alike on all of them."""
    timeout_s: float
    """Longest wait for one answer."""
    command: Sequence[str] = WORKER


def check_common(comparison: Comparison, common: Mapping[str, str]) -> None:
    """Refuses flags that are not the user's to set, because the sides differ in them.

    Raises:
        UsageError: with the flag and the preset's values.
    """
    for name in sorted(comparison.varied & common.keys()):
        values = [side.flags.get(name, "its default") for side in comparison.sides]
        raise UsageError(
            f"gate: received --{name}={common[name]}, but {comparison.name} compares "
            f"{', '.join(dict.fromkeys(values))}; leave the flag out"
        )


def run_comparison(comparison: Comparison, job: Job, report: Report) -> Outcome:
    """Runs a comparison.

    Raises:
        UsageError: if the sides turn out not to be comparable (other model, versions, lengths).
    """
    check_common(comparison, job.common)
    began = time.monotonic()
    runs: list[SideRun] = []
    with tempfile.TemporaryDirectory(prefix="strata-gate-") as name:
        folder = Path(name)
        flags = [_flags(comparison, side, job, folder) for side in comparison.sides]
        stray = differing_flags(flags) - comparison.varied
        if stray:
            raise UsageError(
                f"gate: sides of {comparison.name} differ in --{', --'.join(sorted(stray))}, which "
                "must agree"
            )
        for side, side_flags in zip(comparison.sides, flags):
            where = f"gate {comparison.name}, {side.name}"
            reference = runs[0] if runs else None
            runner = _SideRunner(job, folder, reference, ids_only=comparison.ids_only)
            runs.append(runner.run(side, side_flags, where, report))
            if len(runs) == 1:
                _write_answers(runs[0], folder)
            if runs[0].failure is not None:  # nothing to compare with
                break
    return Outcome(
        comparison=comparison,
        facts=job.facts,
        max_tokens=job.max_tokens,
        prompts=job.prompts,
        runs=tuple(runs),
        seconds=time.monotonic() - began,
    )


def _flags(comparison: Comparison, side: Side, job: Job, folder: Path) -> dict[str, str]:
    answers = str(folder / _ANSWERS_FILE)
    own = {name: value.replace(ANSWERS, answers) for name, value in side.flags.items()}
    flags = {"model": job.facts.path, "max_tokens": str(job.max_tokens), **own}
    if comparison.needs_ranking:
        flags["expert_profile"] = str(_write_ranking(job.facts, folder))
    return flags | dict(job.common)


def _write_answers(run: SideRun, folder: Path) -> None:
    """Prompts with their answers, for sides that draft from them."""
    texts = [[*answer.prompt.ids, *answer.ids] for answer in run.answers]
    (folder / _ANSWERS_FILE).write_text(json.dumps(texts))


def _write_ranking(facts: ModelFacts, folder: Path) -> Path:
    """A profile that ranks all experts in rounds over the layers: expert 0 of each, then 1."""
    path = folder / "ranking.json"
    pairs = [(layer, expert) for expert in range(facts.experts) for layer in range(facts.layers)]
    model = RoutedModel(facts.hash, facts.layers, facts.experts)
    Profile(model=model, ranked=tuple(pairs)).save(path)
    return path


class _SideRunner:
    """Runs one side, comparing every answer with the reference's as it comes."""

    def __init__(
        self, job: Job, folder: Path, reference: SideRun | None, *, ids_only: bool
    ) -> None:
        self._ids_only = ids_only
        self._job = job
        self._folder = folder
        self._reference = reference
        self._answers: list[Answer] = []
        self._differences: list[Difference] = []

    def run(self, side: Side, flags: dict[str, str], where: str, report: Report) -> SideRun:
        """Has every prompt answered by one process; a failure ends it."""
        began = time.monotonic()
        failure = None
        report(f"{where}: starting")
        with Worker(self._job.command, self._folder / "stderr", self._job.timeout_s) as worker:
            step = "start"
            try:
                for index, prompt in enumerate(self._job.prompts):
                    report(f"{where}: prompt {index + 1} of {len(self._job.prompts)}")
                    step = f"prompt {prompt.name}"
                    self._take(index, worker, flags, prompt, where)
                step = "end"
                worker.finish()
            except RunError as error:
                failure = f"{step}: {error}"
        return SideRun(
            side=side,
            flags=flags,
            command=worker.command,
            pid=worker.pid,
            answers=tuple(self._answers),
            failure=failure,
            differences=tuple(self._differences),
            seconds=time.monotonic() - began,
        )

    def _take(
        self, index: int, worker: Worker, flags: dict[str, str], prompt: Prompt, where: str
    ) -> None:
        reference_path = self._folder / f"reference-{index}.npy"
        path = reference_path if self._reference is None else self._folder / "other.npy"
        answer = _ask(worker, flags, prompt, None if self._ids_only else path)
        _check_model(answer, self._job.facts, where)
        if self._reference is not None:
            reference = self._reference.answers[index]
            _check_comparable(reference, answer, where)
            self._differences += _compare(reference, answer, reference_path, path)
            path.unlink(missing_ok=True)
        self._answers.append(answer)


def _ask(worker: Worker, flags: dict[str, str], prompt: Prompt, logits_path: Path | None) -> Answer:
    """Asks for ids, and for logits if there is a path for them."""
    request = {
        **flags,
        **prompt.flags,
        "prompt_ids": ",".join(map(str, prompt.ids)),
        "json": "true",
    }
    if logits_path is not None:
        request["logits_out"] = str(logits_path)
    reply = worker.ask(to_args(request))
    _check_result(reply.result)
    try:
        none = np.zeros((0, 0), np.float32)
        logits = summarise(none if logits_path is None else load_logits(logits_path))
    except (OSError, ValueError) as error:
        raise RunError(f"its logits cannot be read: {error}") from None
    return Answer(
        prompt=prompt,
        result=reply.result,
        lines=reply.lines,
        seconds=reply.seconds,
        logits=logits,
    )


def _check_result(result: Mapping[str, Any]) -> None:
    missing = [key for key in _RESULT_KEYS if key not in result]
    if missing:
        raise RunError(f"its result has no {', '.join(missing)}")


def _check_model(answer: Answer, facts: ModelFacts, where: str) -> None:
    """The file may have been replaced since the gate began."""
    ran = answer.result["model"]["hash"]
    if ran != facts.hash:
        raise UsageError(
            f"{where}: ran a model of hash {ran[:12]}, {facts.hash[:12]} expected; {facts.path} was "
            "replaced, start anew"
        )
    found, expected = answer.result["prompt_tokens"], len(answer.prompt.ids)
    if found != expected:
        raise UsageError(
            f"{where}: prompt {answer.prompt.name} has {found} tokens there, {expected} expected"
        )


def _check_comparable(reference: Answer, answer: Answer, where: str) -> None:
    if reference.result["versions"] != answer.result["versions"]:
        raise UsageError(
            f"{where}: ran {answer.result['versions']}, the reference {reference.result['versions']}; "
            "equal versions expected"
        )
    if reference.logits.vocabulary != answer.logits.vocabulary:
        raise UsageError(
            f"{where}: {answer.logits.vocabulary} logits a position, the reference has "
            f"{reference.logits.vocabulary}"
        )


def _compare(
    reference: Answer, answer: Answer, reference_path: Path, path: Path
) -> list[Difference]:
    """At most one difference: everything in which the two answers differ."""
    ends = reference.result["finish_reason"], answer.result["finish_reason"]
    counts = reference.logits.positions, answer.logits.positions
    equal = reference.logits.sha256 == answer.logits.sha256
    difference = Difference(
        prompt=answer.prompt.name,
        ids=compare_ids(reference.ids, answer.ids),
        finish_reasons=ends if ends[0] != ends[1] else None,
        logits=None if equal else compare_logits(load_logits(reference_path), load_logits(path)),
        positions=counts if counts[0] != counts[1] else None,
    )
    found = difference.ids, difference.finish_reasons, difference.logits, difference.positions
    return [difference] if any(each is not None for each in found) else []
