"""A fake engine for the command line's tests, in process and as a program of its own.

`python -m tests.cli.fake_engine SCRIPT COMMAND [flags]` is `strata-jax COMMAND [flags]` with it.
"""

import dataclasses
import hashlib
import io
import itertools
import sys
import time
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from strata_jax.cli.main import main
from strata_jax.cli.plan import plan_here
from strata_jax.config import TILE_ROWS
from strata_jax.engine.options import EngineOptions
from strata_jax.engine.request import Request, Timings
from strata_jax.errors import StrataError, UsageError
from strata_jax.text.tokenizer import Tokenizer
from strata_jax.weights.budget import StepSizes
from strata_jax.weights.pack import Pack
from strata_jax.weights.plan import DEFAULT_CONTEXT, make_plan


class FakeGeneration:
    """Yields given ids; ends as an engine would."""

    def __init__(
        self,
        engine: "FakeEngine",
        request: Request,
        ids: Iterable[int],
        report: Callable[[int], None] | None,
    ):
        self.finish_reason: str | None = None
        self.logits: np.ndarray | None = None
        self._engine = engine
        self._request = request
        self._ids = ids
        self._report = report
        self._count = 0
        self._cancelled = False

    @property
    def ngram(self) -> dict[str, object] | None:
        return {"mode": "mmap"}

    prefill_timing = None
    stuck_on: int | None = None

    @property
    def drafts(self) -> dict[str, object] | None:
        return None

    @property
    def windows(self) -> dict[int, int]:
        return {1: self._count}

    @property
    def tier_counters(self) -> dict[str, object]:
        return {"entries_host": 4, "shares": {"host": 1.0}, "hit_rate": 0.0}

    @property
    def timings(self) -> Timings:
        return Timings(
            load_s=0.5,
            compile_s=1.0,
            prompt_s=0.1,
            decode_s=0.2,
            prompt_tok_s=10 * len(self._request.ids),
            decode_tok_s=5.0 * (self._count - 1) if self._count > 1 else None,
        )

    def __iter__(self) -> Iterator[int]:
        for read in range(1, 1 + len(self._request.ids)) if self._engine.read_s else ():
            if self._request not in self._engine.requests[:-1]:  # else it goes on where it stopped
                time.sleep(self._engine.read_s)
            if self._report is not None:
                self._report(read)
        for token_id in self._ids:
            time.sleep(self._engine.delay_s)
            if self._cancelled or self._count >= self._request.max_tokens:
                break
            self._count += 1
            yield token_id
            if token_id in self._request.stop_ids:
                self.finish_reason = "stop"
                break
        self._end()

    def cancel(self) -> None:
        self._cancelled = True

    def _end(self) -> None:
        if self.finish_reason is None:
            self.finish_reason = "cancelled" if self._cancelled else "length"
        if self._engine.options.all_logits:
            positions = len(self._request.ids) + max(0, self._count - 1)
            self.logits = np.zeros((positions, self._engine.vocab_size), np.float32)


class FakeEngine:
    """Answers every request with the same ids."""

    def __init__(
        self,
        pack: Pack,
        options: EngineOptions,
        answer: Iterable[int],
        delay_s: float = 0.0,
        read_s: float = 0.0,
    ):
        self.options = options
        self.vocab_size = pack.config.vocab_size
        self.max_context = options.max_context or min(pack.config.context_length, DEFAULT_CONTEXT)
        self.notes = ("a note of the engine",)
        self.plan = plan_here(pack, make_plan(pack, None), options.tiers, StepSizes(), "cpu")
        self.tile_rows = TILE_ROWS["cpu"]
        self.delay_s = delay_s
        self.read_s = read_s
        """A prompt id's; 0: prompts are read at once, and nothing is reported."""
        self.requests: list[Request] = []
        self.kept = 1
        self.closed = False
        self.warnings: list[str] = []
        """What the next `take_warnings` tells."""
        self.unsaved = ""
        """What cannot be written at the end."""
        self._answer = answer
        self._metadata = dict(pack.file.metadata)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of some ids, special tokens shown."""
        return Tokenizer.from_metadata(self._metadata).decode(ids)

    def start(
        self, request: Request, report: Callable[[int], None] | None = None
    ) -> FakeGeneration:
        if len(request.ids) > self.max_context:
            raise UsageError(f"engine: {len(request.ids)} tokens, at most {self.max_context}")
        self.requests.append(request)
        return FakeGeneration(self, request, self._answer, report)

    def take_warnings(self) -> list[str]:
        warnings, self.warnings = self.warnings, []
        return warnings

    def close(self) -> None:
        self.closed = True
        if self.unsaved:
            raise StrataError(self.unsaved)


def encode(pack: Pack, text: str) -> list[int]:
    """Ids of a text, special tokens by their texts."""
    return Tokenizer.from_metadata(pack.file.metadata).encode(text, special=True)


class Opener:
    """Makes fake engines that answer with a text; keeps the last one."""

    def __init__(self, answer: str | list[int], delay_s: float = 0.0, read_s: float = 0.0):
        self.answer = answer
        self.delay_s = delay_s
        self.read_s = read_s
        self.engine: FakeEngine | None = None
        self.unsaved = ""

    def __call__(
        self, pack: Pack, options: EngineOptions, report: Callable[[str], None]
    ) -> FakeEngine:
        report("loading: 3 of 4 MiB, 2 MiB/s")
        ids = encode(pack, self.answer) if isinstance(self.answer, str) else self.answer
        self.engine = FakeEngine(pack, options, ids, self.delay_s, self.read_s)
        if self.unsaved:
            self.engine.warnings, self.engine.unsaved = ["a warning"], self.unsaved
        return self.engine

    @property
    def request(self) -> Request:
        """The last request."""
        assert self.engine is not None
        return self.engine.requests[-1]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a command did."""

    code: int
    out: str
    err: str


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def run(
    *args: str,
    opener: Opener | None = None,
    stdin: bytes | None = None,
    out: io.StringIO | None = None,
) -> Outcome:
    """Runs a command in this process."""
    out, err = out or io.StringIO(), io.StringIO()
    source = None if stdin is None else io.TextIOWrapper(io.BytesIO(stdin))
    code = main(list(args), source, out, err, opener or Opener("Hello."))
    return Outcome(code, out.getvalue(), err.getvalue())


def _busy_load(_pack: Pack, _options: EngineOptions, report: Callable[[str], None]) -> FakeEngine:
    """A native call of minutes that no signal interrupts, as a compilation is."""
    report("compiling")
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2_000_000_000)
    raise AssertionError("not reached")


def _slow_load(_pack: Pack, _options: EngineOptions, report: Callable[[str], None]) -> FakeEngine:
    for step in itertools.count():
        report(f"loading: {step} MiB")
        time.sleep(0.05)
    raise AssertionError("not reached")


class _Endless(Opener):
    def __call__(
        self, pack: Pack, options: EngineOptions, report: Callable[[str], None]
    ) -> FakeEngine:
        engine = super().__call__(pack, options, report)
        engine._answer = itertools.cycle(encode(pack, " and so on"))
        return engine


SCRIPTS = {
    "slow_prompt": Opener("Hello.<|im_end|>", read_s=0.3),
    "stuck_prompt": Opener("Never.", read_s=60.0),
    "slow_answer": Opener("Late.<|im_end|>", delay_s=1.5),
    "busy_load": _busy_load,
    "slow_load": _slow_load,
    "endless": _Endless("", delay_s=0.02),
    "hello": Opener("I think.</think>\n\nHello there.<|im_end|>"),
}


if __name__ == "__main__":
    sys.exit(main(sys.argv[2:], sys.stdin, sys.stdout, sys.stderr, SCRIPTS[sys.argv[1]]))
