"""A conversation: its history, one turn after another, and the terminal or pipe it is held at."""

import contextlib
import importlib
import re
from collections.abc import Iterator
from typing import Any, Self

from absl import flags

from strata_jax.cli import sampling
from strata_jax.cli.answers import (
    THINKING,
    Reader,
    begin,
    describe_late_copies,
    describe_stuck,
    max_repeats,
    stop_ids,
)
from strata_jax.cli.context import Context, Engine, Generation
from strata_jax.engine.request import Request, SamplingSettings
from strata_jax.errors import StrataError, UsageError
from strata_jax.text.answer import Event, thinking_is_open
from strata_jax.text.chat import ChatTemplate
from strata_jax.text.tokenizer import Tokenizer
from strata_jax.weights.pack import Pack

PROMPT = "> "
_COMMAND = re.compile(r"/[a-z]+")
_HELP = (
    "/reset begins anew, /exit or Ctrl-D leaves, Ctrl-C stops an answer; a line that begins with a "
    "space is never a command"
)


class Conversation:
    """The messages so far, and how they become requests. Changes only when a turn is complete."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        settings: SamplingSettings,
        stop_ids: frozenset[int],
        max_tokens: int | None,
        max_repeats: int,
        thinking: bool | None,
        effort: str | None,
    ) -> None:
        """Begins a conversation; `max_tokens` None leaves the whole context to an answer."""
        self.messages: list[dict[str, Any]] = []
        self._tokenizer = tokenizer
        self._template = template
        self._settings = settings
        self._stop_ids = stop_ids
        self._max_tokens = max_tokens
        self._max_repeats = max_repeats
        self._thinking = thinking
        self._effort = effort

    @classmethod
    def of(cls, values: flags.FlagValues, pack: Pack) -> Self:
        """The conversation that flags and model file describe.

        Raises:
            UsageError: if the file has no chat template, or a flag is no good.
            BadFileError: if tokenizer or template cannot be built.
        """
        metadata = pack.file.metadata
        tokenizer = Tokenizer.from_metadata(metadata)
        talk = cls(
            tokenizer,
            ChatTemplate.from_metadata(metadata, tokenizer),
            sampling.settings(values, metadata),
            stop_ids(pack, tokenizer),
            values.max_tokens,
            max_repeats(values, goes_on=False),
            THINKING[values.thinking],
            values.effort,
        )
        talk.encode("hello")  # a flag that the template does not take ends the command, not a turn
        return talk

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of the conversation with a further message.

        Raises:
            UsageError: if the template refuses it.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        ids = self._template.encode(messages, thinking=self._thinking, effort=self._effort)
        return tuple(ids)

    def request(self, text: str, max_context: int) -> Request:
        """The request for an answer to a further message.

        Raises:
            UsageError: if the context has no room for the message and an answer.
        """
        ids = self.encode(text)
        room = max_context - len(ids)
        if room < 1:
            raise UsageError(
                f"chat: with this message the conversation has {len(ids)} tokens, the context holds "
                f"{max_context}; it was not added: write a shorter one, /reset, or start with a "
                "larger --max_context"
            )
        return Request(
            ids=ids,
            settings=self._settings,
            max_tokens=min(room, self._max_tokens or room),
            stop_ids=self._stop_ids,
            max_repeats=self._max_repeats,
        )

    def reader(self, request: Request) -> Reader:
        """What makes text of the answer's ids."""
        return Reader(self._tokenizer, (), thinking_is_open(self._tokenizer, request.ids))

    def add(self, text: str, pieces: list[Event]) -> None:
        """Adds a message and its answer, whole or stopped."""
        joined = {
            kind: "".join(piece.text for piece in pieces if piece.kind == kind)
            for kind in ("text", "reasoning")
        }
        answer = {"role": "assistant", "content": joined["text"]}
        if joined["reasoning"]:
            answer["reasoning_content"] = joined["reasoning"]
        self.messages += [{"role": "user", "content": text}, answer]

    def reset(self) -> None:
        """Forgets everything."""
        self.messages.clear()


class _StoppedReading(Exception):  # noqa: N818, it is no error
    """A prompt was left at a chunk's border."""


class _Stop:
    """The wish to stop, from a signal handler; it is granted where nothing that was read is lost."""

    def __init__(self) -> None:
        self.wished = False
        self.has_begun = False
        """Whether there is an answer to keep."""

    def __call__(self) -> None:
        self.wished = True

    def at_border(self, read: int) -> None:
        """Leaves the prompt behind its first `read` ids, if that is wished for."""
        if self.wished:
            raise _StoppedReading(read)


class Terminal:
    """Holds a conversation with whoever is at stdin."""

    def __init__(self, context: Context, engine: Engine, talk: Conversation) -> None:
        """Takes a loaded model and an empty conversation."""
        self._output = context.output
        self._interrupts = context.interrupts
        self._stdin = context.stdin
        self._engine = engine
        self._talk = talk
        self._is_terminal = context.stdin is not None and context.stdin.isatty()
        self._unanswered: str | None = None
        """The last message, where its answer was stopped before it began."""

    def run(self) -> int:
        """Talks until the end; returns the exit code: through a pipe that of the first failure."""
        if not self._is_terminal:
            return self._run_pipe()
        self._output.note(f"context of {self._engine.max_context} tokens; {_HELP}")
        with self._interrupts.harmless():
            while True:
                try:
                    line = self._ask()
                    if line is None or not self._turn(line):
                        return 0
                except StrataError as error:
                    self._output.error(str(error))
                except KeyboardInterrupt:
                    if self._interrupts.fatal.is_set():
                        raise
                    self._output.aside("\n")
                    self._output.note("nothing was added; Ctrl-D or /exit leaves")

    def _run_pipe(self) -> int:
        code = 0
        for line in self._lines():
            try:
                if not self._turn(line):
                    break
            except StrataError as error:
                self._output.error(str(error))
                code = code or error.exit_code
        return code

    def _turn(self, line: str) -> bool:
        """Does what a line says; False if that is to leave."""
        command = line.rstrip()
        if _COMMAND.fullmatch(command):
            return self._command(command)
        if command:
            self._answer(line)
        elif self._unanswered is not None:
            self._answer(self._unanswered)
        return True

    def _command(self, command: str) -> bool:
        if command == "/reset":
            self._talk.reset()
            self._unanswered = None
            self._output.note("the conversation begins anew")
        elif command == "/help":
            self._output.note(_HELP)
        elif command != "/exit":
            raise UsageError(f"chat: unknown command {command}; {_HELP}")
        return command != "/exit"

    def _answer(self, text: str) -> None:
        request = self._talk.request(text, self._engine.max_context)
        reader = self._talk.reader(request)
        pieces: list[Event] = []
        stop = _Stop()
        self._unanswered = None
        with self._stopping(stop):
            begun = self._begin(request, stop)
            if begun is None:
                self._unanswered = text
                return
            generation, ids = begun
            for token_id in ids:
                self._show(reader.push(token_id), pieces)
                if stop.wished:
                    generation.cancel()
        self._show(reader.finish(), pieces)
        self._output.text("\n")
        self._talk.add(text, pieces)
        self._tell_end(generation, stop.wished, any(piece.kind == "text" for piece in pieces))

    def _begin(self, request: Request, stop: _Stop) -> tuple[Generation, Iterator[int]] | None:
        """Starts an answer; None if it was stopped before it began."""
        try:
            generation, ids = begin(self._engine, request, self._output, stop.at_border)
        except _StoppedReading as stopped:
            kept = "which are kept" if self._engine.kept else "which will be read again"
            where = f"after {stopped} of {len(request.ids)} prompt tokens, {kept}"
        else:
            if not stop.wished:
                stop.has_begun = True
                return generation, ids
            generation.cancel()
            where = "before the answer began"
        self._output.note(
            f"stopped {where}; the message was not added: an empty line sends it again"
        )
        return None

    def _stopping(self, stop: _Stop) -> contextlib.AbstractContextManager[None]:
        """At a terminal Ctrl-C stops the answer; in a script it ends the command."""
        if not self._is_terminal:
            return contextlib.nullcontext()

        def heard() -> None:
            if not stop.has_begun:
                self._output.note("stopping at the end of a chunk; Ctrl-C again leaves")

        return self._interrupts.cancelling(stop, heard)

    def _show(self, events: list[Event], pieces: list[Event]) -> None:
        """Writes what is new; reasoning only to a terminal, dimmed and on lines of its own."""
        for event in events:
            is_thought = event.kind == "reasoning"
            if self._output.out_is_terminal:
                if pieces and pieces[-1].kind != event.kind:
                    self._output.text("\n\n")
                self._output.text(event.text, dim=is_thought)
            elif not is_thought:
                self._output.text(event.text)
            pieces.append(event)

    def _tell_end(self, generation: Generation, stopped: bool, has_text: bool) -> None:
        if stopped:
            self._output.note("stopped; what was written stays in the conversation")
        elif (stuck := describe_stuck(generation)) is not None:
            self._output.note(stuck)
        elif generation.finish_reason == "length":
            self._output.note(
                "the answer was cut: --max_tokens or the context "
                f"({self._engine.max_context} tokens) is used up"
            )
        if not stopped and not has_text:
            self._output.note("the model only thought; there is no answer")
        late, timing = describe_late_copies(generation.tier_counters), generation.prefill_timing
        lines = [] if late is None else [late]
        lines += [] if timing is None else timing.lines()
        for line in (*lines, *self._engine.take_warnings()):
            self._output.note(line)

    def _ask(self) -> str | None:
        """A line typed at the terminal; None at the end of the input."""
        assert self._stdin is not None, "a terminal is open"
        if self._output.out_is_terminal:
            with contextlib.suppress(ImportError):  # line editing, where Python was built with it
                importlib.import_module("readline")
            try:
                return input(PROMPT)
            except EOFError:
                self._output.text("\n")
                return None
            except UnicodeDecodeError:
                raise UsageError("chat: the line is not UTF-8, text expected") from None
        self._output.aside(PROMPT)
        return next(self._lines(), None)

    def _lines(self) -> Iterator[str]:
        """Lines of a pipe, without their ends."""
        if self._stdin is None:
            return
        for number, line in enumerate(iter(self._stdin.buffer.readline, b""), 1):
            try:
                yield line.decode().removesuffix("\n").removesuffix("\r")
            except UnicodeDecodeError:
                raise UsageError(f"chat: line {number} is not UTF-8, text expected") from None
