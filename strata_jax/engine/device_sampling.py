"""From logits to an id on a device: what `engine/sampling.py` does, in the queue behind the step.

The next step takes the id from the device's memory, so nobody waits for the host between two steps. The
number that decides a draw comes from the host: it belongs to seed and position, both known beforehand.
Sums are float32 here and float64 there: two ids whose border lies within 1e-6 of a draw may change places.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32

from strata_jax.engine.request import SamplingSettings
from strata_jax.engine.sampling import GREEDY_BELOW, Sampler, uniform
from strata_jax.types import pytree

MOST_CHOSEN = 64
"""A larger top_k, or none, sorts the whole vocabulary."""
_GROUP = 128
"""Ids of a group; a row's best `MOST_CHOSEN` ids lie in as many groups at most."""
Scalar = Float32[Array, ""] | Int32[Array, ""] | np.float32 | np.int32


@pytree
class History:
    """What penalties go by."""

    seen: Bool[Array, " V"]
    """Ids of the prompt and of the answer."""
    counts: Int32[Array, " V"]
    """How often an id stands in the answer."""


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
    draw: Scalar


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
        self._history = jax.device_put(
            History(seen=jnp.asarray(sampler.seen), counts=jnp.asarray(sampler.counts)), sharding
        )
        chosen = 0 < settings.top_k <= MOST_CHOSEN
        self._program = _program(chosen, sharding, result_sharding)

    def draw(self, logits: jax.Array | np.ndarray, position: int) -> tuple[jax.Array, jax.Array]:
        """Queues the draw of the id at `position` from logits [1, V].

        Returns:
            the id twice, for the host and for the next step; -1 if a logit is not finite.
        """
        s = self._settings
        greedy = s.temperature < GREEDY_BELOW or s.top_k == 1
        numbers = Numbers(
            temperature=np.float32(0.0 if greedy else s.temperature),
            top_k=np.int32(s.top_k),
            top_p=np.float32(s.top_p),
            min_p=np.float32(s.min_p),
            repetition=np.float32(s.repetition_penalty),
            presence=np.float32(s.presence_penalty),
            frequency=np.float32(s.frequency_penalty),
            draw=np.float32(uniform(s.seed, position)),
        )
        found, token, self._history = self._program(logits, self._history, numbers)
        return found, token


def compile_draws(vocab_size: int, sharding, result_sharding) -> None:
    """Compiles both programs: one that came later would throw away every graph of the process."""
    logits = jnp.zeros((1, vocab_size), jnp.float32, device=sharding)
    for top_k in (1, 0):
        settings = SamplingSettings(top_k=top_k)
        sampler = Sampler(settings, (), vocab_size)
        jax.block_until_ready(
            DeviceSampling(settings, sampler, sharding, result_sharding).draw(logits, 0)
        )


@functools.lru_cache(maxsize=4)
def _program(chosen: bool, sharding, result_sharding):
    def program(logits, history, numbers):
        token, history = draw_id(logits[0], history, numbers, chosen=chosen)
        return token, token, history

    shardings = (result_sharding, sharding, sharding)
    return jax.jit(program, donate_argnums=1, out_shardings=shardings)


def draw_id(
    logits: Float32[Array, " V"], history: History, numbers: Numbers, *, chosen: bool
) -> tuple[Int32[Array, ""], History]:
    """The id, and the history with it; -1 if a logit is not finite.

    Args:
        logits: of one position.
        history: what was seen so far.
        numbers: settings and draw.
        chosen: top_k is between 1 and `MOST_CHOSEN`.
    """
    finite = jnp.all(jnp.isfinite(logits))
    x = _penalise(logits, history, numbers) + 0.0  # both zeros alike
    if chosen:
        ids, scores = _largest(x)
        keep = jnp.arange(MOST_CHOSEN) < numbers.top_k
        weights = _filtered(scores, keep, numbers)
        order = jnp.argsort(ids)  # the draw goes through ids in ascending order
        ids, weights = ids[order], weights[order]
    else:
        ids, weights = jnp.arange(len(x)), _filtered_all(x, numbers)
    sums = jnp.cumsum(weights)
    place = jnp.sum(sums <= numbers.draw * sums[-1])
    # Rounding may leave the draw behind the last sum: then the last id with a weight.
    last = jnp.max(jnp.where(weights > 0, jnp.arange(len(weights)), 0))
    drawn = ids[jnp.minimum(place, last)]
    token = jnp.where(numbers.temperature > 0, drawn, jnp.argmax(x))
    token = jnp.where(finite, token, -1).astype(jnp.int32)
    at = jnp.maximum(token, 0)
    return token, History(seen=history.seen.at[at].set(True), counts=history.counts.at[at].add(1))


def _penalise(x: Float32[Array, " V"], history: History, n: Numbers) -> Float32[Array, " V"]:
    scaled = jnp.where(x > 0, x / n.repetition, x * n.repetition)
    off = n.presence * (history.counts > 0) + n.frequency * history.counts
    return jnp.where(history.seen, scaled - off, x)


def _largest(x: Float32[Array, " V"]) -> tuple[Int32[Array, " C"], Float32[Array, " C"]]:
    """The `MOST_CHOSEN` largest logits, of equal ones those of the lowest ids, in that order.

    An id among them lies in one of the groups whose largest logits come first in the same order: every
    group before its own holds an id that comes before it. So whole groups are left out first.
    """
    groups = -(-len(x) // _GROUP)
    padded = jnp.full(groups * _GROUP, -jnp.inf).at[: len(x)].set(x).reshape(groups, _GROUP)
    count = min(MOST_CHOSEN, groups)
    _, rows = jax.lax.top_k(padded.max(axis=1), count)
    rows = jnp.sort(rows)  # candidates in ascending order of ids
    candidates = padded[rows].reshape(-1)
    scores, places = jax.lax.top_k(candidates, min(MOST_CHOSEN, count * _GROUP))
    ids = rows[places // _GROUP] * _GROUP + places % _GROUP
    return ids.astype(jnp.int32), scores


def _filtered(
    scores: Float32[Array, " C"], keep: Bool[Array, " C"], n: Numbers
) -> Float32[Array, " C"]:
    """Weights of candidates in descending order: top_p and min_p before the temperature."""
    weights = jnp.where(keep, jnp.exp(scores - scores[0]), 0.0)
    before = jnp.cumsum(weights) - weights
    keep &= (weights >= n.min_p) & ((n.top_p >= 1) | (before < n.top_p * weights.sum()))
    keep = keep.at[0].set(True)
    temperature = jnp.maximum(n.temperature, GREEDY_BELOW)
    return jnp.where(keep, jnp.exp((scores - scores[0]) / temperature), 0.0)


def _filtered_all(x: Float32[Array, " V"], n: Numbers) -> Float32[Array, " V"]:
    """Weights of the whole vocabulary, by id."""
    order = jnp.argsort(-x)  # stable: the lowest of equal ones first
    ranks = jnp.arange(len(x))
    weights = _filtered(x[order], (n.top_k == 0) | (ranks < n.top_k), n)
    return jnp.zeros_like(x).at[order].set(weights, unique_indices=True)
