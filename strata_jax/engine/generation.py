"""One answer: the prompt read, then window after window, each giving the ids of the next positions."""

import contextlib
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any

import jax
import numpy as np

from strata_jax.engine.answer_ids import AnswerIds, Record
from strata_jax.engine.drafting import Drafting
from strata_jax.engine.options import EngineOptions
from strata_jax.engine.prefill_timing import PrefillTiming, timed_prompt
from strata_jax.engine.request import Request, Timings
from strata_jax.engine.runner import GRAIN, Runner
from strata_jax.engine.sampling import Sampler
from strata_jax.engine.xla_errors import in_a_sentence


class Generation:
    """The ids of one answer, drawn as they are asked for."""

    def __init__(
        self,
        runner: Runner,
        request: Request,
        options: EngineOptions,
        drafting: Drafting | None,
        report: Callable[[int], None] | None,
    ):
        self.finish_reason: str | None = None
        """"stop" (an id of `stop_ids`), "length" or "cancelled"; None while it runs."""
        self.stuck_on: int | None = None
        """The id that `Request.max_repeats` ended the answer for; `finish_reason` is "length" then."""
        self._runner = runner
        self._request = request
        self._drafting = drafting
        self._record = Record(keeps_logits=options.all_logits)
        self._report = report
        self._is_timed = options.prefill_timing
        self.prefill_timing: PrefillTiming | None = None
        """Where the time of the prompt went, once it is read; None unless asked for."""
        self._live_rows = options.spec or runner.options.window_rows
        self._before = runner.tiers.experts.counters()
        self._prompt_s: float | None = None
        self._resumed = 0  # ids of the prompt that a request before had read
        self._first: float | None = None
        self._last: float | None = None
        self._count = 0
        self._untold = 0, np.zeros(0, np.int32)  # prompt ids that wait for the one behind them
        self._ids = self._run()

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        """The next id.

        Raises:
            CapacityError: if a step finds no memory.
            StrataError: if a step fails, or a tier's worker is lost; the next request begins anew.
        """
        try:
            return next(self._ids)
        except jax.errors.JaxRuntimeError as error:
            raise in_a_sentence(error, self._runner.tiers.plan) from error

    def cancel(self) -> None:
        """Ends the answer after the id drawn last."""
        if self.finish_reason is None:
            self.finish_reason = "cancelled"
        self._ids.close()

    @property
    def logits(self) -> np.ndarray:
        """Float32 [positions, V] of every position read, prompt first (with `all_logits`)."""
        assert self._record.logits is not None, "EngineOptions.all_logits was not set"
        none = np.zeros((0, self._runner.config.vocab_size), np.float32)
        return np.concatenate([none, *self._record.logits])

    @property
    def timings(self) -> Timings:
        """Figures so far."""
        decode_s = None
        if self._count > 1 and self._last is not None and self._first is not None:
            decode_s = self._last - self._first
        prompt = len(self._request.ids) - self._resumed
        return Timings(
            load_s=self._runner.load_s,
            compile_s=self._runner.compile_s,
            prompt_s=self._prompt_s,
            decode_s=decode_s,
            prompt_tok_s=prompt / self._prompt_s if self._prompt_s else None,
            decode_tok_s=(self._count - 1) / decode_s if decode_s else None,
        )

    @property
    def tier_counters(self) -> dict[str, Any]:
        """What each tier did for this request, with shares and hit rate (`engine/tiers.py`)."""
        return self._runner.tiers.counters(self._before)

    @property
    def windows(self) -> dict[int, int]:
        """How many windows had so many live rows, by that number."""
        return dict(sorted(self._record.windows.items()))

    @property
    def ngram(self) -> dict[str, object] | None:
        """How rows of the n-gram table are read, and its totals; None if the model has none."""
        return self._runner.table_report()

    @property
    def drafts(self) -> dict[str, Any] | None:
        """What became of drafts (`DraftCounts.to_json`); None without a drafter."""
        return None if self._drafting is None else self._drafting.counts.to_json()

    def _run(self) -> Generator[int, None, None]:
        request, runner = self._request, self._runner
        start = time.perf_counter()
        if self._is_timed:
            experts = runner.tiers.experts
            logits, self.prefill_timing = timed_prompt(experts, self._read_prompt)
        else:
            logits = self._read_prompt()
        runner.tiers.after_step()
        sampler = Sampler(request.settings, request.ids, runner.drawable)
        if request.max_tokens == 0:  # drafters are not told of an id that nobody draws
            self._prompt_s = time.perf_counter() - start
            self.finish_reason = "length"
            return
        token = sampler.pick(logits, runner.position)
        end = runner.options.max_context - len(request.ids) + 1  # one id has no room to be read
        last = len(request.ids) + min(request.max_tokens, end) - 1
        answer = AnswerIds(runner, request, self._drafting, self._record, sampler, last)
        with contextlib.closing(answer.after(token, self._untold)) as following:
            yield from self._counted(token, following, end, start)

    def _counted(
        self, token: int, following: Iterator[int], end: int, start: float
    ) -> Iterator[int]:
        """The answer: `token`, then those that follow, to its end; at most `end` ids."""
        request, repeats, before = self._request, 0, -1
        while True:
            self._count += 1
            repeats, before = (repeats + 1 if token == before else 1), token
            self._last = time.perf_counter()
            if self._first is None:
                self._first = self._last
                self._prompt_s = self._last - start
            if token in request.stop_ids:
                self.finish_reason = "stop"
            elif self._count in (request.max_tokens, end):
                self.finish_reason = "length"
            elif repeats == request.max_repeats:
                self.finish_reason, self.stuck_on = "length", token
            yield token
            if self.finish_reason is not None:
                return
            token = next(following)

    def _read_prompt(self) -> np.ndarray:
        """Reads the prompt by chunks of tiles, its end by windows; returns the last id's logits.

        What `report` raises stops it at a chunk's border; a prompt that begins as this one goes on there.
        """
        ids = np.asarray(self._request.ids, np.int32)
        in_tiles = len(ids) // GRAIN * GRAIN
        keep = self._record.logits is not None
        start = self._resumed = 0 if keep else self._runner.resume(ids)
        if keep:
            self._runner.reset()
        if self._drafting is not None and start == 0:
            self._drafting.reset()
            self._drafting.read(ids[:1], self._runner.residual, -1)
        logits = np.zeros((1, 1), np.float32)
        rows = self._runner.chunk_rows
        for begin in range(start, in_tiles, rows):
            end = min(begin + rows, in_tiles)
            self._runner.read_ahead(ids[:end], ids[end : end + rows])
            logits = self._runner.read_tile(ids[begin:end], want_logits=keep or end == len(ids))
            self._record.keep(logits)
            self._note_read(begin, ids[begin + 1 : end + 1], is_last=end == len(ids))
            # Behind a prompt's last id there is none that its end could go on with.
            self._runner.left = None if keep or end == len(ids) else ids[: end + 1]
            if self._report is not None:
                self._report(end)
        rows = self._live_rows
        for begin in range(in_tiles, len(ids), rows):
            end = min(begin + rows, len(ids))
            wants = keep or end == len(ids)
            logits = self._record.read_window(self._runner, ids[begin:end], want_logits=wants)
            self._note_read(begin, ids[begin + 1 : end + 1], is_last=end == len(ids))
        return logits[-1]

    def _note_read(self, position: int, following: np.ndarray, *, is_last: bool) -> None:
        """Tells drafters of a part of the prompt; the last one waits for the id behind it."""
        if self._drafting is None:
            return
        if is_last:
            self._untold = position, following
        else:
            self._drafting.read(following, self._runner.residual, position)
