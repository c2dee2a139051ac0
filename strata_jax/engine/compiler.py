"""Compiles what a runner runs: two steps, the state's beginning, the draws on a device."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from strata_jax.config import ModelConfig
from strata_jax.engine.device_sampling import compile_draws
from strata_jax.engine.loader import Placing, primary_sharding
from strata_jax.engine.programs import Numbers, best_id
from strata_jax.engine.runner_options import RunnerOptions
from strata_jax.model.state import DecodeState, empty_state
from strata_jax.ops.native import Backend


def place_programs(backend: Backend) -> Placing:
    """Where a backend's programs and arrays go."""
    sharding = primary_sharding(backend.platform)
    is_gpu = backend.name == "cuda"
    return Placing(
        backend=backend,
        sharding=sharding,
        # On a GPU a step itself writes what the host reads to the host's memory.
        result_sharding=sharding.with_memory_kind("pinned_host") if is_gpu else sharding,
        # Contract R: on a GPU nothing is chosen by timing it.
        compiler_options={"xla_gpu_autotune_level": 0} if is_gpu else None,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiler:
    """What the programs of one runner have in common."""

    config: ModelConfig
    options: RunnerOptions
    placing: Placing
    cells: int
    """Of an attention layer's cache."""
    params: list[jax.Array]
    """The leaves of the model's vectors, which make up `params_tree`."""
    params_tree: Any
    drawable: int
    """Ids that may be drawn, from 0 on."""
    report: Callable[[str], None]
    """Gets a line for each program."""

    def empty(self):
        """The program that makes an empty state."""
        return jax.jit(self._empty_state, out_shardings=self.placing.sharding).lower().compile()

    def cleared(self):
        """The program that makes a state empty where it is."""
        cleared = jax.jit(
            lambda _: self._empty_state(),
            donate_argnums=0,
            keep_unused=True,
            out_shardings=self.placing.sharding,
        )
        return cleared.lower(self._state_shapes()).compile()

    def step(self, program, rows: int):
        """A window or a tile of so many rows: (params, state, numbers, last best id) to results.

        Results are the best id of row 0 twice, for the host and for the next step; its logits, all logits,
        the residual and the new state.
        """
        self.report(f"compiling the program for {rows} rows")
        is_device = self.options.backend.is_device

        def packed(params, state, packed_numbers, last_best):
            # One transfer a step: the host need not know the id that the step before found.
            ids, numbers = packed_numbers[:rows], Numbers(*packed_numbers[rows:])
            ids = ids.at[0].set(jnp.where(numbers.follows == 1, last_best, ids[0]))
            params = jax.tree.unflatten(self.params_tree, params)
            logits, residual, state = program(params, state, ids, numbers)
            # A device's memory is far: who wants one row, or its best id, does not fetch all.
            best = best_id(logits[0], self.drawable) if is_device else jnp.int32(-1)
            written = residual.written() if self.options.residual else jnp.zeros(0)
            return best, best, logits[:1], logits, written, state

        shardings = (self.placing.result_sharding, None, None, None, None, None)
        jitted = jax.jit(packed, donate_argnums=1, out_shardings=shardings)
        numbers, best = self._place((rows + len(Numbers._fields),)), self._place(())
        lowered = jitted.lower(self.params, self._state_shapes(), numbers, best)
        return lowered.compile(self.placing.compiler_options)

    def draws(self):
        """Compiles what draws on a device.

        Returns:
            the program that finds each row's best id; None without drafts, and on the CPU.
        """
        options, placing = self.options, self.placing
        if not options.backend.is_device:
            return None
        self.report("compiling the draws")
        rows = options.window_rows if options.drafts else 0
        shardings = (placing.sharding, placing.result_sharding)
        compile_draws(self.config.vocab_size, self.drawable, rows, *shardings)
        if rows == 0:
            return None
        best = jax.vmap(functools.partial(best_id, drawable=self.drawable))
        logits = self._place((rows, self.config.vocab_size), jnp.float32)
        return jax.jit(best, out_shardings=placing.result_sharding).lower(logits).compile()

    def _place(self, shape: tuple[int, ...], dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.placing.sharding)

    def _empty_state(self) -> DecodeState:
        options = self.options
        return empty_state(self.config, self.cells, options.kv, options.most_drafts)

    def _state_shapes(self):
        shapes = jax.eval_shape(self._empty_state)
        return jax.tree.map(lambda leaf: self._place(leaf.shape, leaf.dtype), shapes)
