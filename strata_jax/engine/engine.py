"""Ids in, ids out: the map of the program.

A request's prompt is read in tiles, its last n mod 64 ids in windows; then each window reads the
id drawn last and gives the logits of the next. The engine knows no text.
"""

import collections
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental.compilation_cache import compilation_cache

from strata_jax import _native
from strata_jax.engine.options import EngineOptions, choose_context, choose_index_budget, kv_notes
from strata_jax.engine.request import Request, Timings
from strata_jax.engine.runner import GRAIN, Runner, RunnerOptions
from strata_jax.engine.sampling import Sampler
from strata_jax.errors import UsageError
from strata_jax.ops.native import Backend
from strata_jax.weights.pack import Pack
from strata_jax.weights.tier_needs import TierPlan


def _ignore(_: str) -> None:
    pass


class Engine:
    """One model, one request at a time."""

    def __init__(self, pack: Pack, runner: Runner, options: EngineOptions, notes: tuple[str, ...]):
        self.pack = pack
        self.notes = notes
        """One line for each choice a user may want to know of."""
        self.tile_rows = runner.tile_rows
        """Rows of a prompt tile; bits depend on them (contract C), so results name them."""
        self._runner = runner
        self._options = options
        self._current: Generation | None = None

    @classmethod
    def open(
        cls, pack: Pack, options: EngineOptions, report: Callable[[str], None] = _ignore
    ) -> "Engine":
        """Loads and compiles; `report` gets a line for each phase.

        Raises:
            UsageError: for options out of range.
        """
        context, notes = choose_context(pack, options)
        config, budget_notes = choose_index_budget(pack.config, options.index_budget)
        rows = options.checked_rows()
        options.chunk_rows()  # refused before anything is loaded
        if options.threads is not None:
            _native.set_threads(options.threads)
        if options.cache_dir is not None:
            _use_compile_cache(options.cache_dir)
        runner_options = RunnerOptions(
            max_context=context,
            window_rows=rows,
            kv=options.kv,
            all_logits=options.all_logits,
            tiers=options.tiers,
            backend=Backend(options.platform),
        )
        runner = Runner(pack, config, runner_options, report)
        if options.routing_out is not None:
            runner.tiers.write_routing(options.routing_out)
        notes += (
            budget_notes
            + kv_notes(options.kv, options.platform)
            + runner.tiers.plan.notes
            + runner.notes
        )
        return cls(pack, runner, options, notes)

    @property
    def max_context(self) -> int:
        """Positions that prompt and answer may fill together."""
        return self._runner.options.max_context

    def start(self, request: Request, report: Callable[[int], None] | None = None) -> "Generation":
        """Begins a request; iterate the result for the ids. Ends any earlier one.

        Args:
            request: what to read and to answer.
            report: gets the number of prompt ids read, a chunk at a time.

        Raises:
            UsageError: if the prompt is empty, too long, or holds ids the model has not.
        """
        vocab = self.pack.config.vocab_size
        for place, token in enumerate(request.ids):
            if not 0 <= token < vocab:
                raise UsageError(
                    f"prompt: id {token} at place {place}, expected ids from 0 to {vocab - 1}"
                )
        if not request.ids:
            raise UsageError("prompt: no tokens, expected at least one")
        if len(request.ids) > self.max_context:
            raise UsageError(
                f"prompt: {len(request.ids)} tokens, at most {self.max_context} fit; shorten it or "
                f"raise --max_context"
            )
        if request.max_tokens < 0:
            raise UsageError(f"max_tokens: {request.max_tokens}, expected 0 or more")
        self._end_current()
        self._current = Generation(self._runner, request, self._options, report)
        return self._current

    @property
    def plan(self) -> TierPlan:
        """What was placed where, and what every memory has to hold."""
        return self._runner.tiers.plan

    def audit(self) -> list[str]:
        """Compares the bytes of every expert slot with the file; one line for each fault."""
        return self._runner.tiers.experts.audit()

    def close(self) -> None:
        """Ends a request that runs and frees the device; the pack stays the caller's to close."""
        self._end_current()
        self._runner.close()

    def _end_current(self) -> None:
        if self._current is not None:
            self._current.cancel()
            self._current = None


class Generation:
    """The ids of one answer, drawn as they are asked for."""

    def __init__(
        self,
        runner: Runner,
        request: Request,
        options: EngineOptions,
        report: Callable[[int], None] | None,
    ):
        self.finish_reason: str | None = None
        """"stop" (an id of `stop_ids`), "length" or "cancelled"; None while it runs."""
        self._runner = runner
        self._request = request
        self._kept: list[np.ndarray] | None = [] if options.all_logits else None
        self._report = report
        self._chunk_rows = options.chunk_rows()
        self._live_rows = options.spec or runner.options.window_rows
        self._windows: collections.Counter[int] = collections.Counter()
        self._before = runner.tiers.experts.counters()
        self._prompt_s: float | None = None
        self._first: float | None = None
        self._last: float | None = None
        self._count = 0
        self._read = len(request.ids)
        self._ids = self._run()

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        return next(self._ids)

    def cancel(self) -> None:
        """Ends the answer after the id drawn last."""
        if self.finish_reason is None:
            self.finish_reason = "cancelled"
        self._ids.close()

    @property
    def logits(self) -> np.ndarray:
        """Float32 [positions, V] of every position read, prompt first (with `all_logits`)."""
        assert self._kept is not None, "EngineOptions.all_logits was not set"
        return np.concatenate(
            [np.zeros((0, self._runner.config.vocab_size), np.float32), *self._kept]
        )

    @property
    def timings(self) -> Timings:
        """Figures so far."""
        decode_s = None
        if self._count > 1 and self._last is not None and self._first is not None:
            decode_s = self._last - self._first
        prompt = len(self._request.ids)
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
        return dict(sorted(self._windows.items()))

    @property
    def ngram(self) -> dict[str, object] | None:
        """How rows of the n-gram table are read, and its totals; None if the model has none."""
        return self._runner.table_report()

    def _run(self) -> Generator[int, None, None]:
        request, runner = self._request, self._runner
        start = time.perf_counter()
        logits = self._read_prompt()
        runner.tiers.after_step()
        sampler = Sampler(request.settings, request.ids, runner.config.vocab_size)
        token = sampler.pick(logits, runner.position) if request.max_tokens else -1
        found = self._found_on_device(sampler, token)
        while self._count < request.max_tokens:
            self._count += 1
            self._last = time.perf_counter()
            if self._first is None:
                self._first = self._last
                self._prompt_s = self._last - start
            if token in request.stop_ids:
                self.finish_reason = "stop"
            elif self._count == request.max_tokens or self._read == runner.options.max_context:
                self.finish_reason = "length"
            yield token
            if self.finish_reason is not None:
                return
            self._read += 1
            if found is not None:
                token = sampler.check_found(next(found), self._read)
                self._windows[1] += 1
            else:
                logits = self._read_window(np.asarray([token]), want_logits=True)[-1]
                token = sampler.pick(logits, runner.position)
            runner.tiers.after_step()
        self._prompt_s = time.perf_counter() - start
        self.finish_reason = "length"

    def _found_on_device(self, sampler: Sampler, token: int) -> Iterator[int] | None:
        """The ids after `token`, if nobody needs their logits; None if they must be fetched."""
        request, runner = self._request, self._runner
        if self._kept is not None:
            return None
        count = min(request.max_tokens - 1, runner.options.max_context - runner.position)
        if sampler.takes_best:
            return runner.best_ids(token, count)
        sampling = runner.device_sampling(request.settings, sampler)
        return None if sampling is None else runner.best_ids(token, count, sampling)

    def _read_prompt(self) -> np.ndarray:
        """Reads the prompt by tiles, its end by windows; returns the logits after its last id."""
        ids = np.asarray(self._request.ids, np.int32)
        in_tiles = len(ids) // GRAIN * GRAIN
        keep = self._kept is not None
        self._runner.reset()
        logits = np.zeros((1, 1), np.float32)
        rows = self._runner.tile_rows
        for begin in range(0, in_tiles, rows):
            end = min(begin + rows, in_tiles)
            self._runner.read_ahead(ids[:end], ids[end : end + rows])
            logits = self._runner.read_tile(ids[begin:end], want_logits=keep or end == len(ids))
            self._keep(logits)
            if self._report is not None and end % self._chunk_rows == 0:
                self._report(end)
        rows = self._live_rows
        for begin in range(in_tiles, len(ids), rows):
            end = min(begin + rows, len(ids))
            logits = self._read_window(ids[begin:end], want_logits=keep or end == len(ids))
        return logits[-1]

    def _read_window(self, ids: np.ndarray, *, want_logits: bool) -> np.ndarray:
        logits = self._keep(self._runner.read_window(ids, want_logits=want_logits))
        self._windows[len(ids)] += 1
        return logits

    def _keep(self, logits: np.ndarray) -> np.ndarray:
        if self._kept is not None:
            self._kept.append(logits.copy())  # the device may reuse its buffer
        return logits


def _use_compile_cache(directory: Path) -> None:
    compilation_cache.reset_cache()  # it settles at a process's first compilation, used or not
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
