"""Drafts by the model's own draft layer: follows what the model reads, guesses a chain of ids.

Everything is compiled at the start. `tile` writes the cells of a prompt tile's rows; it is queued and nobody
waits for it, so it runs beside the model's next tile. `chain` writes the cells of the rows that a window
kept, goes through the layer for the last of them and then for each of its own drafts in turn, all on the
device: one launch and one transfer a pass. Rows of windows after which nobody asked for drafts wait: on a
device for `windows`, which writes the cells of several at once; on the CPU, where their residuals are at hand
and nothing runs beside the model, until somebody asks or there are as many as `tile` takes. An answer that
ends before has cost nothing. `shift` drops the oldest cells where the window is shorter than the context.

The row of position p stands for the id at p and the residual of p - 1. Rows of drafts that did not come
true are written over by those that did: a cell belongs to a position.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from strata_jax.config import DraftSettings, ModelConfig
from strata_jax.engine.drafts import Drafted
from strata_jax.engine.follow_programs import Orders, OrderSender, follow_operands
from strata_jax.engine.loader import Placing, load_draft_params
from strata_jax.engine.mtp_programs import (
    NUMBERS,
    ProgramSettings,
    chain_program,
    follow_program,
    tile_program,
    windows_program,
)
from strata_jax.engine.queued import Window
from strata_jax.model.draft import DraftOps, drop_oldest
from strata_jax.model.params import DraftParams
from strata_jax.model.state import AttentionCells, empty_cells
from strata_jax.ops.native import Backend
from strata_jax.ops.roles import Role
from strata_jax.ops.sets import OpSet, native_ops
from strata_jax.weights.draft_layer import DraftLayer
from strata_jax.weights.draft_needs import BLOCK_ROWS, RING_WINDOWS, DraftSizes, draft_kv
from strata_jax.weights.draft_store import DraftStore, open_draft_store
from strata_jax.weights.draft_vocab import read_draft_vocab


class _Rows(NamedTuple):
    """Rows that were read last; the residual's first ones."""

    ids: np.ndarray
    residual: jax.Array | np.ndarray
    position: int
    """Of the first row: that of its id."""
    place: int = 0
    """Of the first row in the residual."""


class MtpDrafter:
    """One sequence at a time; a `Drafter` (engine/drafts.py)."""

    def __init__(
        self,
        draft: DraftLayer,
        store: DraftStore,
        config: ModelConfig,
        settings: DraftSettings,
        params: DraftParams,
        sizes: DraftSizes,
    ):
        """See `open`; `params` lies where the programs want it."""
        self._draft = draft
        self._store = store
        self._config = config
        self._sizes = sizes
        self._most = settings.most
        self._block = min(sizes.tile_widths[0], BLOCK_ROWS)
        # Flat, for a call takes them apart again every time.
        self._params, self._params_tree = jax.tree.flatten(params)
        self._cells: AttentionCells | None = None
        self.origin = 0
        """Position of the oldest cell."""
        self._last: _Rows | None = None
        self._waiting: list[_Rows] = []
        self._num_waiting = 0

    @classmethod
    def open(
        cls,
        draft: DraftLayer,
        shared: OpSet,
        config: ModelConfig,
        settings: DraftSettings,
        sizes: DraftSizes,
        placing: Placing,
        report: Callable[[str], None],
        drawable: int | None = None,
    ) -> "MtpDrafter":
        """Loads and compiles.

        Args:
            draft: the layer; closed with the drafter.
            shared: ops over the model's own store, which has the embedding and the head.
            config: the model's sizes.
            settings: how drafts are made.
            sizes: of caches and programs.
            placing: where arrays go, and how programs are compiled.
            report: takes lines on progress.
            drawable: ids that may be drawn, from 0 on, for drafts that follow windows of a device
                (`follow`); None: there are none.

        Raises:
            BadFileError: for a draft vocabulary that cannot be used.
            CapacityError: if a device's memory is not to be had.
        """
        head_ids = None
        if settings.draft_vocab is not None:
            head_ids = read_draft_vocab(settings.draft_vocab, config.vocab_size)
        store = open_draft_store(draft, head_ids, placing.backend, report)
        try:
            params = load_draft_params(draft, head_ids, placing.sharding)
            drafter = cls(draft, store, config, settings, params, sizes)
            report("compiling the draft layer")
            programs = ProgramSettings(
                ops=_draft_ops(draft, store, shared, head_ids, placing.backend),
                config=config,
                reading=settings.mtp_norm,
                most=settings.most,
                min_probability=settings.min_probability,
                in_loop=not placing.backend.is_device,
            )
            drafter._compile(programs, placing, drawable)
        except BaseException:
            store.close()
            raise
        return drafter

    def close(self) -> None:
        """Lets go of store and file; after the last step, before the model's own store."""
        self.lose()
        self._store.close()
        self._draft.close()

    def _compile(self, settings: ProgramSettings, placing: Placing, drawable: int | None) -> None:
        config, sizes = self._config, self._sizes
        place = functools.partial(jax.ShapeDtypeStruct, sharding=placing.sharding)
        empty = functools.partial(empty_cells, config, sizes.num_cells, draft_kv(sizes.kv))
        shapes = jax.tree.map(lambda x: place(x.shape, x.dtype), jax.eval_shape(empty))
        self._empty = jax.jit(empty, out_shardings=placing.sharding).lower().compile()
        self._follows = drawable is not None
        rows = sizes.window_rows
        held = RING_WINDOWS * rows if self._follows else rows
        window = (held, config.num_streams, config.hidden)
        self._nothing = jax.device_put(jnp.zeros(window, jnp.float32), placing.sharding)

        def compiled(program, out: Any, *operands: Any, donated: tuple[int, ...] = ()):
            def flat(params, *rest):
                return program(jax.tree.unflatten(self._params_tree, params), *rest)

            jitted = jax.jit(flat, donate_argnums=(1, *donated), out_shardings=out)
            lowered = jitted.lower(self._params, shapes, *operands)
            return lowered.compile(placing.compiler_options)

        def numbers(count: int):
            return place((count,), jnp.int32)

        one_tile = functools.partial(tile_program, settings, rows)
        self._tiles = {
            width: compiled(
                one_tile,
                (None, None),
                place((width, *window[1:]), jnp.float32),
                numbers(self._block + NUMBERS),
            )
            for width in sizes.tile_widths
        }
        residual = place(window, jnp.float32)
        self._held = 1 if self._follows else rows
        self._together = held // 2 if self._follows else rows
        """Rows whose cells are written in one go."""
        self._chain = self._windows = None
        if placing.backend.is_device:
            windows = functools.partial(windows_program, settings)
            given = numbers(3 * self._together + 3)
            self._windows = compiled(windows, None, (residual,) * self._held, given)
        else:
            self._together = self._block
        self._follow: dict[int, Any] = {}
        """By the drafts that there are at most: steps of a chain that nobody wants take their time, too."""
        if drawable is None:
            chain = functools.partial(chain_program, settings)
            out = (None, placing.result_sharding)
            self._chain = compiled(chain, out, residual, numbers(rows + NUMBERS))
        else:
            operands = follow_operands(config.vocab_size, drawable, rows, place)
            out = (None, placing.sharding, placing.result_sharding)
            orders = numbers(len(Orders._fields))
            for most in _chain_lengths(self._most):
                program = functools.partial(
                    follow_program, dataclasses.replace(settings, most=most)
                )
                # The next window's operand lies where this one's did: a captured graph knows its address.
                self._follow[most] = compiled(
                    program, out, residual, *operands, orders, donated=(5,)
                )
            self._sender = OrderSender(placing.sharding)
        drop = functools.partial(drop_oldest, count=sizes.step, ratio=config.index_ratio)
        self._shift = None
        if sizes.step:
            self._shift = jax.jit(drop, donate_argnums=0).lower(shapes).compile()

    def reset(self) -> None:
        """Forgets the sequence."""
        try:
            jax.block_until_ready(self._cells)
        except (ValueError, RuntimeError):  # a step failed behind the back of who asked for it
            self._cells = None
        # What lies in cells of no row is never read: a prompt's are all written before they are.
        if self._cells is None:
            self._cells = self._empty()
        self.origin = 0
        self._last = None
        self._take_waiting()

    def read(self, ids: np.ndarray, residual: jax.Array, position: int) -> None:
        """Takes note of what the model has read; see `Drafter.read`.

        A window's rows wait, for a chain of drafts writes their cells on its way.
        """
        if not len(ids):
            return
        rows = _Rows(np.asarray(ids, np.int32), residual, position + 1)
        if residual.shape[0] not in self._tiles:
            self._wait_for_more(rows)
            if self._follows:
                self._write_waiting()  # the next window writes over the ring's beginning
            return
        self._write_waiting()
        last, tile = self._nothing, self._tiles[residual.shape[0]]
        for first in range(0, len(ids), self._block):
            part = rows.ids[first : first + self._block]
            cell = self._cell(rows.position + first, len(part))
            numbers = _numbers(part, self._block, (first, len(part), self.origin, cell))
            self._cells, last = tile(self._params, self._given(), residual, numbers)
        self._last = _Rows(rows.ids[-1:], last, position + len(ids))

    def draft(self, count: int) -> Drafted:
        """Up to `count` ids that may follow the last id of `read`; see `Drafter.draft`."""
        assert self._chain is not None, "compiled to be asked, not to follow windows"
        count = min(count, self._most)
        if count < 1 or self._last is None:
            return Drafted(ids=np.zeros(0, np.int32), probabilities=np.zeros(0, np.float32))
        if self._waiting:
            # The last ones are written by the chain.
            self._num_waiting -= len(self._waiting.pop().ids)
            self._write_waiting()
        ids, residual, position, _ = self._last  # a host that asks has no ring
        cell = self._cell(position, len(ids) + self._most)
        numbers = _numbers(ids, self._sizes.window_rows, (len(ids), self.origin, cell, count))
        self._cells, result = self._chain(self._params, self._given(), residual, numbers)
        found = np.asarray(result)
        made = int(found[-1])
        ids, bits = found[:made], found[self._most : self._most + made]
        return Drafted(ids=ids.copy(), probabilities=bits.copy().view(np.float32))

    def passed(self, token: int, residual: jax.Array, place: int, position: int) -> None:
        """See `Follower`; a ring has room for as many rows more as wait."""
        ids = np.asarray([token], np.int32)
        self._wait_for_more(_Rows(ids, residual, position + 1, place))
        if self._num_waiting == self._together:
            self._write_waiting()

    def begin(self) -> None:
        """See `Follower`."""
        self._write_waiting()
        self._last = None

    def follow(
        self, window: Window, drawn: jax.Array, stops: jax.Array, orders: Orders, end: int
    ) -> tuple[jax.Array, jax.Array]:
        """See `Follower`: the cells of the rows that are kept, and a chain of drafts behind them."""
        assert self._follow, "compiled for a device"
        most = next(most for most in self._follow if most >= orders.wanted)
        self._make_room(end + 1 + most)
        told = self._sender.send(orders._replace(origin=self.origin))
        self._cells, packed, report = self._follow[most](
            self._params,
            self._given(),
            window.residual,
            window.logits,
            drawn,
            window.packed,
            stops,
            told,
        )
        return packed, report

    def saw(self, ids: list[int], position: int) -> None:
        """See `Follower`: nothing is left to do."""

    def lose(self) -> None:
        """See `Follower`."""
        self._cells = self._last = None
        self._take_waiting()

    def _wait_for_more(self, rows: _Rows) -> None:
        if self._num_waiting + len(rows.ids) > self._together:
            self._write_waiting()
        self._last = rows
        if self._windows is None:  # the rows alone: a whole window for each would be much
            live = np.asarray(rows.residual)[: len(rows.ids)]
            rows = rows._replace(residual=live.copy())
        self._waiting.append(rows)
        self._num_waiting += len(rows.ids)

    def _write_waiting(self) -> None:
        """Writes the cells of rows for which no chain did."""
        waiting = self._take_waiting()
        if not waiting:
            return
        if self._windows is None:
            return self._write_in_tile(waiting)
        width = self._together
        numbers = np.zeros(3 * width + 3, np.int32)
        at = 0
        for window, rows in enumerate(waiting):
            end = at + len(rows.ids)
            numbers[at:end] = rows.ids
            numbers[width + at : width + end] = min(window, self._held - 1)
            numbers[2 * width + at : 2 * width + end] = rows.place + np.arange(len(rows.ids))
            at = end
        cell = self._cell(waiting[0].position, at)
        numbers[3 * width :] = at, self.origin, cell
        residuals = [rows.residual for rows in waiting][-self._held :]
        residuals += [self._nothing] * (self._held - len(residuals))
        self._cells = self._windows(self._params, self._given(), tuple(residuals), numbers)

    def _write_in_tile(self, waiting: list[_Rows]) -> None:
        width, tile = min(self._tiles.items())
        ids = np.concatenate([rows.ids for rows in waiting])
        residual = np.zeros((width, *self._nothing.shape[1:]), np.float32)
        np.concatenate([rows.residual for rows in waiting], out=residual[: len(ids)])
        cell = self._cell(waiting[0].position, len(ids))
        numbers = _numbers(ids, self._block, (0, len(ids), self.origin, cell))
        self._cells, _ = tile(self._params, self._given(), residual, numbers)

    def _take_waiting(self) -> list[_Rows]:
        waiting, self._waiting, self._num_waiting = self._waiting, [], 0
        return waiting

    def _cell(self, position: int, rows: int) -> int:
        """The cell of a position, with room for so many rows from there on."""
        self._make_room(position + rows)
        return position - self.origin

    def _make_room(self, end: int) -> None:
        """For cells of positions before `end`: drops the oldest ones."""
        while end - self.origin > self._sizes.num_cells:
            assert self._shift is not None, "the cache holds the whole context"
            self._cells = self._shift(self._given())
            self.origin += self._sizes.step

    def _given(self) -> AttentionCells:
        """The cells, to be given away: a step that fails leaves none behind."""
        cells, self._cells = self._cells, None
        assert cells is not None, "reset before reading"
        return cells


def _draft_ops(
    draft: DraftLayer,
    store: DraftStore,
    shared: OpSet,
    head_ids: np.ndarray | None,
    backend: Backend,
) -> DraftOps:
    """Ops over the layer's own store, and over the model's for what the layer has not."""
    config = draft.trunk.config
    own = native_ops(store.slot, backend=backend)
    has_head = head_ids is not None or draft.has(Role.OUTPUT)
    head = own.quant_matmul if has_head else shared.quant_matmul
    columns = config.vocab_size if head_ids is None else len(head_ids)
    return DraftOps(
        layer=own,
        embed_rows=own.embed_rows if draft.has(Role.TOKEN_EMBD) else shared.embed_rows,
        head=functools.partial(head, layer=0, roles=(Role.OUTPUT,), num_columns=columns),
    )


def _chain_lengths(most: int) -> list[int]:
    """Those that have a program: one draft and `most`, and the few that are wanted where drafts are hard."""
    return sorted({min(length, most) for length in (1, 2, 3, most)})


def _numbers(ids: np.ndarray, width: int, behind: tuple[int, ...]) -> np.ndarray:
    """The operand of a program: ids, filled up to `width`, and the numbers behind them."""
    numbers = np.zeros(width + NUMBERS, np.int32)
    numbers[: len(ids)] = ids
    numbers[width:] = behind
    return numbers
