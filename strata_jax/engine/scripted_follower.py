"""Drafts from known answers on a device: all of them are sent there before the answer begins."""

from collections.abc import Callable

import jax
import numpy as np

from strata_jax.engine.follow_programs import (
    Orders,
    OrderSender,
    compiled_script,
    script_length,
)
from strata_jax.engine.follower import Follower
from strata_jax.engine.queued import Window
from strata_jax.engine.runner import Runner
from strata_jax.engine.scripted_drafter import ScriptedDrafter


class ScriptedFollower(Follower):
    """Follows windows as its drafter, which is told the same sequence, would draft."""

    def __init__(self, drafter: ScriptedDrafter, runner: Runner):
        """Compiles; `runner` is the one whose windows are followed."""
        placing, options = runner.placing, runner.options
        self._drafter = drafter
        self._length = script_length(options.max_context, options.window_rows)
        self._sharding = placing.sharding
        self._sender = OrderSender(placing.sharding)
        self._sent = np.zeros(0, np.int32)
        self._script: jax.Array | None = None  # what was sent
        self._program: Callable = compiled_script(
            runner.config.vocab_size,
            runner.drawable,
            options.window_rows,
            options.max_context,
            placing.sharding,
            placing.result_sharding,
            placing.compiler_options,
        )

    def begin(self) -> None:
        """See `Follower`."""
        script = self._drafter.script(self._length)
        if self._script is None or not np.array_equal(script, self._sent):
            self._script, self._sent = jax.device_put(script, self._sharding), script

    def follow(
        self, window: Window, drawn: jax.Array, stops: jax.Array, orders: Orders, end: int
    ) -> tuple[jax.Array, jax.Array]:
        """See `Follower`."""
        del end  # there are no cells to make room for
        told = self._sender.send(orders)
        return self._program(window.logits, drawn, window.packed, stops, self._script, told)

    def passed(self, token: int, residual: jax.Array, place: int, position: int) -> None:
        """See `Follower`."""
        del residual, place
        self.saw([token], position)

    def saw(self, ids: list[int], position: int) -> None:
        """See `Follower`."""
        self._drafter.read(np.asarray(ids, np.int32), None, position)

    def lose(self) -> None:
        """See `Follower`."""
        self._script = None
