"""What a device was told to do and may not have done yet."""

import dataclasses

import jax
import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Window:
    """A window in a device's queue whose ids the host may not know."""

    packed: jax.Array | np.ndarray
    """Its operand; until the window behind it has its own."""
    logits: jax.Array
    residual: jax.Array
    """See `Runner.residual`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Queued:
    """A step of one row that a device may not have done yet."""

    found: jax.Array
    """Its id."""
    residual: jax.Array
    """See `Runner.residual`."""
    place: int
    """Of its row in a ring of residuals."""
