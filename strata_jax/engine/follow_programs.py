"""Between two windows of a device: which drafts came true, new ones, and the operand of the next window.

Nothing here waits for the host. It says beforehand what it wants (`Orders`) and reads a report later, when
the next window is in the device's queue already. Where the answer ends, windows that follow have no live row:
they change nothing but that the last drafts which came true go into the recurrent state.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32

from strata_jax.engine.programs import Number, Numbers, best_id
from strata_jax.types import pytree


class Orders(NamedTuple):
    """What the host says of a window when it queues it; int32 scalars, as one vector."""

    wanted: Number
    """Drafts for the next window, if there is room."""
    last: Number
    """Position of the answer's last id, which is not read."""
    drawn: Number = 0
    """1: the ids after the rows were drawn; 0: the largest logits win."""
    origin: Number = 0
    """Position of the drafter's oldest cell."""


class OrderSender:
    """Orders on the device: they seldom change, and every array that is sent costs as much as many a step."""

    _MOST = 32

    def __init__(self, sharding: jax.sharding.Sharding):
        self._sharding = sharding
        self._sent: dict[Orders, jax.Array] = {}

    def send(self, orders: Orders) -> jax.Array:
        """The vector of `orders`, whose numbers the host knows."""
        sent = self._sent.get(orders)
        if sent is None:
            if len(self._sent) == self._MOST:
                self._sent.clear()
            sent = jax.device_put(np.asarray(orders, np.int32), self._sharding)
            self._sent[orders] = sent
        return sent


@pytree
class Found:
    """What a window gave."""

    ids: Int32[Array, " T"]
    """The id after each row; of no meaning behind the first draft that did not come true."""
    count: Int32[Array, ""]
    """Ids that are kept: at least one, if the window had a live row."""
    token: Int32[Array, ""]
    """The last of them, which the next window reads."""
    position: Int32[Array, ""]
    """Of that id."""
    room: Int32[Array, ""]
    """Rows that the next window may have; 0: the answer has ended."""


def find(
    logits: Float32[Array, "T V"],
    drawn: Int32[Array, " T"],
    packed: Int32[Array, " T+7"],
    stops: Bool[Array, " V"],
    orders: Orders,
) -> Found:
    """Which of a window's drafts came true, to the first that did not or to the answer's end.

    Args:
        logits: of the window.
        drawn: the id after each row, if `orders` says that they were drawn.
        packed: the window's operand.
        stops: which ids end an answer; all that may be drawn.
        orders: the host's.
    """
    rows = logits.shape[0]
    ids, numbers = packed[:rows], Numbers(*packed[rows:])
    best = jax.vmap(lambda row: best_id(row, stops.shape[0]))(logits)
    found = jnp.where(jnp.asarray(orders.drawn) == 1, drawn, best)
    # A value that is not finite ends the answer, too: the host makes it an error.
    ends = (found < 0) | stops[jnp.maximum(found, 0)]
    follows = (jnp.arange(1, rows) < numbers.live) & (found[:-1] == ids[1:]) & ~ends[:-1]
    kept = jnp.sum(jnp.cumprod(follows.astype(jnp.int32)))
    is_live = jnp.asarray(numbers.live) > 0
    count = jnp.where(is_live, kept + 1, 0)
    position = numbers.pos + count
    ended = ~is_live | ends[kept]
    room = jnp.where(ended, 0, jnp.maximum(orders.last - position, 0))
    return Found(ids=found, count=count, token=found[kept], position=position, room=room)


def next_window(
    found: Found, drafts: Int32[Array, " N"], made: Int32[Array, ""]
) -> Int32[Array, " T+7"]:
    """The operand of the next window: the id found last and `made` drafts, as far as there is room."""
    rows = found.ids.shape[0]
    live = jnp.minimum(1 + made, found.room)
    ids = jnp.zeros(rows, jnp.int32).at[0].set(found.token)
    ids = ids.at[1 : 1 + drafts.shape[0]].set(drafts[: rows - 1])
    # Rows that count for nothing still need ids of the model.
    ids = jnp.where(jnp.arange(rows) < live, ids, 0)
    numbers = Numbers(
        pos=found.position,
        live=live,
        head_rows=live,
        kept=jnp.maximum(found.count - 1, 0),
        certain=jnp.minimum(live, 1),
    )
    return jnp.concatenate([ids, jnp.stack([jnp.asarray(n, jnp.int32) for n in numbers])])


def report_of(found: Found, packed: Int32[Array, " T+7"]) -> Int32[Array, " T+2"]:
    """What the host reads: the window's live rows, how many ids are kept, and the ids."""
    rows = found.ids.shape[0]
    live = Numbers(*packed[rows:]).live
    return jnp.concatenate([jnp.stack([jnp.asarray(live), found.count]), found.ids])


def scripted_program(
    logits: Float32[Array, "T V"],
    drawn: Int32[Array, " T"],
    packed: Int32[Array, " T+7"],
    stops: Bool[Array, " V"],
    script: Int32[Array, " S"],
    orders: Int32[Array, " O"],
) -> tuple[Int32[Array, " T+7"], Int32[Array, " T+2"]]:
    """What follows a window whose drafts were known beforehand.

    Args:
        logits: see `find`.
        drawn: likewise.
        packed: likewise.
        stops: likewise.
        script: the draft for every position; -1: none.
        orders: `Orders`.

    Returns:
        the next window's operand, and the report on this one.
    """
    told = Orders(*orders)
    found = find(logits, drawn, packed, stops, told)
    drafts = jax.lax.dynamic_slice_in_dim(script, found.position + 1, found.ids.shape[0] - 1)
    made = jnp.minimum(jnp.sum(jnp.cumprod((drafts >= 0).astype(jnp.int32))), told.wanted)
    return next_window(found, drafts, made), report_of(found, packed)


def compiled_script(
    vocab_size: int, drawable: int, rows: int, context: int, sharding, result_sharding, options
) -> Callable:
    """`scripted_program` for a model.

    Args:
        vocab_size: logits of a row.
        drawable: ids that may be drawn, from 0 on.
        rows: of a window.
        context: positions of the cache.
        sharding: where arrays are.
        result_sharding: where the report goes.
        options: of the compiler.
    """

    def place(shape, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    operands = follow_operands(vocab_size, drawable, rows, place)
    script = place((script_length(context, rows),))
    orders = place((len(Orders._fields),))
    # The next window's operand lies where this one's did, so a captured graph knows its address.
    shardings = (sharding, result_sharding)
    jitted = jax.jit(scripted_program, donate_argnames="packed", out_shardings=shardings)
    return jitted.lower(*operands, script, orders).compile(options)


def follow_operands(vocab_size: int, drawable: int, rows: int, place: Callable) -> tuple:
    """The shapes of `logits`, `drawn`, `packed` and `stops`."""
    return (
        place((rows, vocab_size), jnp.float32),
        place((rows,), jnp.int32),
        place((rows + len(Numbers._fields),), jnp.int32),
        place((drawable,), jnp.bool_),
    )


def script_length(context: int, rows: int) -> int:
    """Positions of a script: a slice of a window's drafts may begin at any position of the cache."""
    return context + rows + 1


def stop_mask(stop_ids: frozenset[int], drawable: int) -> np.ndarray:
    """Bool [V]: which ids end an answer."""
    mask = np.zeros(drawable, bool)
    mask[[token for token in stop_ids if 0 <= token < drawable]] = True
    return mask
