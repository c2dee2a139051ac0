"""From logits to an id; plain numpy, imports no jax."""

import numpy as np

from strata_jax.engine.request import SamplingSettings
from strata_jax.engine.uniforms import Uniforms
from strata_jax.errors import StrataError, UsageError

GREEDY_BELOW = 1e-5
"""Temperatures under this leave the largest logit alone: the lowest id of equal ones, no draw."""


class Sampler:
    """Draws one id a position. The draw is a function of logits, history, seed and position only."""

    def __init__(self, settings: SamplingSettings, prompt: tuple[int, ...], vocab_size: int):
        """Takes what decides the draws.

        Args:
            settings: of the request.
            prompt: ids that were read.
            vocab_size: ids that may be drawn: those under it, however many logits there are.

        Raises:
            UsageError: for a bias of an id that may not be drawn.
        """
        self._settings = settings
        self._uniforms = Uniforms(settings.seed)
        self.seen = np.zeros(vocab_size, bool)
        """Ids of the prompt and of the answer."""
        self.seen[[token for token in prompt if token < vocab_size]] = True
        self.bias = np.zeros(vocab_size, np.float32)
        """What is added to the logits."""
        for token, bias in settings.logit_bias:
            if token >= vocab_size:
                raise UsageError(f"logit_bias: id {token}, expected ids from 0 to {vocab_size - 1}")
            self.bias[token] = bias
        self.counts = np.zeros(vocab_size, np.int32)
        """How often an id stands in the answer."""
        self._penalised = (
            settings.repetition_penalty != 1.0
            or settings.presence_penalty != 0.0
            or settings.frequency_penalty != 0.0
            or len(settings.logit_bias) > 0
        )

    @property
    def takes_best(self) -> bool:
        """Whether the id is simply that of the largest logit, so that nobody needs the others."""
        return self._is_greedy and not self._penalised

    @property
    def _is_greedy(self) -> bool:
        return self._settings.temperature < GREEDY_BELOW or self._settings.top_k == 1

    def check_found(self, token: int | np.int32, position: int) -> int:
        """The id at `position`, which a device found.

        Raises:
            StrataError: if it is -1: logits were not finite.
        """
        if token < 0:
            raise _not_finite(position)
        return int(token)

    def pick(self, logits: np.ndarray, position: int) -> int:
        """The id at `position` from its logits [V]; it counts as part of the answer from now on.

        Raises:
            StrataError: if the logits are not finite (a broken file or a fault).
        """
        if not np.isfinite(logits).all():
            raise _not_finite(position)
        logits = logits[: len(self.seen)]
        if self._penalised:
            logits = self._penalise(logits)
        token = self._choose(logits, position)
        self.seen[token] = True
        self.counts[token] += 1
        return token

    def _penalise(self, logits: np.ndarray) -> np.ndarray:
        s = self._settings
        ids = np.flatnonzero(self.seen)  # the answer is part of it
        x, counts = logits[ids], self.counts[ids]
        x = np.where(x > 0, x / s.repetition_penalty, x * s.repetition_penalty)
        x -= s.presence_penalty * (counts > 0) + s.frequency_penalty * counts
        logits = logits.copy()
        logits[ids] = x
        return logits + self.bias

    def _choose(self, logits: np.ndarray, position: int) -> int:
        s = self._settings
        if self._is_greedy:
            return int(np.argmax(logits))  # the first of equal maxima
        ids, weights = candidates(logits, s)
        draw = self._uniforms.at(position) * weights.sum()
        place = int(np.searchsorted(np.cumsum(weights), draw, side="right"))
        return int(ids[min(place, len(ids) - 1)])


def _not_finite(position: int) -> StrataError:
    return StrataError(
        f"sampling: logits at position {position} are not finite; the model file may be damaged"
    )


def candidates(logits: np.ndarray, settings: SamplingSettings) -> tuple[np.ndarray, np.ndarray]:
    """Ids that may be drawn, ascending, and their weights (not normalised).

    Order of the filters: top_k, top_p, min_p on the untempered distribution, then temperature. Of equal
    logits at a border the lowest ids stay.
    """
    ids = np.arange(len(logits))
    if 0 < settings.top_k < len(logits):
        ids = _largest(logits, settings.top_k)
    scores = logits[ids].astype(np.float64)
    weights = np.exp(scores - scores.max())
    keep = weights >= settings.min_p
    if settings.top_p < 1.0:
        keep &= _nucleus(scores, weights, settings.top_p)
    ids, scores = ids[keep], scores[keep]
    # No exponent overflows: differences are at most zero.
    return ids, np.exp((scores - scores.max()) / settings.temperature)


def _largest(logits: np.ndarray, count: int) -> np.ndarray:
    border = np.partition(logits, -count)[-count]
    above = np.flatnonzero(logits > border)
    equal = np.flatnonzero(logits == border)[: count - len(above)]
    return np.sort(np.concatenate([above, equal]))


def _nucleus(scores: np.ndarray, weights: np.ndarray, top_p: float) -> np.ndarray:
    """Which of the weights belong to the smallest set that reaches `top_p` of their sum."""
    total = weights.sum()
    # All weights under this together are less than what may be left out: only the others are sorted.
    places = np.flatnonzero(weights >= (1.0 - top_p) * total / len(weights))
    places = places[np.argsort(-scores[places], kind="stable")]
    before = np.cumsum(weights[places]) - weights[places]
    keep = np.zeros(len(weights), bool)
    keep[places[before < top_p * total]] = True
    keep[places[0]] = True
    return keep
