"""A model whose state lies open, for tests: any op set, any width, windows and tiles.

The engine keeps one state and two widths; here every step takes a state and returns the next one, and the
old one stays readable.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from strata_jax.config import MOST_DRAFTS, KvType, ModelConfig
from strata_jax.engine.loader import load_params, primary_sharding
from strata_jax.engine.programs import Numbers, tile_program, window_program
from strata_jax.model.state import DecodeState, empty_state, num_cells
from strata_jax.ops.sets import OpSet, native_ops, plain_ops
from strata_jax.weights.matrices import fill_store
from strata_jax.weights.ngram_table import NgramTable
from strata_jax.weights.pack import Pack
from tests.plain import dequantized_matrices, split_table

Ids = Sequence[int] | np.ndarray
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
        kv: KvType | None = None,
        wrap: Callable[[OpSet], OpSet] = lambda ops: ops,
    ):
        self.config = config or pack.config
        self.cells = num_cells(context, 256)
        # As the engine's; the plain set is compared with exact logits.
        self.kv: KvType = kv or ("f32" if plain else "fp16")
        self.selected: list[np.ndarray] = []
        """Blocks [rows, NB] that each attention layer chose in the last step."""
        self._sharding = primary_sharding("cpu")
        self._params = load_params(pack, self._sharding)
        self._matrices, table = split_table(dequantized_matrices(pack)) if plain else ({}, {})
        self._store = None if plain else fill_store(pack)
        has_table = not plain and pack.config.ngram is not None
        self._table = NgramTable(pack, "mmap", print) if has_table else None

        def program(form, matrices, *args):
            if self._store is None:
                ops = plain_ops({**matrices, **table})
            else:
                table_slot = -1 if self._table is None else self._table.slot
                ops = native_ops(self._store.slot, table=table_slot)
            ops, selected = _recorded(wrap(ops))
            if form == "window":
                logits, _, state = window_program(ops, self.config, *args)
            else:
                logits, _, state = tile_program(ops, self.config, True, *args)
            return logits, state, selected

        self._program = jax.jit(program, static_argnums=0)

    def empty(self) -> DecodeState:
        """The state before the first id."""
        return self.place(empty_state(self.config, self.cells, self.kv, MOST_DRAFTS))

    def place(self, state: DecodeState) -> DecodeState:
        """A state made by hand, where the programs expect it (elsewhere would compile them anew)."""
        return jax.device_put(state, self._sharding)

    def step(
        self,
        state: DecodeState,
        ids: Ids,
        pos: int,
        *,
        width: int | None = None,
        form: str = "window",
        fill: int = 0,
        kept: int = 0,
        certain: int | None = None,
    ) -> Result:
        """One program of `width` rows (as many as ids, if None); `fill` stands in the dead rows.

        Args:
            state: to begin with.
            ids: to read.
            pos: of the first.
            width: of the program.
            form: "window" or "tile".
            fill: see above.
            kept: drafts of the window before that came true.
            certain: rows that are no drafts; all if None.

        Returns:
            logits [n, V] of the live rows, and the new state.
        """
        live = len(ids)
        padded = np.full(width or live, fill, np.int32)
        padded[:live] = ids
        certain = live if certain is None else certain
        numbers = Numbers(pos=pos, live=live, head_rows=live, kept=kept, certain=certain)
        numbers = Numbers(*(np.int32(number) for number in numbers))
        args = (self._params, state, padded, numbers)
        logits, state, selected = self._program(form, self._matrices, *args)
        self.selected = [np.asarray(blocks)[:live] for blocks in selected]
        return np.asarray(logits)[:live], state

    def read(
        self,
        ids: Ids,
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
            rows = ids[at : at + size]
            logits, state = self.step(state, rows, pos + at, width=width or max(steps), form=form)
            parts.append(logits)
            at += size
        return np.concatenate(parts), state


def _recorded(ops: OpSet) -> tuple[OpSet, list[jax.Array]]:
    selected = []

    def select(*args, **settings):
        selected.append(ops.qsa_select(*args, **settings))
        return selected[-1]

    return dataclasses.replace(ops, qsa_select=select), selected


def with_nan_cells(state: DecodeState, cells: np.ndarray, blocks: np.ndarray) -> DecodeState:
    """The state with NaN in these cells and pooled blocks of every attention layer."""

    def poisoned(leaf):
        return leaf.at[cells].set(-128 if leaf.dtype == jnp.int8 else jnp.nan)

    def attention(layer):
        groups, width, lanes = layer.index_keys.shape
        pooled = jnp.swapaxes(layer.index_keys, 1, 2).reshape(-1, width).at[blocks].set(jnp.nan)
        return type(layer)(
            keys=poisoned(layer.keys),
            values=poisoned(layer.values),
            scales=poisoned(layer.scales) if layer.keys.dtype == jnp.int8 else layer.scales,
            index_raw=poisoned(layer.index_raw),
            index_keys=jnp.swapaxes(pooled.reshape(groups, lanes, width), 1, 2),
        )

    return DecodeState(cells=tuple(map(attention, state.cells)), recurrent=state.recurrent)


def with_nan_after(state: DecodeState, length: int, ratio: int) -> DecodeState:
    """The state after `length` ids with NaN in every cell and block that those did not fill."""
    layer = state.cells[0]
    cells = np.arange(length, layer.keys.shape[0])
    blocks = np.arange(length // ratio, layer.index_keys.shape[0] * layer.index_keys.shape[2])
    return with_nan_cells(state, cells, blocks)


def same_bits(a: object, b: object) -> bool:
    """Whether two trees of arrays hold the same bytes (signed zeros and NaN payloads included)."""
    left, right = jax.tree.leaves(a), jax.tree.leaves(b)
    assert len(left) == len(right)
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in zip(left, right))


def without_drafts(state: DecodeState) -> DecodeState:
    """The state with nothing left of the last window's drafts, none of which came true."""
    recurrent = state.recurrent
    linear = tuple(
        type(layer)(conv=layer.conv, delta=layer.delta, pending=jnp.zeros_like(layer.pending))
        for layer in recurrent.linear
    )
    ngram = recurrent.ngram
    if ngram is not None:
        drafts = ngram.pending.shape[0]
        tokens = ngram.tokens.at[ngram.tokens.shape[0] - drafts :].set(0)
        pending = jnp.zeros_like(ngram.pending)
        ngram = type(ngram)(tokens=tokens, conv=ngram.conv, pending=pending)
    return DecodeState(cells=state.cells, recurrent=type(recurrent)(linear=linear, ngram=ngram))


def same_state(a: DecodeState, b: DecodeState, length: int, ratio: int) -> bool:
    """Whether two states agree after `length` ids; cells past them and drafts are not looked at."""
    left, right = (without_drafts(with_nan_after(each, length, ratio)) for each in (a, b))
    return same_bits(left, right)
