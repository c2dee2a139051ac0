"""One answer: from a prompt to a request, and from the ids that come back to text."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from absl import flags

from strata_jax.cli import prompts, sampling
from strata_jax.cli.context import Engine, Generation
from strata_jax.cli.flags import MAX_REPEATS
from strata_jax.cli.output import Output
from strata_jax.engine.request import Request
from strata_jax.errors import BadFileError, UsageError
from strata_jax.text.answer import AnswerStream, Event, thinking_is_open
from strata_jax.text.chat import ChatTemplate
from strata_jax.text.tokenizer import Tokenizer
from strata_jax.weights.budget import shown
from strata_jax.weights.pack import Pack
from strata_jax.weights.prefill_ring import PATIENCE_MS

THINKING = {"auto": None, "on": True, "off": False}
"""Values of --thinking to the chat template's argument."""


@dataclasses.dataclass(kw_only=True)
class Task:
    """A request and what has been written for it so far."""

    request: Request
    stream: "Reader | None"
    """None where ids cannot be made text."""
    is_chat: bool
    ids: list[int] = dataclasses.field(default_factory=list)
    pieces: list[Event] = dataclasses.field(default_factory=list)

    @property
    def text(self) -> str | None:
        """The answer without its reasoning; None where ids cannot be made text."""
        return None if self.stream is None else self._join("text")

    @property
    def reasoning(self) -> str:
        """What the model thought first."""
        return self._join("reasoning")

    def finish_reason(self, generation: Generation) -> str | None:
        """Why the answer ended; a stop string is no different from an end-of-answer id."""
        stopped = self.stream is not None and self.stream.stopped
        return "stop" if stopped else generation.finish_reason

    def _join(self, kind: str) -> str:
        return "".join(piece.text for piece in self.pieces if piece.kind == kind)


def prepare(
    values: flags.FlagValues, prompt: str | tuple[int, ...], pack: Pack, output: Output
) -> Task:
    """The request that `generate` makes.

    Raises:
        UsageError: if text is needed for what was asked and there is none, or a flag is no good.
        BadFileError: if the file's tokenizer is needed and cannot be built.
    """
    metadata = pack.file.metadata
    is_chat = values.chat
    tokenizer = None
    thinking_open = False
    if isinstance(prompt, tuple):
        ids = prompt
        tokenizer = _tokenizer_if_possible(pack, values.stop, output)
    elif is_chat:
        tokenizer = Tokenizer.from_metadata(metadata)
        template = ChatTemplate.from_metadata(metadata, tokenizer)
        messages = [{"role": "user", "content": prompt}]
        thinking, effort = THINKING[values.thinking], values.effort
        ids = tuple(template.encode(messages, thinking=thinking, effort=effort))
        thinking_open = thinking_is_open(tokenizer, ids)
    else:
        tokenizer = prompts.PlainTokenizer.from_metadata(metadata)
        ids = prompts.encode_plain(tokenizer, prompt)
    stream = Reader(tokenizer, values.stop, thinking_open) if tokenizer else None
    request = Request(
        ids=ids,
        settings=sampling.settings(values, metadata),
        max_tokens=values.max_tokens,
        stop_ids=frozenset() if values.ignore_eos else stop_ids(pack, tokenizer),
        max_repeats=max_repeats(values, goes_on=values.ignore_eos),
    )
    return Task(request=request, stream=stream, is_chat=is_chat)


def stop_ids(pack: Pack, tokenizer: Tokenizer | None) -> frozenset[int]:
    """Ids that end an answer: the tokenizer's, and the one in the model's settings."""
    known = tokenizer.eos_ids if tokenizer else frozenset()
    return known | ({pack.config.eos_id} if pack.config.eos_id >= 0 else frozenset())


def max_repeats(values: flags.FlagValues, *, goes_on: bool) -> int:
    """What --max_repeats says; not given, nothing ends an answer that shall go on whatever is in it."""
    if values.max_repeats is not None:
        return values.max_repeats
    return 0 if goes_on else MAX_REPEATS


def describe_stuck(generation: Generation) -> str | None:
    """That an answer was ended because it went on with one id, in one line; None where it was not."""
    if generation.stuck_on is None:
        return None
    return (
        f"the answer was ended: it had come to repeat id {generation.stuck_on}; --max_repeats=N lets it "
        "go on, 0 for good, and --repetition_penalty or another --seed may help"
    )


class Reader(AnswerStream):
    """Makes text of ids; those that have no token are no text (models may have spare rows)."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], thinking_open: bool) -> None:
        """Begins an answer; see the base class."""
        super().__init__(tokenizer, stop, thinking_open)
        self._num_tokens = tokenizer.vocab_size

    def push(self, token_id: int) -> list[Event]:
        """Takes the next id; returns what has become certain."""
        return super().push(token_id) if token_id < self._num_tokens else []


def begin(
    engine: Engine,
    request: Request,
    output: Output,
    at_border: Callable[[int], None] = lambda _: None,
) -> tuple[Generation, Iterator[int]]:
    """Starts an answer and waits for its first id, which takes as long as the prompt is.

    `at_border` is called with the number of ids read where a prompt can go on later, at the end of each
    chunk; what it raises ends the reading there and comes up here.

    Raises:
        UsageError: if the engine refuses the request.
    """
    with output.progress(at_once=False) as report:
        phase = f"reading {len(request.ids)} prompt tokens"
        report(phase)

        def chunk_read(read: int) -> None:
            report(f"{phase}: {read}")
            at_border(read)

        generation = engine.start(request, chunk_read)
        ids = iter(generation)
        first = next(ids, None)
    return generation, (ids if first is None else itertools.chain([first], ids))


def write(engine: Engine, task: Task, output: Output, show: bool) -> Generation:
    """Has the answer written; what is certain is shown at once: text on stdout, reasoning beside.

    Raises:
        UsageError: if the engine refuses the request.
    """
    generation, ids = begin(engine, task.request, output)
    for token_id in ids:
        _take(token_id, task, generation, output, show)
    if task.stream is not None:
        _emit(task.stream.finish(), task, output, show)
    if show:
        if task.pieces and task.pieces[-1].kind == "reasoning":
            output.aside("\n")
        if task.text is not None and not task.text.endswith("\n"):
            output.text("\n")
    return generation


def describe(task: Task, generation: Generation) -> str:
    """The answer's length, end and speed in one line."""
    timings = generation.timings
    parts = [
        f"prompt {len(task.request.ids)} tokens{_speed(timings.prompt_tok_s)}",
        f"answer {len(task.ids)} tokens{_speed(timings.decode_tok_s)}, "
        f"ended by {task.finish_reason(generation)}",
    ]
    if timings.load_s is not None and timings.compile_s is not None:
        parts.append(f"loaded in {timings.load_s:.1f} s, compiled in {timings.compile_s:.1f} s")
    return "; ".join(parts)


def describe_drafts(counts: Mapping[str, Any] | None) -> str | None:
    """What drafts were good for, in one line; None where there was no drafter, or no window."""
    if counts is None or counts["tokens_per_pass"] is None:
        return None
    line = f"drafts: {counts['tokens_per_pass']:.2f} tokens a window"
    if counts["acceptance"] is not None:
        line += f", {100 * counts['acceptance']:.0f} % of {counts['drafted']} drafts came true"
    if counts["given_up"]:
        line += f"; they did not pay and were paused {counts['given_up']} times"
    return line


def describe_tiers(counters: Mapping[str, Any]) -> str | None:
    """Which tiers computed the routed experts and what moved, in one line.

    None where no device was there: all of it was the host's.
    """
    parts = counters["shares"]
    if parts is None or parts["host"] == 1:
        return None
    line = ", ".join(f"{100 * share:.1f} % {tier}" for tier, share in parts.items() if share)
    swaps = counters["swaps_primary"] + counters["swaps_peer"]
    moved = [f"{swaps} swaps ({shown(counters['bytes_swapped'])})"]
    for name, what in (("bytes_streamed", "streamed"), ("bytes_read", "read from the file")):
        moved += [f"{shown(counters[name])} {what}"] if counters[name] else []
    return f"experts: {line}; {', '.join(moved)}"


def describe_late_copies(counters: Mapping[str, Any]) -> str | None:
    """That a GPU did not get experts as planned, in one line; None where all came in time."""
    late = counters.get("experts_not_awaited")
    if not late:
        return None
    return (
        f"prompt: {late} experts did not arrive in their ring, for no copy ended for "
        f"{PATIENCE_MS / 1000:g} s (the host's threads were kept from their work, or the driver was "
        "busy): they were read over the link, which is slower; the answer is the same"
    )


def _tokenizer_if_possible(pack: Pack, stop: list[str], output: Output) -> Tokenizer | None:
    """For ids there is a way without text, unless stop strings have to be found in it."""
    try:
        return prompts.PlainTokenizer.from_metadata(pack.file.metadata)
    except BadFileError as error:
        if stop:
            raise UsageError(f"generate: --stop needs text, but {error}") from None
        output.note(f"ids only, no text: {error}")
        return None


def _take(token_id: int, task: Task, generation: Generation, output: Output, show: bool) -> None:
    if task.stream is None:
        task.ids.append(token_id)
    elif not task.stream.stopped:  # ids of the same window behind a stop string are not answer
        task.ids.append(token_id)
        _emit(task.stream.push(token_id), task, output, show)
        if task.stream.stopped:
            generation.cancel()


def _emit(events: list[Event], task: Task, output: Output, show: bool) -> None:
    for event in events:
        follows_thought = bool(task.pieces) and task.pieces[-1].kind == "reasoning"
        task.pieces.append(event)
        if show and event.kind == "reasoning":
            output.aside(event.text)
        elif show:
            if follows_thought:
                output.aside("\n")
            output.text(event.text)


def _speed(tokens_per_s: float | None) -> str:
    return "" if tokens_per_s is None else f" ({tokens_per_s:.1f} tok/s)"
