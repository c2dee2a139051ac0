"""What is compiled: one program for windows, one for tiles."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

from strata_jax.config import ModelConfig
from strata_jax.model.state import DecodeState, Drafts
from strata_jax.model.transformer import Residual, forward, head
from strata_jax.ops.sets import OpSet
from strata_jax.types import pytree

Number = Int32[Array, ""] | np.int32 | int


class Numbers(NamedTuple):
    """What a step is told beside its ids; int32 scalars, as one vector behind the ids."""

    pos: Number
    """Position of row 0."""
    live: Number
    """Rows that count."""
    head_rows: Number
    """Rows that get logits."""
    follows: Number = 0
    """1: the first id is the one that the step before found, whatever stands in its place."""
    kept: Number = 0
    """Drafts of the window before that came true."""
    certain: Number = 0
    """Rows that are no drafts."""
    place: Number = 0
    """Of row 0 in the ring of residuals, if there is one."""


def packed_operand(width: int, ids: np.ndarray, numbers: Numbers) -> np.ndarray:
    """The operand of a program for `width` rows, int32 [width + 7]."""
    packed = np.zeros(width + len(numbers), np.int32)
    packed[: len(ids)] = ids
    packed[width:] = numbers
    return packed


@pytree
class Results:
    """What a window leaves beside the state; the next one writes its own where these lie."""

    first: Float32[Array, "1 V"]
    """Logits of row 0."""
    logits: Float32[Array, "T V"]
    residual: Float32[Array, "R J D"]
    """The model's last residual of the rows; R is T, or more in a ring, or 0 if nobody reads it."""


def best_id(logits: Float32[Array, " V"], drawable: int) -> Int32[Array, ""]:
    """Id under `drawable` of the largest logit, the lowest of equal ones; -1 if one is not finite."""
    finite = jnp.all(jnp.isfinite(logits))
    return jnp.where(finite, jnp.argmax(logits[:drawable]), -1).astype(jnp.int32)


def window_program(
    ops: OpSet, config: ModelConfig, params, state: DecodeState, ids, numbers: Numbers
) -> tuple[Float32[Array, "T V"], Residual, DecodeState]:
    """A window: logits of its first `head_rows` rows, the residual of all, and the new state."""
    drafts = Drafts(kept=jnp.asarray(numbers.kept), certain=jnp.asarray(numbers.certain))
    pos, live = jnp.asarray(numbers.pos), jnp.asarray(numbers.live)
    residual, state = forward(ops, config, params, state, ids, pos, live, drafts)
    head_rows = jnp.asarray(numbers.head_rows)
    return head(ops, config, params, residual, head_rows), residual, state


def placed(
    ring: Float32[Array, "R J D"],
    rows: Float32[Array, "T J D"],
    place: Number,
    live: Number,
) -> Float32[Array, "R J D"]:
    """The ring with the live rows from `place` on."""
    source = jnp.arange(ring.shape[0]) - place
    is_new = (source >= 0) & (source < live)
    taken = rows[jnp.clip(source, 0, rows.shape[0] - 1)]
    return jnp.where(is_new[:, None, None], taken, ring)


def tile_program(
    ops: OpSet,
    config: ModelConfig,
    all_logits: bool,
    params,
    state: DecodeState,
    ids,
    numbers: Numbers,
) -> tuple[Float32[Array, "T V"], Residual, DecodeState]:
    """A tile: logits of its last live row, or of every row; the residual; and the new state."""
    pos, live = jnp.asarray(numbers.pos), jnp.asarray(numbers.live)
    residual, state = forward(ops, config, params, state, ids, pos, live)
    last = residual
    if not all_logits:
        last = Residual(*(jax.lax.dynamic_slice_in_dim(x, live - 1, 1) for x in residual))
    head_rows = jnp.asarray(numbers.head_rows)
    return head(ops, config, params, last, head_rows), residual, state
