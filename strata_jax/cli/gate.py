"""`strata-jax gate`: one model under several configurations, compared bit for bit."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from absl import flags

from strata_jax.cli import flags as cli_flags
from strata_jax.cli import tier_flags
from strata_jax.cli.context import Context
from strata_jax.cli.draft_flags import define_drafts
from strata_jax.cli.files import output_path, user_path
from strata_jax.cli.output import Output
from strata_jax.config import LOOPBACK
from strata_jax.errors import UsageError

if TYPE_CHECKING:
    from strata_jax.config import Platform
    from strata_jax.gate.comparison import Comparison
    from strata_jax.gate.judge import Job

_WRITTEN = ("routing_out", "expert_profile_save")
"""Shared flags that a gate has not: all sides would write the same file."""
_MOST_WAIT_S = 10_000_000
"""Four months; the system's own waits have no room for much more."""
SUMMARY = "runs a model under several configurations and compares every bit"


def define(values: flags.FlagValues) -> None:
    """Defines the command's flags."""
    flags.DEFINE_string(
        "preset", None, "what to compare, or all; without it they are listed", flag_values=values
    )
    flags.DEFINE_multi_string(
        "model",
        [],
        "GGUF file, may be given again; without it the small embedded model runs",
        flag_values=values,
    )
    cli_flags.define_number(
        values, "max_tokens", int, "longest answer to each prompt", default=64, lower=1
    )
    flags.DEFINE_boolean(
        "json", False, "prints the record, one JSON object, instead of a table", flag_values=values
    )
    flags.DEFINE_string(
        "record",
        None,
        "file for the record: versions, hashes, flags, counters, ids",
        flag_values=values,
    )
    cli_flags.define_number(
        values,
        "timeout_s",
        float,
        "longest wait for one answer",
        default=600,
        lower=1,
        upper=_MOST_WAIT_S,
    )
    _define_shared(values)


def _define_shared(values: flags.FlagValues) -> None:
    """Defines what is handed to every side of a comparison."""
    cli_flags.define_engine(values)
    define_drafts(values)
    tier_flags.define_tiers(values)
    for name in _WRITTEN:
        delattr(values, name)


def run(values: flags.FlagValues, context: Context) -> int:
    """Prints table or record; the exit code says what came out (design.md)."""
    from strata_jax.gate.runs import WORKER

    return compare(values, context, WORKER)


def compare(values: flags.FlagValues, context: Context, command: Sequence[str]) -> int:
    """Does it with processes of `command`.

    Raises:
        UsageError: for what cannot be compared; refused before anything runs if it is known then.
        BadFileError: if a model file is no good.
    """
    from strata_jax.cli import session
    from strata_jax.gate.judge import run_comparison
    from strata_jax.gate.outcome import EXIT_CODES, worst
    from strata_jax.gate.record import make_record, native_library, write_record
    from strata_jax.gate.table import make_table

    output = context.output
    began, library = time.time(), native_library()
    _check_preset(values.preset)
    record_path = output_path("record", values.record)
    platform = session.check_platform(values, output, has_peer=True)  # sides may, and tell
    planned = _planned(values, command, output, platform)
    with output.progress() as report:
        outcomes = [run_comparison(comparison, job, report) for comparison, job in planned]
    record = make_record(values.preset, outcomes, began, library)
    try:
        if record_path is not None:
            write_record(record, record_path)
    finally:  # what took hours comes out, whatever else can be written
        if values.json:
            output.json(record)
        else:
            output.text(make_table(outcomes))
    return EXIT_CODES[worst([outcome.verdict for outcome in outcomes])]


def _check_preset(name: str | None) -> None:
    from strata_jax.gate.presets import ALL, PRESETS

    known = (*PRESETS, ALL)
    if name in known:
        return
    if name is None:
        listed = "; ".join(f"{key}: {preset.summary}" for key, preset in PRESETS.items())
        raise UsageError(f"gate: --preset=NAME expected ({listed}; {ALL}: each of them)")
    suggestion = cli_flags.nearest(name, known)
    advice = f"did you mean {suggestion}?" if suggestion else f"one of {', '.join(known)} expected"
    raise UsageError(f"gate: unknown --preset={name}; {advice}")


def _planned(
    values: flags.FlagValues, command: Sequence[str], output: Output, platform: "Platform"
) -> list[tuple["Comparison", "Job"]]:
    """Everything that will be run; refuses before the first run what cannot be."""
    from strata_jax.gate.judge import check_common
    from strata_jax.gate.presets import comparisons

    planned, on_gpu = [], _is_on_gpu(values.platform)
    for job in _jobs(values, command, output):
        peer = LOOPBACK if values.peer_device == -1 else str(values.peer_device)
        chosen, notes = comparisons(values.preset, job.facts, peer, on_gpu=on_gpu)
        for line in notes:
            output.note(line)
        for comparison in chosen:
            check_common(comparison, job.common)
            _check_sides(comparison, job, platform)
            planned.append((comparison, job))
    _check_peer(values, [comparison for comparison, _ in planned])
    return planned


def _check_sides(comparison: "Comparison", job: "Job", platform: "Platform") -> None:
    """Refuses flags that `generate` would refuse of a side, which nobody should take for a failed gate."""
    from strata_jax.cli import generate, session
    from strata_jax.gate.runs import to_args

    for side in comparison.sides:
        values = flags.FlagValues()
        generate.define(values)
        try:
            cli_flags.parse("generate", values, to_args({**side.flags, **job.common}), {})
            options = session.engine_options(values, platform)
            options.step_sizes()
            options.most_drafts()
            if platform == "cpu":  # how many GPUs there are the sides find out
                options.tiers.check_devices(platform)
        except UsageError as error:
            raise UsageError(f"gate {comparison.name}, {side.name}: {error}") from None


def _check_peer(values: flags.FlagValues, comparisons: Sequence["Comparison"]) -> None:
    """Refuses a device for a peer that no side has: it would do nothing."""
    from strata_jax.gate.tier_flags import PEER_DEVICE

    sides = [side for comparison in comparisons for side in comparison.sides]
    if values.peer_device != -1 and not any(PEER_DEVICE in side.flags for side in sides):
        raise UsageError(
            f"gate: --peer_device={values.peer_device}, but --preset={values.preset} has no side with a "
            "peer; leave the flag out"
        )


def _is_on_gpu(platform: str) -> bool:
    """Whether the sides will run on one."""
    from strata_jax.cli.devices import cuda_problem

    return platform == "cuda" or (platform == "auto" and cuda_problem() is None)


def _jobs(values: flags.FlagValues, command: Sequence[str], output: Output) -> list["Job"]:
    from strata_jax.cli.files import embedded_model
    from strata_jax.gate.facts import ModelFacts
    from strata_jax.gate.judge import Job
    from strata_jax.gate.prompts import make_prompts
    from strata_jax.weights.pack import open_pack

    jobs = []
    for path in [user_path("model", each) for each in values.model] or [embedded_model()]:
        with open_pack(path) as pack:
            for line in pack.warnings:
                output.note(line)
            facts = ModelFacts.of(pack)
        budget = values.indexer_budget or facts.index_budget
        job = Job(
            facts=facts,
            prompts=make_prompts(facts, budget, values.max_tokens, values.max_context),
            max_tokens=values.max_tokens,
            common=_shared(values),
            timeout_s=values.timeout_s,
            command=command,
        )
        jobs.append(job)
    return jobs


def _shared(values: flags.FlagValues) -> dict[str, str]:
    """The flags given for every side, as they are written on a command line."""
    from strata_jax.gate.tier_flags import PEER_DEVICE

    shared = flags.FlagValues()
    _define_shared(shared)
    delattr(shared, PEER_DEVICE)  # the preset's, see there
    return {name: value for name, value in cli_flags.given(values) if name in shared}
