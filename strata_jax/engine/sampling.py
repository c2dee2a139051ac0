"""From logits to an id; plain numpy, imports no jax."""

import numpy as np

from strata_jax.engine.request import SamplingSettings
from strata_jax.errors import StrataError


class Sampler:
    """Draws one id a position. The draw is a function of logits, history, seed and position only."""

    def __init__(self, settings: SamplingSettings, prompt: tuple[int, ...], vocab_size: int):
        self._settings = settings
        self._seen = np.zeros(vocab_size, bool)
        self._seen[list(prompt)] = True
        self._counts = np.zeros(vocab_size, np.int32)
        self._penalised = (
            settings.repetition_penalty != 1.0
            or settings.presence_penalty != 0.0
            or settings.frequency_penalty != 0.0
        )

    def pick(self, logits: np.ndarray, position: int) -> int:
        """The id at `position` from its logits [V]; it counts as part of the answer from now on.

        Raises:
            StrataError: if the logits are not finite (a broken file or a fault).
        """
        if not np.isfinite(logits.sum()) and not np.isfinite(logits).all():
            raise StrataError(
                f"sampling: logits at position {position} are not finite; the model file may be "
                "damaged"
            )
        if self._penalised:
            logits = self._penalise(logits)
        token = self._choose(logits, position)
        self._seen[token] = True
        self._counts[token] += 1
        return token

    def _penalise(self, logits: np.ndarray) -> np.ndarray:
        s = self._settings
        scaled = np.where(logits > 0, logits / s.repetition_penalty, logits * s.repetition_penalty)
        logits = np.where(self._seen, scaled, logits)
        taken = s.presence_penalty * (self._counts > 0) + s.frequency_penalty * self._counts
        return (logits - taken).astype(np.float32)

    def _choose(self, logits: np.ndarray, position: int) -> int:
        s = self._settings
        if s.temperature == 0.0 or s.top_k == 1:
            return int(np.argmax(logits))  # the first of equal maxima
        ids, weights = candidates(logits, s)
        draw = uniform(s.seed, position) * weights.sum()
        place = int(np.searchsorted(np.cumsum(weights), draw, side="right"))
        return int(ids[min(place, len(ids) - 1)])


def candidates(logits: np.ndarray, settings: SamplingSettings) -> tuple[np.ndarray, np.ndarray]:
    """Ids that may be drawn and their weights (not normalised), most probable first, ties by id.

    Order of the filters: top_k, top_p, min_p on the untempered distribution, then temperature.
    """
    ids = np.arange(len(logits))
    if 0 < settings.top_k < len(logits):
        ids = np.argpartition(-logits, settings.top_k - 1)[: settings.top_k]
        # Equal logits at the border: the lowest ids are the ones that stay.
        border = logits[ids].min()
        above = np.flatnonzero(logits > border)
        equal = np.flatnonzero(logits == border)[: settings.top_k - len(above)]
        ids = np.concatenate([above, equal])
    ids = ids[np.lexsort((ids, -logits[ids]))]
    scores = logits[ids].astype(np.float64)
    weights = np.exp(scores - scores[0])
    if settings.top_p < 1.0:
        before = np.cumsum(weights) - weights
        keep = before < settings.top_p * weights.sum()
        keep[0] = True
        ids, scores, weights = ids[keep], scores[keep], weights[keep]
    keep = weights >= settings.min_p
    ids, scores = ids[keep], scores[keep]
    # A tiny temperature overflows no exponent: differences are at most zero.
    return ids, np.exp((scores - scores[0]) / settings.temperature)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that belongs to seed and position.

    Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3" (Philox 4x64-10).
    """
    bits = np.random.Philox(key=seed, counter=position).random_raw()
    return float(bits >> 11) * 2.0**-53
