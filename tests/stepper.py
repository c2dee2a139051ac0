"""A model whose state lies open, for tests: any op set, any width, windows and tiles.

The engine keeps one state and two widths; here every step takes a state and returns the next one, and the
old one stays readable.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from strata_jax.config import ModelConfig
from strata_jax.engine.loader import load_params, primary_sharding
from strata_jax.engine.runner import tile_program, window_program
from strata_jax.model.state import DecodeState, empty_state, num_cells
from strata_jax.ops.sets import OpSet, native_ops, plain_ops
from strata_jax.weights.matrices import fill_store
from strata_jax.weights.pack import Pack
from tests.plain import dequantized_matrices, split_table

Result = tuple[np.ndarray, DecodeState]


class Stepper:
    """Reads ids from any state on. `wrap` may change the op set."""

    def __init__(
        self,
        pack: Pack,
        *,
        plain: bool = False,
        config: ModelConfig | None = None,
        context: int = 512,
        wrap: Callable[[OpSet], OpSet] = lambda ops: ops,
    ):
        self.config = config or pack.config
        self.cells = num_cells(context, 256)
        self._sharding = primary_sharding()
        self._params = load_params(pack, self._sharding)
        self._matrices, table = split_table(dequantized_matrices(pack)) if plain else ({}, {})
        self._store = None if plain else fill_store(pack)

        def program(form, matrices, *args):
            if self._store is None:
                ops = plain_ops({**matrices, **table})
            else:
                ops = native_ops(self._store.slot)
            if form == "window":
                return window_program(wrap(ops), self.config, *args)
            return tile_program(wrap(ops), self.config, True, *args)

        self._program = jax.jit(program, static_argnums=0)

    def empty(self) -> DecodeState:
        """The state before the first id."""
        return self.place(empty_state(self.config, self.cells))

    def place(self, state: DecodeState) -> DecodeState:
        """A state made by hand, where the programs expect it (elsewhere would compile them anew)."""
        return jax.device_put(state, self._sharding)

    def step(
        self,
        state: DecodeState,
        ids: Sequence[int] | np.ndarray,
        pos: int,
        *,
        width: int | None = None,
        form: str = "window",
        fill: int = 0,
    ) -> Result:
        """One program of `width` rows (as many as ids, if None); `fill` stands in the dead rows.

        Returns:
            logits [n, V] of the live rows, and the new state.
        """
        live = len(ids)
        padded = np.full(width or live, fill, np.int32)
        padded[:live] = ids
        numbers = (np.int32(pos), np.int32(live), np.int32(live))
        args = (self._params, state, padded, *numbers)
        logits, state = self._program(form, self._matrices, *args)
        return np.asarray(logits)[:live], state

    def read(
        self,
        ids: Sequence[int] | np.ndarray,
        *,
        steps: int | Sequence[int] = 8,
        width: int | None = None,
        form: str = "window",
        start: tuple[DecodeState, int] | None = None,
    ) -> Result:
        """Reads ids in steps of the given sizes (one size: as many as needed), from `start` on."""
        state, pos = start or (self.empty(), 0)
        if isinstance(steps, int):
            width = width or steps
            steps = [min(steps, len(ids) - at) for at in range(0, len(ids), steps)]
        assert sum(steps) == len(ids)
        parts, at = [], 0
        for size in steps:
            logits, state = self.step(
                state, ids[at : at + size], pos + at, width=width or max(steps), form=form
            )
            parts.append(logits)
            at += size
        return np.concatenate(parts), state


def poisoned(state: DecodeState, length: int, ratio: int) -> DecodeState:
    """The state after `length` ids with NaN in every cell that no id wrote."""

    def fill(cells, used):
        return cells.at[used:].set(jnp.nan)

    def attention(cells):
        groups, width, lanes = cells.index_keys.shape
        keys = jnp.swapaxes(cells.index_keys, 1, 2).reshape(-1, width)
        keys = fill(keys, length // ratio).reshape(groups, lanes, width)
        return type(cells)(
            keys=fill(cells.keys, length),
            values=fill(cells.values, length),
            index_raw=fill(cells.index_raw, length),
            index_keys=jnp.swapaxes(keys, 1, 2),
        )

    return DecodeState(cells=tuple(map(attention, state.cells)), recurrent=state.recurrent)


def same_bits(a: object, b: object) -> bool:
    """Whether two trees of arrays hold the same bytes (signed zeros and NaN payloads included)."""
    left, right = jax.tree.leaves(a), jax.tree.leaves(b)
    assert len(left) == len(right)
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in zip(left, right))


def same_prefix(a: DecodeState, b: DecodeState, length: int, ratio: int) -> bool:
    """Whether two states agree after `length` ids; cells past them are not looked at."""
    clean = functools.partial(poisoned, length=length, ratio=ratio)
    return same_bits(clean(a), clean(b))
