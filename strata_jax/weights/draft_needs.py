"""What the draft layer needs of a memory, known before anything is loaded."""

import dataclasses

from strata_jax.config import DraftSettings, KvType, ModelConfig
from strata_jax.weights.budget import StepSizes

BLOCK_ROWS = 512
"""Most rows of a tile whose cells are written at once: bounds the memory for their projections."""
_GROUP = 16
"""Blocks whose pooled keys lie side by side: GROUP in ops/qsa_append.py."""
_FLOAT = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftSizes:
    """Sizes of a drafter's cache and programs."""

    num_cells: int
    step: int
    """Cells that are dropped at a time; 0 = the cache holds the whole context."""
    window_rows: int
    tile_rows: int
    kv: KvType
    """How the model caches keys and values."""


def draft_sizes(
    config: ModelConfig, settings: DraftSettings, max_context: int, kv: KvType, steps: StepSizes
) -> DraftSizes:
    """The cache for a window of at least `settings.mtp_window` positions.

    A window that is shorter than the context is one step longer than asked for, so that cells move once in
    many rows. A step is whole blocks, 16 at least: block borders stay where they are.
    """
    grain = _GROUP * max(config.index_ratio, 1)
    # Rows that are written at once, and drafts, which may reach past the last position.
    ahead = max(min(steps.tile_rows, BLOCK_ROWS), steps.window_rows + settings.most)
    step = 0
    cells = max_context + ahead
    if settings.mtp_window < max_context:
        step = _up(max(steps.tile_rows, ahead), grain)
        cells = min(_up(settings.mtp_window, grain) + step + ahead, _up(cells, grain) + step)
    return DraftSizes(
        num_cells=_up(cells, grain),
        step=step,
        window_rows=steps.window_rows,
        tile_rows=steps.tile_rows,
        kv=kv,
    )


def draft_kv(kv: KvType) -> KvType:
    """How the draft layer caches keys and values: one layer is not worth rounding to int8."""
    return "f32" if kv == "f32" else "fp16"


def _up(count: int, grain: int) -> int:
    return -(-count // grain) * grain
