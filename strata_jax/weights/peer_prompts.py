"""A GPU's peer in prompts: who computes its experts' rows there, and the memory that takes."""

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

import numpy as np

from strata_jax.config import LOOPBACK, KvType, ModelConfig, TierSettings
from strata_jax.weights.budget import MIB, StepSizes
from strata_jax.weights.plan import kv_value_bytes
from strata_jax.weights.prefill_ring import auto_room, min_rows, ring_slots

PEER_STREAM = 0.35
"""Share of the host's experts that a peer streams unless told otherwise. Source: reference-engine.md,
section 3.4: 0.25 to 0.5 were nearly the same there."""
PEER_ATTENTION = 0.5
"""Share of a tile's queries that a peer takes unless told otherwise. Source: the same section."""
_GRAIN = 64
"""Rows come in blocks of so many, and kernels of tiles want more than one (`kMostWindowRows`)."""
_CACHE_GRAIN = 256
"""Cells; at least twice the grain of `num_cells` in model/state.py."""
_INDEX_GROUP = 16
"""Blocks whose pooled keys lie side by side."""
_SCALE_VALUES = 64
"""`kScaleValues` of ffi/common/cells.h."""
_ATTEND_SLOTS = 128
"""`kAttendSlots` of ffi/cuda/ops/qsa_attend.h."""
_ATTEND_TILE = 32
"""`kAttendTile` there."""
_ENTRIES_OF_TILE = 64
"""`kTileRows` of ffi/cuda/ops/expert_groups.h."""


class PeerWay(enum.Enum):
    """What becomes of rows of a tile whose experts the peer has."""

    COMPUTES = "the peer computes them, beside the primary"
    READ = "the primary reads the experts where they lie"
    STREAMED = "experts come to the primary through its ring"
    WINDOWS = "the peer computes with the kernels of windows, which is slow"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PeerPart:
    """The peer's part in prompts."""

    way: PeerWay
    is_far: bool = False
    """Whether the primary's kernels cannot read the peer's memory."""
    share: float = 0.0
    """Of the host's experts, that the peer streams over its own link and computes."""
    ring_slots: int = 0
    """Through which it does; 0 = it streams none."""
    attention: Mapping[str, float] | None = None
    """`PeerAttentionSizes` of ffi/cuda/peer_attention.h; None = it takes no rows of attention."""

    @property
    def attention_rows(self) -> int:
        """Of the largest program's rows, those whose attention is the peer's."""
        if self.attention is None:
            return 0
        return int(self.attention["max_rows"] * self.attention["share"]) // _GRAIN * _GRAIN

    def most_rows(self, steps: StepSizes) -> int:
        """Most rows that the peer computes at once by the kernels of windows."""
        if self.way == PeerWay.WINDOWS:
            return max(steps.chunk_rows, steps.window_rows)
        return steps.window_rows

    def ring_min_rows(self, steps: StepSizes) -> int:
        """Live rows from which on a program streams: all, where the ring is the only way to experts."""
        return 1 if self.is_far and self.way == PeerWay.STREAMED else min_rows(steps)

    def passing(self, host: np.ndarray, peer: np.ndarray) -> np.ndarray:
        """Which experts the primary streams, bool [L, E].

        Args:
            host: bool [L, E], those in the host's memory.
            peer: the same of the peer's.
        """
        if self.way == PeerWay.STREAMED:
            return host | peer
        return host & ~taken(host, self.share)

    def to_json(self) -> dict[str, Any]:
        """In strings and numbers."""
        return {
            "way": self.way.name.lower(),
            "stream_share": self.share,
            "ring_slots": self.ring_slots,
            "attention_rows": self.attention_rows,
        }


def peer_part(
    settings: TierSettings, is_reached: bool, has_expert_tiles: bool
) -> tuple[PeerPart, tuple[str, ...]]:
    """The part of the peer that the settings name, on a GPU, and what a user should know of it.

    Args:
        settings: with a peer.
        is_reached: whether kernels of either device reach the other's memory.
        has_expert_tiles: whether tiles of the model's experts go through matrix units.
    """
    is_loopback, share = settings.peer_device == LOOPBACK, settings.peer_stream
    if is_reached and has_expert_tiles and not (is_loopback and share is None):
        share = PEER_STREAM if share is None else share
        share = 0.0 if settings.prefill_ring == 0 else share
        return PeerPart(way=PeerWay.COMPUTES, share=share), ()
    idle = "" if share is None else f"--peer_stream={share:g}: no effect, "
    if is_loopback or (is_reached and not has_expert_tiles):
        why = f"{idle}unquantised experts are computed where they lie"
        return PeerPart(way=PeerWay.READ), (why,) if idle else ()
    if has_expert_tiles and settings.prefill_ring != 0:
        why = (
            "peer: in prompts its experts are copied to the first GPU through RAM; it computes none of "
            "their rows, which are as large as the experts and would take the same link"
        )
        return PeerPart(way=PeerWay.STREAMED, is_far=True), (idle + why,)
    slow = "peer: it computes its experts' rows of prompts a few at a time, which is slow"
    return PeerPart(way=PeerWay.WINDOWS, is_far=True), (idle + slow,)


def taken(host: np.ndarray, share: float) -> np.ndarray:
    """Which of the host's experts the peer streams, bool [L, E]: a share of each layer, spread evenly.

    The same as `PeerShare` of ffi/cuda/peer_tiles.h.
    """
    before = np.floor((np.cumsum(host, axis=1) - host) * share)
    return host & (np.floor(np.cumsum(host, axis=1) * share) > before)


def tiles_bytes(config: ModelConfig, rows: int) -> int:
    """Upper bound of what the peer needs to compute rows of a chunk: `PeerTilesBytes` of peer_tiles.h."""
    entries, experts = rows * config.num_experts_active, config.num_experts
    tables = 4 * entries + 12 * (entries // _ENTRIES_OF_TILE + experts) + 24 * experts + 4096
    return tables + _quantised(rows, config.hidden) + _quantised(entries, config.expert_width)


def with_ring(
    part: PeerPart, host: np.ndarray, slot_bytes: int, memory_bytes: int | None
) -> tuple[PeerPart, tuple[str, ...]]:
    """The part with a ring for its share, or without one and a line where there is no room.

    Args:
        part: of a peer that computes.
        host: bool [L, E], experts in the host's memory.
        slot_bytes: of the largest expert.
        memory_bytes: of the peer.
    """
    mine = taken(host, part.share)
    slots = ring_slots(None, mine, slot_bytes, auto_room(memory_bytes, None))
    if slots or not mine.any():
        return dataclasses.replace(part, ring_slots=slots), ()
    why = "peer: no room for a ring to stream experts through; the first GPU streams all"
    return dataclasses.replace(part, share=0.0), (why,)


def attention_sizes(
    settings: TierSettings,
    config: ModelConfig,
    steps: StepSizes,
    context: tuple[int, KvType],
    *,
    is_reached: bool,
) -> tuple[dict[str, float] | None, tuple[str, ...]]:
    """What the peer's part of attention has at most, and what a user should know of it; None without one.

    Args:
        settings: with a peer.
        config: of the model.
        steps: sizes of the compiled programs.
        context: tokens at most, and how they are cached.
        is_reached: whether kernels of either device reach the other's memory.
    """
    share, is_loopback = settings.peer_attention, settings.peer_device == LOOPBACK
    if share == 0 or (is_loopback and share is None):
        return None, ()
    name = "--peer_attention" if share is None else f"--peer_attention={share:g}"
    if not is_reached:
        return None, (f"{name}: 0, for the peer would need keys and values through RAM",)
    if not config.index_budget:
        why = f"{name}: 0, the model has no sparse attention"
        return None, () if share is None else (why,)
    share = PEER_ATTENTION if share is None else share
    if steps.chunk_rows * share < 2 * _GRAIN:
        return None, (f"{name}: 0, that share of a chunk of {steps.chunk_rows} rows is too little",)
    max_context, kv = context
    cells = max_context + steps.chunk_rows + _CACHE_GRAIN
    return {
        "share": share,
        "max_rows": steps.chunk_rows,
        "num_cells": cells,
        "num_heads": config.num_heads,
        "num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "cell_bytes": 2 * config.num_kv_heads * config.head_dim * kv_value_bytes(kv),
        "has_scales": kv == "int8",
        "index_heads": config.index_heads,
        "index_dim": config.index_dim,
        "num_groups": cells // config.index_ratio // _INDEX_GROUP + 1,
        "ratio": config.index_ratio,
        "num_blocks": config.index_budget // config.index_ratio,
    }, ()


def attention_bytes(sizes: Mapping[str, float] | None) -> int:
    """Upper bound of what that takes of the peer: `PeerAttentionBytes` of peer_attention.h."""
    if sizes is None:
        return 0
    s = {name: int(size) for name, size in sizes.items() if name != "share"}
    rows = int(s["max_rows"] * sizes["share"])
    scales = 8 * s["num_kv_heads"] * -(-s["head_dim"] // _SCALE_VALUES) if s["has_scales"] else 0
    row_scores = 4 * _INDEX_GROUP * s["num_groups"]
    scores = min(rows * row_scores, max(64 * row_scores, 128 * MIB))
    slots = min(_ATTEND_SLOTS, (s["num_blocks"] + 1) * s["ratio"] // _ATTEND_TILE + 2)
    sums = 4 * min(rows, 16) * slots * s["num_heads"] * (s["head_dim"] + 2)
    keys = 4 * _INDEX_GROUP * s["num_groups"] * s["index_dim"]
    per_row = 4 * (s["index_heads"] * s["index_dim"] + s["num_blocks"])
    cells = s["num_cells"] * (s["cell_bytes"] + scales)
    return rows * per_row + keys + scores + cells + sums + 8192


def _quantised(rows: int, values: int) -> int:
    """Of quantised rows: `QuantizedRows::Bytes` of ffi/cuda/tile_rows.h."""
    return -(-rows // 128) * 128 * -(-values // 128) * 128 * 11 // 8
