"""What a drafter compiles: the layer of `model/draft.py` over rows that are known, and along a chain.

Programs take one array of numbers from the host, ids first, so that a call is one transfer.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from strata_jax.config import HiddenNorm, ModelConfig
from strata_jax.engine.follow_programs import Orders, find, next_window, report_of
from strata_jax.engine.programs import Numbers
from strata_jax.model.draft import DraftOps, append_rows, best_drafts, draft_rows, draft_streams
from strata_jax.model.params import DraftParams
from strata_jax.model.state import AttentionCells
from strata_jax.types import pytree

NUMBERS = 4
"""Numbers behind the ids."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramSettings:
    """What is part of the programs beside shapes."""

    ops: DraftOps
    config: ModelConfig
    reading: HiddenNorm
    most: int
    """Drafts of a chain."""
    min_probability: float
    """A chain ends with the first draft that is less probable."""
    in_loop: bool
    """Whether the steps of a chain are one loop; a captured graph has them one after the other."""


@pytree
class Chain:
    """A chain of drafts in the making."""

    made: Int32[Array, ""]
    """Drafts so far."""
    more: Bool[Array, ""]
    """Whether another one is to follow."""
    hidden: Float32[Array, "1 J D"]
    """The layer's own residual after the last draft's row, which the next row takes."""
    ids: Int32[Array, " N"]
    probabilities: Float32[Array, " N"]
    cells: AttentionCells


def windows_program(
    s: ProgramSettings,
    params: DraftParams,
    cells: AttentionCells,
    residuals: tuple[Float32[Array, "R J D"], ...],
    numbers: Int32[Array, " 3*T+3"],
) -> AttentionCells:
    """Writes the cells of up to T rows of several windows.

    Args:
        s: what is part of the program.
        params: the layer's vectors.
        cells: donated.
        residuals: the model's, of as many windows as there may be; one if it is a ring.
        numbers: the rows' ids; the window of each and its place there; then how many rows count, the
            position of cell 0 and the first row's cell.
    """
    rows = numbers.shape[0] // 3 - 1
    ids, windows, places = jnp.split(numbers[: 3 * rows], 3)
    live, origin, pos = numbers[3 * rows :]
    hidden = jnp.stack(residuals)[windows, places]
    streams = draft_streams(s.ops, s.config, s.reading, params, ids, hidden, live)
    return append_rows(s.ops, s.config, params, cells, streams, origin, pos, live)


def tile_program(
    s: ProgramSettings,
    keep: int,
    params: DraftParams,
    cells: AttentionCells,
    residual: Float32[Array, "T J D"],
    numbers: Int32[Array, " B+4"],
) -> tuple[AttentionCells, Float32[Array, "R J D"]]:
    """Writes the cells of up to B rows of a tile.

    Args:
        s: what is part of the program.
        keep: R.
        params: the layer's vectors.
        cells: donated.
        residual: the model's, of the positions before those of the rows.
        numbers: the rows' ids; then the first row's place in `residual`, how many rows count, the position
            of cell 0 and the first row's cell.

    Returns:
        the cells, and the last row's residual as the first of R rows.
    """
    ids, (first, live, origin, pos) = numbers[:-NUMBERS], numbers[-NUMBERS:]
    hidden = jax.lax.dynamic_slice_in_dim(residual, first, ids.shape[0])
    streams = draft_streams(s.ops, s.config, s.reading, params, ids, hidden, live)
    cells = append_rows(s.ops, s.config, params, cells, streams, origin, pos, live)
    last = jax.lax.dynamic_slice_in_dim(hidden, live - 1, 1)
    return cells, jnp.zeros((keep, *residual.shape[1:]), residual.dtype).at[:1].set(last)


def chain_program(
    s: ProgramSettings,
    params: DraftParams,
    cells: AttentionCells,
    residual: Float32[Array, "T J D"],
    numbers: Int32[Array, " T+4"],
) -> tuple[AttentionCells, Int32[Array, " 2N+1"]]:
    """Writes the cells of the rows that are known, then drafts from the last of them on.

    Args:
        s: what is part of the program.
        params: the layer's vectors.
        cells: donated.
        residual: the model's, of the positions before those of the rows.
        numbers: the rows' ids; then how many count, the position of cell 0, the first row's cell and the
            drafts that are wanted, at least 1.

    Returns:
        the cells, and in one array the ids of N drafts, the bits of their probabilities and their number.
    """
    ids, (live, origin, pos, wanted) = numbers[:-NUMBERS], numbers[-NUMBERS:]
    chain = _chain_behind(s, params, cells, residual, ids, live, origin, pos, wanted)
    bits = jax.lax.bitcast_convert_type(chain.probabilities, jnp.int32)
    return chain.cells, jnp.concatenate([chain.ids, bits, chain.made[None]])


def follow_program(
    s: ProgramSettings,
    params: DraftParams,
    cells: AttentionCells,
    residual: Float32[Array, "R J D"],
    logits: Float32[Array, "T V"],
    drawn: Int32[Array, " T"],
    packed: Int32[Array, " T+7"],
    stops: Bool[Array, " V"],
    orders: Int32[Array, " O"],
) -> tuple[AttentionCells, Int32[Array, " T+7"], Int32[Array, " T+2"]]:
    """What follows a window on a device: cells of the rows that are kept, drafts, the next window's operand.

    Args:
        s: what is part of the program.
        params: the layer's vectors.
        cells: donated.
        residual: the ring, whose first rows are the window's.
        logits: see `find` in engine/follow_programs.py.
        drawn: likewise.
        packed: likewise.
        stops: likewise.
        orders: `Orders`.

    Returns:
        the cells, the next window's operand, and the report on this one.
    """
    told = Orders(*orders)
    found, rows = find(logits, drawn, packed, stops, told), logits.shape[0]
    origin, begin = jnp.asarray(told.origin), Numbers(*packed[rows:]).pos + 1
    wanted = jnp.clip(told.wanted, 0, found.room - 1)
    ids = jnp.maximum(found.ids, 0)  # -1 stands for no id, and ends the answer
    pos = begin - origin
    chain = _chain_behind(s, params, cells, residual[:rows], ids, found.count, origin, pos, wanted)
    # The first that is not probable enough ends the chain and is not tried, either.
    sure = (jnp.arange(s.most) < chain.made) & (chain.probabilities >= s.min_probability)
    made = jnp.sum(sure.astype(jnp.int32))
    return chain.cells, next_window(found, chain.ids, made), report_of(found, packed)


def _chain_behind(
    s: ProgramSettings,
    params: DraftParams,
    cells: AttentionCells,
    residual: Float32[Array, "T J D"],
    ids: Int32[Array, " T"],
    live: Int32[Array, ""],
    origin: Int32[Array, ""],
    pos: Int32[Array, ""],
    wanted: Int32[Array, ""],
) -> Chain:
    """Writes the cells of `live` rows from cell `pos` on, and drafts behind the last, if any are wanted."""
    streams = draft_streams(s.ops, s.config, s.reading, params, ids, residual, live)
    more = wanted > 0
    # The last row goes through the whole layer where drafts are wanted, which writes its cells.
    known = live - more.astype(jnp.int32)
    cells = append_rows(s.ops, s.config, params, cells, streams, origin, pos, known)
    streams = jax.lax.dynamic_slice_in_dim(streams, known, 1)
    begin = pos + known
    start = Chain(
        made=jnp.int32(0),
        more=more,
        hidden=jnp.zeros_like(streams),
        ids=jnp.full((s.most,), -1, jnp.int32),
        probabilities=jnp.zeros((s.most,), jnp.float32),
        cells=cells,
    )
    chain = _grown(s, params, start, streams, origin, begin, wanted)

    def step(chain: Chain) -> Chain:
        live = chain.more.astype(jnp.int32)
        last = jax.lax.dynamic_slice_in_dim(chain.ids, chain.made - 1, 1)
        streams = draft_streams(s.ops, s.config, s.reading, params, last, chain.hidden, live)
        return _grown(s, params, chain, streams, origin, begin, wanted)

    if s.in_loop:
        return jax.lax.while_loop(lambda chain: chain.more, step, chain)
    for _ in range(1, s.most):
        chain = step(chain)
    return chain


def _grown(
    s: ProgramSettings,
    params: DraftParams,
    chain: Chain,
    streams: Float32[Array, "1 J D"],
    origin: Int32[Array, ""],
    begin: Int32[Array, ""],
    wanted: Int32[Array, ""],
) -> Chain:
    """One draft more, if there is to be one: without, every op finds no live row and nothing changes."""
    live = chain.more.astype(jnp.int32)
    logits, hidden, cells = draft_rows(
        s.ops, s.config, params, chain.cells, streams, origin, begin + chain.made, live
    )
    (found,), (probability,) = best_drafts(logits, params.head_ids)
    place = jnp.where(chain.more, chain.made, s.most)  # past the end: dropped
    made = chain.made + live
    return Chain(
        made=made,
        more=chain.more & (made < wanted) & (probability >= s.min_probability),
        hidden=hidden,
        ids=chain.ids.at[place].set(found, mode="drop"),
        probabilities=chain.probabilities.at[place].set(probability, mode="drop"),
        cells=cells,
    )
