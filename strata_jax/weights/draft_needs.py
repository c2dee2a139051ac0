"""What the draft layer needs of a memory, known before anything is loaded."""

import dataclasses

from strata_jax.config import DraftSettings, KvType, ModelConfig, Platform
from strata_jax.weights.budget import StepSizes
from strata_jax.weights.draft_layer import draft_matrices, find_draft_layer, store_bytes
from strata_jax.weights.draft_vocab import read_draft_vocab
from strata_jax.weights.pack import Pack
from strata_jax.weights.plan import cell_bytes

RING_WINDOWS = 8
"""Windows whose rows a ring of residuals holds: half of them wait for their cells to be written together,
for each call takes the host as long as half a step takes a device, while more may be written."""
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
    tile_widths: tuple[int, ...]
    """Rows of the programs that read prompts, ascending."""
    kv: KvType
    """How the model caches keys and values."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftNeeds:
    """Bytes of the primary (on the CPU of the host)."""

    weight_bytes: int
    """The layer's matrices and experts, and rows of the head that are copied."""
    xla_bytes: int
    """Its cache, once more while cells move, and the residuals of windows that it reads."""
    row_bytes: int
    """Of the residuals of a prompt's program, which it reads as well, for each row."""

    def xla_bytes_of(self, steps: StepSizes) -> int:
        """With the residuals of a chunk: one that it reads, while the next chunk's is written."""
        return self.xla_bytes + 2 * steps.chunk_rows * self.row_bytes


def draft_needs(
    pack: Pack,
    settings: DraftSettings | None,
    max_context: int,
    kv: KvType,
    steps: StepSizes,
    platform: Platform,
) -> DraftNeeds | None:
    """What drafts of a model need; None if it has no draft layer or none is wanted.

    Temporaries are not counted: those of a tile, which never run at the same time, are larger.

    Raises:
        BadFileError: for a file of a draft layer, or of ids, that cannot be used.
    """
    draft = None if settings is None else find_draft_layer(pack, settings.mtp)
    if draft is None or settings is None:
        return None
    config = pack.config
    with draft:
        ids = None
        if settings.draft_vocab is not None:
            ids = read_draft_vocab(settings.draft_vocab, config.vocab_size)
        matrices, _ = draft_matrices(draft, ids, copy=False)
        weights = sum(m.num_bytes for m in matrices)
        if platform != "cpu":
            weights = sum(store_bytes(matrices))
    one_tile = dataclasses.replace(steps, chunk_tiles=1)
    sizes = draft_sizes(config, settings, max_context, kv, one_tile)
    cells = sizes.num_cells * cell_bytes(config, draft_kv(kv))
    row = config.num_streams * config.hidden * _FLOAT
    read = RING_WINDOWS * steps.window_rows
    if platform == "cpu":  # rows wait until drafts are wanted; then a tile takes them
        read = min(steps.tile_rows, BLOCK_ROWS) + steps.tile_rows
    return DraftNeeds(
        weight_bytes=weights,
        xla_bytes=cells * (2 if sizes.step else 1) + (4 * steps.window_rows + read) * row,
        row_bytes=row,
    )


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
        tile_widths=steps.tile_widths,
        kv=kv,
    )


def draft_kv(kv: KvType) -> KvType:
    """How the draft layer caches keys and values: one layer is not worth rounding to int8."""
    return "f32" if kv == "f32" else "fp16"


def _up(count: int, grain: int) -> int:
    return -(-count // grain) * grain
