"""`strata-jax generate`: a prompt to text."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from absl import flags

from strata_jax.cli import flags as cli_flags
from strata_jax.cli.context import Context, Engine, Generation
from strata_jax.cli.draft_flags import define_draft_layer, define_drafts
from strata_jax.cli.files import output_path
from strata_jax.cli.tier_flags import define_tiers
from strata_jax.errors import StrataError, UsageError

if TYPE_CHECKING:
    from strata_jax.cli.answers import Task
    from strata_jax.weights.pack import Pack

SUMMARY = "continues a prompt, or answers it with --chat"
DEFAULT_MAX_TOKENS = 512


def define(values: flags.FlagValues) -> None:
    """Defines the command's flags."""
    cli_flags.define_model(values)
    _define_prompt(values)
    cli_flags.define_answer(values)
    cli_flags.define_number(
        values,
        "max_tokens",
        int,
        "longest answer; 0 reads the prompt only",
        default=DEFAULT_MAX_TOKENS,
        lower=0,
    )
    flags.DEFINE_multi_string(
        "stop", [], "text that ends the answer before it; may be given again", flag_values=values
    )
    flags.DEFINE_boolean(
        "ignore_eos", False, "goes on after the model has ended its answer", flag_values=values
    )
    cli_flags.define_sampling(values)
    flags.DEFINE_boolean(
        "json", False, "prints one JSON object with ids, text and timings", flag_values=values
    )
    flags.DEFINE_string(
        "logits_out",
        None,
        "writes the logits of all positions, prompt included, as float32 .npy",
        flag_values=values,
    )
    cli_flags.define_engine(values)
    define_drafts(values)
    define_draft_layer(values)
    define_tiers(values)


def _define_prompt(values: flags.FlagValues) -> None:
    flags.DEFINE_string(
        "prompt", None, "the prompt; without any, stdin is read as it is", flag_values=values
    )
    flags.DEFINE_string(
        "prompt_file", None, "file with the prompt, read as it is", flag_values=values
    )
    flags.DEFINE_string(
        "prompt_ids",
        None,
        "the prompt's ids instead of text: 5,6,7 or a file of a JSON list; no tokenizer is needed",
        flag_values=values,
    )
    flags.DEFINE_boolean(
        "chat",
        False,
        "the prompt is a message, to be answered by the file's chat template; reasoning goes to "
        "stderr. Otherwise the prompt is continued, and texts of special tokens in it are tokens",
        flag_values=values,
    )


def run(values: flags.FlagValues, context: Context) -> int:
    """Writes the answer, or the JSON object, to stdout."""
    from strata_jax.cli import answers, prompts, session

    output = context.output
    _check(values)
    logits_out = output_path("logits_out", values.logits_out)
    prompt = prompts.read_prompt(values, context.stdin)
    platform = session.check_platform(values, output)
    with session.opened_pack(values, output) as pack:
        task = answers.prepare(values, prompt, pack, output)
        prompts.check_ids(task.request.ids, pack.config, values.max_context)
        keep_logits = logits_out is not None
        with session.running_engine(pack, values, context, platform, keep_logits) as engine:
            generation = answers.write(engine, task, output, show=not values.json)
            for line in _lines(task, generation):
                output.note(line)
            try:
                if logits_out is not None:
                    _write_logits(logits_out, generation)
            finally:  # whatever else can be written: the answer is there
                if values.json:
                    conditions = _conditions(values, pack) | _running(engine)
                    output.json(_result(task, generation) | conditions)
    return 0


def _check(values: flags.FlagValues) -> None:
    """Refuses flags that contradict each other or would do nothing."""
    if values.prompt_ids is not None and values.chat:
        raise UsageError("generate: received --prompt_ids and --chat, which needs a text to wrap")
    if not values.chat:
        for name in ("thinking", "effort"):
            if not values[name].using_default_value:
                raise UsageError(f"generate: --{name} is the chat template's, --chat expected too")


def _lines(task: "Task", generation: Generation) -> list[str]:
    """What to tell about an answer."""
    from strata_jax.cli import answers

    timing = generation.prefill_timing
    lines = (
        answers.describe(task, generation),
        answers.describe_stuck(generation),
        answers.describe_tiers(generation.tier_counters),
        answers.describe_late_copies(generation.tier_counters),
        answers.describe_drafts(generation.drafts),
        *(() if timing is None else timing.lines()),
    )
    return [line for line in lines if line is not None]


def _write_logits(path: Path, generation: Generation) -> None:
    import numpy as np

    assert generation.logits is not None, "the engine was opened with all_logits"
    try:
        with path.open("wb") as file:  # by name, numpy would append .npy
            np.save(file, generation.logits, allow_pickle=False)
    except OSError as error:
        raise StrataError(
            f"--logits_out={path}: cannot be written: {error.strerror or error}; a file with room for "
            f"{generation.logits.nbytes} bytes expected"
        ) from None


def _result(task: "Task", generation: Generation) -> dict[str, object]:
    """What the model answered and what that took."""
    result: dict[str, object] = {
        "ids": task.ids,
        "text": task.text,
        "finish_reason": task.finish_reason(generation),
        "prompt_tokens": len(task.request.ids),
        "timings": dataclasses.asdict(generation.timings),
        "tiers": generation.tier_counters,
        "windows": generation.windows,
        "drafts": generation.drafts,
        "ngram": generation.ngram,
    }
    timing = generation.prefill_timing
    result |= {} if timing is None else {"prefill_timing": timing.to_json()}
    return result | ({"reasoning": task.reasoning} if task.is_chat else {})


def _running(engine: Engine) -> dict[str, object]:
    """What the engine is like while it is there."""
    from strata_jax.cli import process

    return {
        "tile_rows": engine.tile_rows,
        "plan": engine.plan.to_json(),
        "memory": process.process_memory(),
    }


def _conditions(values: flags.FlagValues, pack: "Pack") -> dict[str, object]:
    """Under which that was: what a second run is compared by (contract R)."""
    from strata_jax.cli import native, session

    return {
        "model": {"file": pack.file.paths[0], "hash": pack.file_hash()},
        "versions": session.versions(),
        "kernels": native.load_native().kernels(),
        "kv": values.kv,
        "flags": [f"--{name}={value}" for name, value in cli_flags.given(values)],
    }
