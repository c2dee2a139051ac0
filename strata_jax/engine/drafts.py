"""Drafts: guesses of the ids that follow, which one window verifies together with the certain id.

A draft is kept where it equals the id that the model draws at its position anyway, so drafts never change
an answer, only how many ids a window yields (contract W).
"""

import dataclasses
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:  # who only refuses settings waits for no jax
    import jax


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drafted:
    """Guesses in the order of their positions."""

    ids: np.ndarray
    """int32 [n]."""
    probabilities: np.ndarray
    """float32 [n]: how sure the drafter is of each; 1 where it cannot tell."""


class Drafter(Protocol):
    """Follows what the model reads and guesses what comes next. One sequence at a time."""

    def reset(self) -> None:
        """Forgets the sequence."""
        ...

    def read(self, ids: np.ndarray, residual: "jax.Array", position: int) -> None:
        """The model has read positions `position`, `position + 1`, ... for good.

        Called once for every position, in order; rejected drafts are never among them.

        Args:
            ids: int32 [n], the id that follows each of the positions (not the one read there).
            residual: float32 [T, J, D] on the device, T >= n: the model's last residual (the streams
                with the last block's write) of those positions.
            position: of row 0. -1 begins a sequence: `ids` is its first id, before which nothing was read,
                and the residual zeros.
        """
        ...

    def draft(self, count: int) -> Drafted:
        """Up to `count` ids that may follow the last id of `read`; may be none."""
        ...
