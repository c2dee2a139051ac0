"""From logits to an id on a device: what `engine/sampling.py` does, in the queue behind the step.

The next step takes the id from the device's memory, so nobody waits for the host between two steps. The
numbers that decide draws come from the host, many at once: they belong to seed and position, known beforehand.
Weights are whole multiples of 2^-24 of the largest here and float64 there: two ids whose border lies within
1e-6 of a draw may change places. Whole numbers, because their sums have one value whatever the order in which a
compiler adds them: a window's row and a row alone draw the same id (contract W).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32

from strata_jax.engine import programs
from strata_jax.engine.request import SamplingSettings
from strata_jax.engine.sampling import GREEDY_BELOW, Sampler
from strata_jax.engine.uniforms import uniforms
from strata_jax.types import pytree

MOST_CHOSEN = 64
"""A larger top_k, or none, sorts the whole vocabulary."""
_WEIGHT_BITS = 24
_LOW_BITS = 12
"""A sum of that many low bits, and one of the others, fit int32 for 2^18 ids."""
WINDOWS = 2
"""Windows whose ids the host may not know when it queues draws: the one it queues and the one before."""
_TABLE = 512
"""Numbers of a table."""
_MOST_IDS = 2**31 - 1
"""More than a vocabulary has; a larger --top_k keeps all, too."""
_GROUPS = 128, 8
"""Ids of a group, and of one of what is left; a row's best `MOST_CHOSEN` ids lie in as many groups at most. A device
sorts a thousand values in one go, 8,192 in twenty."""
Scalar = Float32[Array, ""] | Int32[Array, ""] | np.float32 | np.int32


@pytree
class History:
    """What penalties go by."""

    seen: Bool[Array, " V"]
    """Ids of the prompt and of the answer."""
    counts: Int32[Array, " V"]
    """How often an id stands in the answer."""
    bias: Float32[Array, " V"]
    """What is added to the logits; V are the ids that may be drawn."""


@pytree
class Numbers:
    """The settings and the draw, as scalars: another value is no other program."""

    temperature: Scalar
    top_k: Scalar
    top_p: Scalar
    min_p: Scalar
    repetition: Scalar
    presence: Scalar
    frequency: Scalar
    draw: Scalar | Float32[Array, " T"] | np.ndarray


class DeviceSampling:
    """The draws of one answer, one after the other."""

    def __init__(self, settings: SamplingSettings, sampler: Sampler, sharding, result_sharding):
        """`sampler` knows the prompt and what was drawn so far; it draws no more.

        Args:
            settings: of the request.
            sampler: of the request.
            sharding: where logits lie.
            result_sharding: where the id goes that the host reads.
        """
        self._settings = settings
        # On the device already: a draw sends one number there, every further one costs as much again.
        self._numbers = jax.device_put(_numbers_of(settings), sharding)
        self._history = jax.device_put(
            History(
                seen=jnp.asarray(sampler.seen),
                counts=jnp.asarray(sampler.counts),
                bias=jnp.asarray(sampler.bias),
            ),
            sharding,
        )
        self._tables = Tables(settings.seed, sharding)
        self._position = jax.device_put(np.int32(0), sharding)
        self._next = 0  # what `_position` says
        self._drawn: jax.Array | None = None
        self._chosen = 0 < settings.top_k <= MOST_CHOSEN
        self._shardings = sharding, result_sharding
        self._program = _program(self._chosen, sharding, result_sharding)

    def draw(
        self, logits: jax.Array | np.ndarray, position: int, before: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Queues the draw of the id at `position`.

        Args:
            logits: [1, V].
            position: of the id.
            before: int32 on the device, donated: the id for the next step is written there, for captured
                graphs know their operands' addresses; None: anywhere.

        Returns:
            the id twice, for the host and for the next step; -1 if a logit is not finite.
        """
        if position != self._next:
            self._position = jax.device_put(np.int32(position), self._shardings[0])
        if before is None:
            before = jax.device_put(np.int32(0), self._shardings[0])
        table = self._tables.covering(position, 1)
        self._history, self._position, token, found = self._program(
            logits, self._history, self._numbers, table, self._position, before
        )
        self._next = position + 1
        return found, token

    def draw_rows(
        self, logits: jax.Array, packed: jax.Array | np.ndarray, lowest: int
    ) -> tuple[jax.Array, jax.Array]:
        """Queues the draws after the rows of a window of drafts.

        A row's penalties go by the drafts before it, as if those had been drawn; where they were not, the
        row's id is of no meaning.

        Args:
            logits: [T, V].
            packed: the window's operand (`programs.Numbers`); the host need not know what is in it.
            lowest: position that the id after row 0 has at least, and at most (`WINDOWS` - 1) * T more.

        Returns:
            [T] twice, for the host and for who goes on with it, until the next window is drawn; -1 for a row
            with a logit that is not finite.
        """
        rows, vocab_size = logits.shape
        drawable = self._history.bias.shape[0]
        program = _rows_program(self._chosen, vocab_size, drawable, rows, *self._shardings)
        table = self._tables.covering(lowest, WINDOWS * rows)
        if self._drawn is None:
            self._drawn = jax.device_put(np.zeros(rows, np.int32), self._shardings[0])
        self._history, drawn, found = program(
            logits, self._history, self._numbers, packed, table, self._drawn
        )
        self._drawn = drawn
        return found, drawn


class Tables:
    """The numbers that decide draws, on the device: one transfer for many positions."""

    def __init__(self, seed: int, sharding: jax.sharding.Sharding):
        self._seed = seed
        self._sharding = sharding
        self._first = -1
        self._table = jnp.zeros(0, jnp.int32)

    def covering(self, first: int, count: int) -> jax.Array:
        """Int32 [1 + `_TABLE`]: the first position, and the bits of float32 numbers from there on."""
        assert count <= _TABLE
        if not 0 <= self._first <= first <= self._first + _TABLE - count:
            bits = uniforms(self._seed, first, _TABLE).astype(np.float32).view(np.int32)
            table = np.concatenate([np.asarray([first], np.int32), bits])
            self._first, self._table = first, jax.device_put(table, self._sharding)
        return self._table


def _numbers_in(table: Int32[Array, " N"], position: Scalar, count: int) -> Float32[Array, " C"]:
    """The numbers of `count` positions."""
    bits = jax.lax.dynamic_slice_in_dim(table[1:], position - table[0], count)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _numbers_of(s: SamplingSettings) -> Numbers:
    """The settings, with a draw that none uses."""
    greedy = s.temperature < GREEDY_BELOW or s.top_k == 1
    return Numbers(
        temperature=np.float32(0.0 if greedy else s.temperature),
        top_k=np.int32(min(s.top_k, _MOST_IDS)),
        top_p=np.float32(s.top_p),
        min_p=np.float32(s.min_p),
        repetition=np.float32(s.repetition_penalty),
        presence=np.float32(s.presence_penalty),
        frequency=np.float32(s.frequency_penalty),
        draw=np.float32(0),
    )


def compile_draws(vocab_size: int, drawable: int, rows: int, sharding, result_sharding) -> None:
    """Compiles all programs: one that came later would throw away every graph of the process.

    Args:
        vocab_size: logits of a row.
        drawable: ids that may be drawn, from 0 on.
        rows: of a window that may hold drafts; 0: there are none.
        sharding: see `DeviceSampling`.
        result_sharding: likewise.
    """
    logits = jnp.zeros((max(1, rows), vocab_size), jnp.float32, device=sharding)
    for top_k in (1, 0):
        settings = SamplingSettings(top_k=top_k)
        sampler = Sampler(settings, (), drawable)
        sampling = DeviceSampling(settings, sampler, sharding, result_sharding)
        jax.block_until_ready(sampling.draw(logits[:1], 0))
        if rows:
            packed = np.zeros(rows + len(programs.Numbers._fields), np.int32)
            jax.block_until_ready(sampling.draw_rows(logits, packed, 0))


@functools.lru_cache(maxsize=4)
def _program(chosen: bool, sharding, result_sharding):
    def program(logits, history, numbers, table, position, before):
        del before  # the token is written there
        numbers = dataclasses.replace(numbers, draw=_numbers_in(table, position, 1)[0])
        token, history = draw_id(logits[0], history, numbers, chosen=chosen)
        # The host's comes last: what is given away goes to the first result of its shape.
        return history, position + 1, token, token

    shardings = (sharding, sharding, sharding, result_sharding)
    donated = (1, 4, 5)
    return jax.jit(program, donate_argnums=donated, keep_unused=True, out_shardings=shardings)


@functools.lru_cache(maxsize=4)
def _rows_program(
    chosen: bool, vocab_size: int, drawable: int, rows: int, sharding, result_sharding
):
    """Compiled for its operands, wherever they are: the host's or a device's."""

    def program(logits, history, numbers, packed, table, before):
        del before  # the ids are written there
        ids, window = packed[:rows], programs.Numbers(*packed[rows:])
        draws = _numbers_in(table, jnp.asarray(window.pos) + 1, rows)
        numbers = dataclasses.replace(numbers, draw=draws)
        live = jnp.asarray(window.live)
        found, history = draw_rows(logits, history, numbers, ids, live, chosen=chosen)
        return history, found, found

    def operands():
        history = History(
            seen=jnp.zeros(drawable, bool),
            counts=jnp.zeros(drawable, jnp.int32),
            bias=jnp.zeros(drawable),
        )
        packed = jnp.zeros(rows + len(programs.Numbers._fields), jnp.int32)
        table = jnp.zeros(1 + _TABLE, jnp.int32)
        numbers = jax.tree.map(jnp.asarray, _numbers_of(SamplingSettings()))
        before = jnp.zeros(rows, jnp.int32)
        return jnp.zeros((rows, vocab_size)), history, numbers, packed, table, before

    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        jax.eval_shape(operands),
    )
    out = (sharding, sharding, result_sharding)
    jitted = jax.jit(program, donate_argnums=(1, 5), keep_unused=True, out_shardings=out)
    return jitted.lower(*shapes).compile()


def draw_rows(
    logits: Float32[Array, "T V"],
    history: History,
    numbers: Numbers,
    ids: Int32[Array, " T"],
    live: Int32[Array, ""],
    *,
    chosen: bool,
) -> tuple[Int32[Array, " T"], History]:
    """The id after each row, and the history with those that follow only drafts that came true.

    Args:
        logits: of a window's rows.
        history: what was seen before it, its first id included.
        numbers: the settings, and a draw for each row.
        ids: of the window; those behind the first are drafts.
        live: rows that count.
        chosen: as in `draw_id`.
    """
    rows = jnp.arange(len(ids))
    before = (rows[None, :] >= 1) & (rows[None, :] <= rows[:, None])  # drafts that a row follows

    def draw(x, follows, number):
        seen = _with_ids(history, ids, follows)
        return draw_id(x, seen, dataclasses.replace(numbers, draw=number), chosen=chosen)[0]

    found = jax.vmap(draw)(logits, before, numbers.draw)
    came_true = jnp.cumprod((found[:-1] == ids[1:]) & (rows[1:] < live))
    drawn = jnp.concatenate([jnp.ones((1,), came_true.dtype), came_true]) > 0
    return found, _with_ids(history, jnp.maximum(found, 0), drawn)


def _with_ids(history: History, ids: Int32[Array, " T"], which: Bool[Array, " T"]) -> History:
    """The history after `ids`, of which only some count."""
    return History(
        seen=history.seen.at[ids].max(which),
        counts=history.counts.at[ids].add(which.astype(jnp.int32)),
        bias=history.bias,
    )


def draw_id(
    logits: Float32[Array, " N"], history: History, numbers: Numbers, *, chosen: bool
) -> tuple[Int32[Array, ""], History]:
    """The id, and the history with it; -1 if a logit is not finite.

    Args:
        logits: of one position, at least as many as may be drawn.
        history: what was seen so far.
        numbers: settings and draw.
        chosen: top_k is between 1 and `MOST_CHOSEN`.
    """
    finite = jnp.all(jnp.isfinite(logits))
    logits = logits[: len(history.seen)]
    x = _penalise(logits, history, numbers) + history.bias + 0.0  # both zeros alike
    if chosen:
        ids, scores = _largest(x)
        keep = jnp.arange(MOST_CHOSEN) < numbers.top_k
        weights = _filtered(scores, keep, numbers)
        order = jnp.argsort(ids)  # the draw goes through ids in ascending order
        ids, weights = ids[order], weights[order]
    else:
        ids, weights = jnp.arange(len(x)), _filtered_all(x, numbers)
    sums = _sums(weights)
    place = jnp.sum(sums <= numbers.draw * sums[-1])
    # Rounding may leave the draw behind the last sum: then the last id with a weight.
    last = jnp.max(jnp.where(weights > 0, jnp.arange(len(weights)), 0))
    drawn = ids[jnp.minimum(place, last)]
    token = jnp.where(numbers.temperature > 0, drawn, jnp.argmax(x))
    token = jnp.where(finite, token, -1).astype(jnp.int32)
    at = jnp.maximum(token, 0)
    seen, counts = history.seen.at[at].set(True), history.counts.at[at].add(1)
    return token, History(seen=seen, counts=counts, bias=history.bias)


def _sums(weights: Float32[Array, " C"]) -> Float32[Array, " C"]:
    """Running sums of weights from 0 to 1 in units of 2^-24: exact but for one rounding at the end."""
    units = jnp.floor(weights * 2.0**_WEIGHT_BITS).astype(jnp.int32)
    high = jnp.cumsum(units >> _LOW_BITS).astype(jnp.float32)
    low = jnp.cumsum(units & (2**_LOW_BITS - 1)).astype(jnp.float32)
    return high * 2.0**_LOW_BITS + low


def _penalise(x: Float32[Array, " V"], history: History, n: Numbers) -> Float32[Array, " V"]:
    scaled = jnp.where(x > 0, x / n.repetition, x * n.repetition)
    off = n.presence * (history.counts > 0) + n.frequency * history.counts
    return jnp.where(history.seen, scaled - off, x)


def _largest(x: Float32[Array, " V"]) -> tuple[Int32[Array, " C"], Float32[Array, " C"]]:
    """The `MOST_CHOSEN` largest logits, of equal ones those of the lowest ids, in that order."""
    ids = jnp.arange(len(x), dtype=jnp.int32)
    for group in _GROUPS:
        ids, x = _in_best_groups(ids, x, group)
    scores, places = jax.lax.top_k(x, min(MOST_CHOSEN, len(x)))
    return ids[places], scores


def _in_best_groups(
    ids: Int32[Array, " N"], x: Float32[Array, " N"], group: int
) -> tuple[Int32[Array, " M"], Float32[Array, " M"]]:
    """Those that may be among the `MOST_CHOSEN` best, in the same order.

    One that is lies in one of the groups whose largest logits come first: every group before its own holds
    one that comes before it. So whole groups are left out.
    """
    groups = -(-len(x) // group)
    if groups <= MOST_CHOSEN:
        return ids, x
    more = groups * group - len(x)
    x = jnp.pad(x, (0, more), constant_values=-jnp.inf).reshape(groups, group)
    ids = jnp.pad(ids, (0, more)).reshape(groups, group)
    _, rows = jax.lax.top_k(x.max(axis=1), MOST_CHOSEN)
    rows = jnp.sort(rows)
    return ids[rows].reshape(-1), x[rows].reshape(-1)


def _filtered(
    scores: Float32[Array, " C"], keep: Bool[Array, " C"], n: Numbers
) -> Float32[Array, " C"]:
    """Weights of candidates in descending order: top_p and min_p before the temperature."""
    weights = jnp.where(keep, jnp.exp(scores - scores[0]), 0.0)
    sums = _sums(weights)
    before = jnp.concatenate([jnp.zeros((1,)), sums[:-1]])
    keep &= (weights >= n.min_p) & ((n.top_p >= 1) | (before < n.top_p * sums[-1]))
    keep = keep.at[0].set(True)
    temperature = jnp.maximum(n.temperature, GREEDY_BELOW)
    return jnp.where(keep, jnp.exp((scores - scores[0]) / temperature), 0.0)


def _filtered_all(x: Float32[Array, " V"], n: Numbers) -> Float32[Array, " V"]:
    """Weights of the whole vocabulary, by id."""
    order = jnp.argsort(-x)  # stable: the lowest of equal ones first
    ranks = jnp.arange(len(x))
    weights = _filtered(x[order], (n.top_k == 0) | (ranks < n.top_k), n)
    return jnp.zeros_like(x).at[order].set(weights, unique_indices=True)
