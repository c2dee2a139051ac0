"""One answer: the prompt read, then window after window, each giving the ids of the next positions."""

import collections
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any

import numpy as np

from strata_jax.engine.device_sampling import DeviceSampling
from strata_jax.engine.drafting import Drafting
from strata_jax.engine.options import EngineOptions
from strata_jax.engine.prefill_timing import PrefillTiming
from strata_jax.engine.request import Request, Timings
from strata_jax.engine.runner import GRAIN, Runner
from strata_jax.engine.sampling import Sampler


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
        self._runner = runner
        self._request = request
        self._drafting = drafting
        self._kept: list[np.ndarray] | None = [] if options.all_logits else None
        self._report = report
        self._is_timed = options.prefill_timing
        self.prefill_timing: PrefillTiming | None = None
        """Where the time of the prompt went, once it is read; None unless asked for."""
        self._live_rows = options.spec or runner.options.window_rows
        self._windows: collections.Counter[int] = collections.Counter()
        self._before = runner.tiers.experts.counters()
        self._prompt_s: float | None = None
        self._resumed = 0  # ids of the prompt that a request before had read
        self._first: float | None = None
        self._last: float | None = None
        self._count = 0
        self._rows = np.zeros((0, 0), np.float32)  # the newest window's logits
        self._untold = 0, np.zeros(0, np.int32)  # prompt ids that wait for the one behind them
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
        return dict(sorted(self._windows.items()))

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
        logits = self._read_timed() if self._is_timed else self._read_prompt()
        runner.tiers.after_step()
        sampler = Sampler(request.settings, request.ids, runner.drawable)
        token = sampler.pick(logits, runner.position) if request.max_tokens else -1
        following = self._ids_after(token, sampler)
        end = runner.options.max_context - len(request.ids) + 1  # one id has no room to be read
        while self._count < request.max_tokens:
            self._count += 1
            self._last = time.perf_counter()
            if self._first is None:
                self._first = self._last
                self._prompt_s = self._last - start
            if token in request.stop_ids:
                self.finish_reason = "stop"
            elif self._count in (request.max_tokens, end):
                self.finish_reason = "length"
            yield token
            if self.finish_reason is not None:
                return
            token = next(following)
        self._prompt_s = time.perf_counter() - start
        self.finish_reason = "length"

    def _ids_after(self, token: int, sampler: Sampler) -> Iterator[int]:
        """The ids after the first one, each read when the next is asked for."""
        on_device = self._runner.options.backend.is_device and self._kept is None
        if self._drafting is not None:
            return self._drafted_ids(token, sampler, on_device)
        if on_device or (sampler.takes_best and self._kept is None):
            return self._found_ids(token, sampler)
        return self._picked_ids(token, sampler)

    def _room(self) -> int:
        """Ids that can still be found: as many as may be read, and as many as are wanted."""
        runner = self._runner
        wanted = self._request.max_tokens - self._count
        return min(wanted, runner.options.max_context - runner.position)

    def _draws(self, sampler: Sampler) -> DeviceSampling | None:
        """Draws on the device; None on the CPU, and where the largest logit is all that counts."""
        if sampler.takes_best:
            return None
        return self._runner.device_sampling(self._request.settings, sampler)

    def _picked_ids(self, token: int, sampler: Sampler) -> Iterator[int]:
        while True:
            logits = self._read_window(np.asarray([token]), want_logits=True)[-1]
            token = sampler.pick(logits, self._runner.position)
            self._runner.tiers.after_step()
            yield token

    def _found_ids(self, token: int, sampler: Sampler) -> Iterator[int]:
        """By windows of one row; a device finds one id after the other by itself."""
        position = self._runner.position
        for found in self._runner.best_ids(token, self._room(), self._draws(sampler)):
            position += 1
            self._windows[1] += 1
            self._runner.tiers.after_step()
            yield sampler.check_found(found, position)

    def _drafted_ids(self, token: int, sampler: Sampler, on_device: bool) -> Iterator[int]:
        """By windows of a certain id and drafts, which are kept where they are what is drawn."""
        runner, drafting = self._runner, self._drafting
        assert drafting is not None
        self._tell_drafters(token)
        draws = self._draws(sampler) if on_device else None
        told_s = 0.0
        while True:
            position, began = runner.position, time.perf_counter()
            drafts = drafting.next(self._room() - 1)
            if on_device and len(drafts) == 0:
                for undrafted in self._undrafted_ids(token, sampler, draws, began):
                    token = undrafted
                    yield token
                continue
            ids = np.asarray([token, *drafts], np.int32)
            found = self._verified(ids, sampler, draws, on_device)
            drafting.seen(len(drafts), len(found) - 1, told_s + time.perf_counter() - began)
            runner.tiers.after_step()
            for place, token in enumerate(found):
                # Who stops here leaves a state that has not read what it never got.
                runner.keep(place)
                self._keep_row(place)
                yield token
            began = time.perf_counter()
            drafting.read(np.asarray(found, np.int32), runner.residual, position)
            told_s = time.perf_counter() - began

    def _verified(
        self, ids: np.ndarray, sampler: Sampler, draws: DeviceSampling | None, on_device: bool
    ) -> list[int]:
        """The ids after a window's rows, to the first that is not the next draft, or ends the answer."""
        position = self._runner.position + 1
        if on_device:
            rows, pick = self._runner.draw_drafts(ids, draws), sampler.check_found
        else:
            rows = self._rows = self._runner.read_drafts(ids)
            pick = sampler.pick
        self._windows[len(ids)] += 1
        found: list[int] = []
        for place in range(len(ids)):
            token = pick(rows[place], position + place)
            found.append(token)
            follows = place + 1 < len(ids) and token == ids[place + 1]
            if not follows or token in self._request.stop_ids:
                break
        return found

    def _undrafted_ids(
        self, token: int, sampler: Sampler, draws: DeviceSampling | None, began: float
    ) -> Iterator[int]:
        """Ids found on a device, which is a step ahead of the host, until there are drafts.

        Waiting for each id before the next step is queued would cost as much as many a step. So drafts
        that turn up have to wait for the step that is in the queue by then. Time counts from `began`.
        """
        runner, drafting = self._runner, self._drafting
        assert drafting is not None
        position = runner.position
        queued, is_last = runner.queue_one(token, draws), False
        while queued is not None:
            wanted = self._request.max_tokens - self._count
            has_room = wanted > 1 and runner.position < runner.options.max_context
            ahead = runner.queue_one(None, draws) if has_room and not is_last else None
            token = sampler.check_found(runner.wait_one(queued), position + 1)
            drafting.read(np.asarray([token], np.int32), runner.residual, position)
            drafting.seen(0, 0, time.perf_counter() - began)
            self._windows[1] += 1
            runner.tiers.after_step()
            position += 1
            yield token
            began = time.perf_counter()
            is_last = ahead is not None and len(drafting.next(self._room() - 2)) > 0
            queued = ahead

    def _read_timed(self) -> np.ndarray:
        """Reads the prompt and takes down where the time went."""
        experts = self._runner.tiers.experts
        experts.take_marks()  # of a prompt that nobody waited for
        before, start = experts.counters(), time.perf_counter()
        logits = self._read_prompt()
        wall_s, marks = time.perf_counter() - start, experts.take_marks()
        now = experts.counters()
        done = {name: now[name] - before[name] for name in now}
        self.prefill_timing = PrefillTiming(
            wall_s=wall_s,
            slot_wait_s=done["waits_us"] / 1e6,
            experts_streamed=done.get("experts_streamed", 0),
            experts_unrouted=done.get("experts_unrouted", 0),
            bytes_streamed=done["bytes_streamed"],
            marks=marks,
        )
        return logits

    def _read_prompt(self) -> np.ndarray:
        """Reads the prompt by chunks of tiles, its end by windows; returns the last id's logits.

        What `report` raises stops it at a chunk's border; a prompt that begins as this one goes on there.
        """
        ids = np.asarray(self._request.ids, np.int32)
        in_tiles = len(ids) // GRAIN * GRAIN
        keep = self._kept is not None
        start = self._resumed = 0 if keep else self._runner.resume(ids[:in_tiles])
        if keep:
            self._runner.reset()
        if self._drafting is not None and start == 0:
            self._drafting.reset()
            self._drafting.read(ids[:1], self._runner.no_residual, -1)
        logits = np.zeros((1, 1), np.float32)
        rows = self._runner.chunk_rows
        for begin in range(start, in_tiles, rows):
            end = min(begin + rows, in_tiles)
            self._runner.read_ahead(ids[:end], ids[end : end + rows])
            logits = self._runner.read_tile(ids[begin:end], want_logits=keep or end == len(ids))
            self._keep(logits)
            self._note_read(begin, ids[begin + 1 : end + 1], is_last=end == len(ids))
            self._runner.left = ids[: end + 1] if end < len(ids) else None
            if self._report is not None:
                self._report(end)
        rows = self._live_rows
        for begin in range(in_tiles, len(ids), rows):
            end = min(begin + rows, len(ids))
            logits = self._read_window(ids[begin:end], want_logits=keep or end == len(ids))
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

    def _tell_drafters(self, token: int) -> None:
        """Tells drafters of the prompt's last part and the answer's first id."""
        assert self._drafting is not None
        position, following = self._untold
        ids = np.asarray([*following, token], np.int32)
        self._drafting.read(ids, self._runner.residual, position)

    def _read_window(self, ids: np.ndarray, *, want_logits: bool) -> np.ndarray:
        logits = self._keep(self._runner.read_window(ids, want_logits=want_logits))
        self._windows[len(ids)] += 1
        return logits

    def _keep_row(self, place: int) -> None:
        """Of the newest window's logits."""
        if self._kept is not None:
            self._keep(self._rows[place : place + 1])

    def _keep(self, logits: np.ndarray) -> np.ndarray:
        if self._kept is not None:
            self._kept.append(logits.copy())  # the device may reuse its buffer
        return logits
