"""Compiles what a runner runs: two steps, the state's beginning, the draws on a device."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from strata_jax.config import ModelConfig
from strata_jax.engine.device_sampling import compile_draws
from strata_jax.engine.loader import Placing, primary_sharding
from strata_jax.engine.programs import (
    Numbers,
    Results,
    best_id,
    placed,
    tile_program,
    window_program,
)
from strata_jax.engine.runner_options import RunnerOptions
from strata_jax.model.state import DecodeState, empty_state
from strata_jax.ops.native import Backend
from strata_jax.ops.sets import OpSet
from strata_jax.weights.draft_needs import RING_WINDOWS


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
class Programs:
    """What a runner runs, compiled; see the methods of `Compiler`."""

    empty: Any
    cleared: Any
    window: Any
    no_results: Any
    cleared_results: Any
    tiles: dict[int, Any]
    """For prompts, by width, ascending."""
    best_ids: Any


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

    def compile(self, ops: OpSet, tile_ops: OpSet, widths: Sequence[int]) -> Programs:
        """Compiles everything.

        A tile's program comes with those of twice, four times as many rows, up to a chunk. Many rows are one
        program, not many runs of the tile's: every op keeps to the rule that a row's bits depend
        neither on the others nor on its place (contract C), so a chunk is a larger tile, and an expert
        is fetched, decoded and used once for all its rows.

        Args:
            ops: of windows.
            tile_ops: of tiles.
            widths: of a tile and its multiples.
        """
        tile = functools.partial(tile_program, tile_ops, self.config, self.options.all_logits)
        return Programs(
            empty=self.empty(),
            cleared=self.cleared(),
            window=self.window(functools.partial(window_program, ops, self.config)),
            no_results=self.no_results(),
            cleared_results=self.cleared_results(),
            tiles={width: self.tile(tile, width) for width in widths},
            best_ids=self.draws(),
        )

    def empty(self):
        """The program that makes an empty state."""
        return self._made(self._empty_state)

    def cleared(self):
        """The program that makes a state empty where it is."""
        return self._made_again(self._empty_state)

    def tile(self, program, rows: int):
        """A tile of so many rows: (params, state, operand) to results.

        Results are the best id of the logits, for the host; the logits, the residual and the new state.
        """
        self.report(f"compiling the program for {rows} rows")

        def packed(params, state, operand):
            ids, numbers = operand[:rows], Numbers(*operand[rows:])
            params = jax.tree.unflatten(self.params_tree, params)
            logits, residual, state = program(params, state, ids, numbers)
            written = residual.written() if self.options.residual else jnp.zeros(0)
            return self._best(logits), logits, written, state

        shardings = (self.placing.result_sharding, None, None, None)
        jitted = jax.jit(packed, donate_argnums=1, out_shardings=shardings)
        operand = self._place((rows + len(Numbers._fields),))
        lowered = jitted.lower(self.params, self._state_shapes(), operand)
        return lowered.compile(self.placing.compiler_options)

    def window(self, program):
        """A window: (params, state, `Results` of the one before, its best id, operand) to results.

        Results are `Results`, the new state, and the best id of row 0 twice, for the next window and for the
        host: the host's comes last, for what is given away goes to the first result of its shape. A GPU
        writes what it finds where that of the one before lay: a captured graph knows its addresses, and
        to tell it others takes the host longer than many a step takes the device.
        """
        options, rows = self.options, self.options.window_rows
        self.report(f"compiling the program for {rows} rows")

        def packed(params, state, before, last_best, operand):
            # One transfer a step: the host need not know the id that the step before found.
            ids, numbers = operand[:rows], Numbers(*operand[rows:])
            ids = ids.at[0].set(jnp.where(numbers.follows == 1, last_best, ids[0]))
            params = jax.tree.unflatten(self.params_tree, params)
            logits, residual, state = program(params, state, ids, numbers)
            written = residual.written() if options.residual else before.residual
            if options.ring:
                written = placed(before.residual, written, numbers.place, numbers.live)
            best = self._best(logits)
            found = Results(first=logits[:1], logits=logits, residual=written)
            return found, state, best, best

        results = self._shapes(self._no_results)
        is_gpu = self.placing.backend.name == "cuda"
        donated = (1, 3) if is_gpu else (1,)
        if is_gpu and (options.ring or not options.residual):
            donated = (1, 2, 3)
        shardings = (None, None, None, self.placing.result_sharding)
        # Kept, for what nobody reads would not be given away: the logits of the window before.
        jitted = jax.jit(
            packed, donate_argnums=donated, keep_unused=is_gpu, out_shardings=shardings
        )
        operands = self._place(()), self._place((rows + len(Numbers._fields),))
        lowered = jitted.lower(self.params, self._state_shapes(), results, *operands)
        return lowered.compile(self.placing.compiler_options)

    def no_results(self):
        """The program that makes `Results` of no window."""
        return self._made(self._no_results)

    def cleared_results(self):
        """The program that makes them where others are."""
        return self._made_again(self._no_results)

    def _made(self, make: Callable[[], Any]):
        return jax.jit(make, out_shardings=self.placing.sharding).lower().compile()

    def _made_again(self, make: Callable[[], Any]):
        program = jax.jit(
            lambda _: make(),
            donate_argnums=0,
            keep_unused=True,
            out_shardings=self.placing.sharding,
        )
        return program.lower(self._shapes(make)).compile()

    def _no_results(self) -> Results:
        options, config = self.options, self.config
        rows = options.window_rows
        held = (RING_WINDOWS if options.ring else 1) * rows if options.residual else 0
        return Results(
            first=jnp.zeros((1, config.vocab_size), jnp.float32),
            logits=jnp.zeros((rows, config.vocab_size), jnp.float32),
            residual=jnp.zeros((held, config.num_streams, config.hidden), jnp.float32),
        )

    def _best(self, logits):
        # A device's memory is far: who wants the best id of a row does not fetch all logits.
        if not self.options.backend.is_device:
            return jnp.int32(-1)
        return best_id(logits[0], self.drawable)

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
        return self._shapes(self._empty_state)

    def _shapes(self, make: Callable[[], Any]):
        return jax.tree.map(lambda leaf: self._place(leaf.shape, leaf.dtype), jax.eval_shape(make))
