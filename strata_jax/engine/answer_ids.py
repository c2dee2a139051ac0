"""The ids of an answer behind its first one: who finds them, and how many a window gives.

On the CPU the host draws from logits and asks drafters for every window. A device finds ids by itself and has
its next window in the queue while the host looks at this one: with drafts by `draft_flow.py` where the drafter
works on the device, too, and one id a window while drafts do not pay. Where the host wants logits, or has to
look into the text for drafts, a device waits for it as the CPU does.
"""

import collections
import time
from collections.abc import Callable, Generator

import numpy as np

from strata_jax.engine.device_sampling import DeviceSampling
from strata_jax.engine.draft_flow import DraftFlow
from strata_jax.engine.drafting import Drafting
from strata_jax.engine.queued import Queued
from strata_jax.engine.request import Request
from strata_jax.engine.runner import Runner
from strata_jax.engine.sampling import Sampler

Ids = Generator[int, None, int]
"""Ids one by one; its result is the last of them."""


class Record:
    """What is kept of windows for those who ask."""

    def __init__(self, *, keeps_logits: bool):
        self.windows: collections.Counter[int] = collections.Counter()
        """How many had so many live rows, by that number."""
        self.logits: list[np.ndarray] | None = [] if keeps_logits else None
        """Of every position, in parts [n, V]."""

    def read_window(self, runner: Runner, ids: np.ndarray, *, want_logits: bool) -> np.ndarray:
        """The logits [n, V] of ids that are read for good."""
        logits = self.keep(runner.read_window(ids, want_logits=want_logits))
        self.windows[len(ids)] += 1
        return logits

    def keep(self, logits: np.ndarray) -> np.ndarray:
        """Keeps them, if anybody asks; returns them."""
        if self.logits is not None:
            self.logits.append(logits.copy())  # the device may reuse its buffer
        return logits


class AnswerIds:
    """Those of one answer; the host asks for each when the one before was used."""

    def __init__(
        self,
        runner: Runner,
        request: Request,
        drafting: Drafting | None,
        record: Record,
        sampler: Sampler,
        last: int,
    ):
        """`runner` has read the prompt; `last` is the position of the last id there is room for."""
        self._runner = runner
        self._request = request
        self._drafting = drafting
        self._record = record
        self._sampler = sampler
        self._last = last
        self._on_device = runner.options.backend.is_device and record.logits is None
        self._draws = self._device_draws()
        self._rows = np.zeros((0, 0), np.float32)  # the newest window's logits

    def after(self, token: int, untold: tuple[int, np.ndarray]) -> Ids:
        """The ids after the first one.

        Args:
            token: that one.
            untold: position and ids of the prompt's end that drafters were not told.
        """
        if self._drafting is not None:
            position, following = untold
            ids = np.asarray([*following, token], np.int32)
            self._drafting.read(ids, self._runner.residual, position)
            flow = self._drafting.flow
            if self._on_device and flow is not None:
                return self._followed_ids(token, self._drafting, flow)
            return self._drafted_ids(token, self._drafting)
        if self._on_device or (self._sampler.takes_best and self._record.logits is None):
            return self._found_ids(token)
        return self._picked_ids(token)

    def _device_draws(self) -> DeviceSampling | None:
        """Draws on the device; None on the CPU, and where the largest logit is all that counts."""
        if not self._on_device or self._sampler.takes_best:
            return None
        placing, settings = self._runner.placing, self._request.settings
        return DeviceSampling(settings, self._sampler, placing.sharding, placing.result_sharding)

    def _picked_ids(self, token: int) -> Ids:
        while True:
            ids = np.asarray([token])
            logits = self._record.read_window(self._runner, ids, want_logits=True)[-1]
            token = self._sampler.pick(logits, self._runner.position)
            self._runner.tiers.after_step()
            yield token

    def _found_ids(self, token: int) -> Ids:
        """By windows of one row; a device finds one id after the other by itself."""
        position = self._runner.position
        for found in self._runner.best_ids(token, self._last - position, self._draws):
            position += 1
            self._record.windows[1] += 1
            self._runner.tiers.after_step()
            token = self._sampler.check_found(found, position)
            yield token
        return token

    def _followed_ids(self, token: int, drafting: Drafting, flow: DraftFlow) -> Ids:
        """On a device that drafts by itself: as long as that pays, and one id a window while it does not."""

        def pays(position: int) -> bool:
            return drafting.pays(self._last - position - 1)

        def told(queued: Queued, token: int, position: int) -> None:
            flow.follower.passed(token, self._runner.residual, queued.place, position)

        flow.start(self._draws, self._request.stop_ids, self._last)
        while True:
            if pays(self._runner.position):
                token = yield from self._flowing_ids(flow, token, drafting)
            else:
                token = yield from self._undrafted_ids(token, drafting, pays, told)

    def _flowing_ids(self, flow: DraftFlow, token: int, drafting: Drafting) -> Ids:
        """By windows of which the next is in the queue already."""
        flow.begin(token)
        goes_on, began = True, time.perf_counter()
        try:
            while goes_on or flow.in_flight:
                goes_on = goes_on and drafting.go_on(flow)
                if flow.in_flight < 1 + goes_on:
                    continue
                position, found = self._runner.position, flow.wait()
                seconds, came_true = time.perf_counter() - began, len(found.ids) - 1
                drafting.followed(found.drafts, came_true, seconds, found.wanted)
                self._record.windows[found.drafts + 1] += 1
                self._runner.tiers.after_step()
                for place, each in enumerate(found.ids):
                    token = self._sampler.check_found(each, position + 1 + place)
                    yield token
                began = time.perf_counter()
        finally:
            flow.end()
        return token

    def _undrafted_ids(
        self,
        token: int,
        drafting: Drafting,
        drafts_pay: Callable[[int], bool],
        told: Callable[[Queued, int, int], None],
    ) -> Ids:
        """Ids found on a device, which is a step ahead of the host, until there are drafts.

        Waiting for each id before the next step is queued would cost as much as many a step. So drafts
        that turn up have to wait for the step that is in the queue by then.

        Args:
            token: known, not read.
            drafting: takes times.
            drafts_pay: whether there are drafts for a window whose first id is at a position.
            told: is told of a step, the id that it found, and the position that it read.
        """
        runner, began = self._runner, time.perf_counter()
        position = runner.position
        queued, is_last = runner.queue_one(token, self._draws), False
        while queued is not None:
            has_room = position + 2 <= self._last
            ahead = runner.queue_one(None, self._draws) if has_room and not is_last else None
            token = self._sampler.check_found(runner.wait_one(queued), position + 1)
            told(queued, token, position)
            seconds = time.perf_counter() - began
            if is_last:  # the drafts that were found since wait for their window
                drafting.seen_without(seconds)
            else:
                drafting.seen(0, 0, seconds)
            self._record.windows[1] += 1
            runner.tiers.after_step()
            position += 1
            yield token
            began = time.perf_counter()
            is_last = ahead is not None and drafts_pay(position + 1)
            queued = ahead
        return token

    def _drafted_ids(self, token: int, drafting: Drafting) -> Ids:
        """By windows of a certain id and drafts, which are kept where they are what is drawn."""
        runner, told_s = self._runner, 0.0

        def next_drafts(position: int) -> np.ndarray:
            return drafting.next(self._last - position - 1)

        def has_drafts(position: int) -> bool:
            return len(next_drafts(position)) > 0

        def told(_: Queued, token: int, position: int) -> None:
            drafting.read(np.asarray([token], np.int32), runner.residual, position)

        while True:
            position, began = runner.position, time.perf_counter()
            drafts = next_drafts(position)
            if self._on_device and len(drafts) == 0:
                token = yield from self._undrafted_ids(token, drafting, has_drafts, told)
                continue
            found = self._verified(np.asarray([token, *drafts], np.int32))
            drafting.seen(len(drafts), len(found) - 1, told_s + time.perf_counter() - began)
            runner.tiers.after_step()
            for place, token in enumerate(found):
                # Who stops here leaves a state that has not read what it never got.
                runner.keep(place)
                if self._record.logits is not None:
                    self._record.keep(self._rows[place : place + 1])
                yield token
            began = time.perf_counter()
            drafting.read(np.asarray(found, np.int32), runner.residual, position)
            told_s = time.perf_counter() - began

    def _verified(self, ids: np.ndarray) -> list[int]:
        """The ids after a window's rows, to the first that is not the next draft, or ends the answer."""
        position = self._runner.position + 1
        if self._on_device:
            rows = self._runner.draw_drafts(ids, self._draws)
            pick = self._sampler.check_found
        else:
            rows = self._rows = self._runner.read_drafts(ids)
            pick = self._sampler.pick
        self._record.windows[len(ids)] += 1
        found: list[int] = []
        for place in range(len(ids)):
            token = pick(rows[place], position + place)
            found.append(token)
            follows = place + 1 < len(ids) and token == ids[place + 1]
            if not follows or token in self._request.stop_ids:
                break
        return found
