"""What prompts take of a GPU: the tiles of a chunk, a ring for experts, and slots that they borrow.

Where not every expert has a slot, memory is short, and what only prompts need lies where experts lie
between them (`ffi/cuda/lent_slots.h`): in the last slots of the primary, those of the lowest ranked experts.
These have a second copy in page-locked RAM, are streamed like the host's while a prompt is read, and take no
part in swaps. A ring is borrowed so unless a count of experts leaves room for it; what experts need while a
chunk is computed is borrowed where that makes larger chunks possible. Bits depend on none of this.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np

from strata_jax.config import ModelConfig, TierSettings
from strata_jax.errors import CapacityError
from strata_jax.weights.budget import (
    CHUNK_SHARE,
    MOST_AUTO_CHUNK,
    StepSizes,
    chunk_bytes,
    shown,
)
from strata_jax.weights.peer_prompts import PeerPart
from strata_jax.weights.placement import ALIGNMENT, ArenaBudget, Placement, Tier, slot_bytes
from strata_jax.weights.prefill_ring import auto_room, least_slots, ring_slots

_LENT_SHARE = 2
"""Of the primary's slots prompts borrow at most this part, and second copies take this part of the RAM."""
_PADDING = 128
"""Of rows and values of a tile's products (ffi/cuda/tile_rows.h), and of a workspace's parts."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptPlan:
    """What a GPU's prompts need beside the workspace of a tile."""

    ring_slots: int = 0
    """That experts are streamed through; 0 = none."""
    owned_bytes: int = 0
    """Memory of their own."""
    lent_bytes: int = 0
    """The end of the primary's slots, which is borrowed."""
    scratch_bytes: int = 0
    """The last of these, for the experts of programs of more than a tile."""

    def lent_experts(self, placement: Placement) -> np.ndarray:
        """Which experts' slots are borrowed, bool [L, E]."""
        ends = placement.slots + slot_bytes(placement.expert_bytes)
        is_there = placement.tiers == Tier.PRIMARY
        return is_there & (ends > placement.primary_bytes - self.lent_bytes)

    def home_bytes(self, placement: Placement) -> int:
        """Page-locked RAM for second copies of such experts."""
        return int(slot_bytes(placement.expert_bytes)[self.lent_experts(placement)].sum())

    def notes(
        self, settings: TierSettings, part: PeerPart | None, placement: Placement
    ) -> list[str]:
        """What the user should know, a line each."""
        is_asked = settings.prefill_ring is not None
        if self.ring_slots == 0 and not is_asked and streamed_experts(part, placement).any():
            return [
                "prompts: no room for a ring to stream experts through; they are read over the link "
                "(--prefill_ring)"
            ]
        if not self.lent_bytes:
            return []
        parts = {
            f"a ring of {self.ring_slots}": self.lent_bytes - self.scratch_bytes,
            "a chunk's experts": self.scratch_bytes,
        }
        told = ", ".join(f"{shown(size)} for {name}" for name, size in parts.items() if size)
        return [
            f"prompts borrow the slots of {int(self.lent_experts(placement).sum())} experts ({told}), which "
            "are filled again before the first window and do not move"
        ]


def streamed_experts(part: PeerPart | None, placement: Placement) -> np.ndarray:
    """Which experts the primary streams in prompts, bool [L, E]; `part` is the peer's, if there is one."""
    away = placement.tiers == Tier.HOST
    return away if part is None else part.passing(away, placement.tiers == Tier.PEER)


def scratch_bytes(config: ModelConfig, steps: StepSizes) -> int:
    """What the experts of a chunk need while they are computed.

    At least `ExpertFfnTilesWorkspace` (ffi/cuda/ops/expert_ffn_tiles.cu): entries in order, their rows'
    codes and scales before and between the products, and a result row of each.
    """
    rows, experts = steps.chunk_rows, config.num_experts
    entries = rows * config.num_experts_active
    hidden = max(config.expert_width, config.shared_width)
    lists = 4 * entries + 24 * experts + 12 * (entries // 64 + experts) + 4
    inputs = _up(rows) * _up(config.hidden) * 11 // 8
    between = _up(entries + rows) * _up(hidden) * 11 // 8
    results = 4 * (entries + rows) * _up(config.hidden)
    return _up(lists + inputs + between + results + 16 * _PADDING, ALIGNMENT)


def _up(count: int, step: int = _PADDING) -> int:
    return -(-count // step) * step


def chunk_choices(
    config: ModelConfig, asked: StepSizes, own: StepSizes, memory_bytes: int | None
) -> Iterator[StepSizes]:
    """Chunks to try where slots can be borrowed, the best first; the last one borrows nothing.

    Args:
        config: of the model.
        asked: what flags or an earlier plan say.
        own: the chunk that needs nobody's slots.
        memory_bytes: of the GPU.
    """
    if asked.lends is None and memory_bytes is not None and not own.all_logits:
        tiles = [own.chunk_rows // own.tile_rows]
        if asked.chunk_tiles is None:
            while 2 * tiles[0] * own.tile_rows <= MOST_AUTO_CHUNK:
                tiles.insert(0, 2 * tiles[0])
        most = memory_bytes // CHUNK_SHARE
        for count in tiles:
            steps = dataclasses.replace(own, chunk_tiles=count, lends=False)
            lent = dataclasses.replace(steps, lends=True)
            if count > 1 and chunk_bytes(config, steps) > most >= chunk_bytes(config, lent):
                yield lent
    yield dataclasses.replace(own, lends=bool(asked.lends))


def plan_prompts(
    config: ModelConfig,
    settings: TierSettings,
    part: PeerPart | None,
    steps: StepSizes,
    primary: ArenaBudget,
    placement: Placement,
    *,
    ram_bytes: int,
    is_certain: bool = False,
) -> PromptPlan | None:
    """What prompts need, and whose memory that is; None where the chunk is not to be had so.

    Args:
        config: of the model.
        settings: of the tiers.
        part: the peer's in prompts, if there is one.
        steps: sizes of the programs.
        primary: memory of the GPU.
        placement: where experts are.
        ram_bytes: page-locked RAM that is to be had.
        is_certain: an earlier plan had the chunk, perhaps with a little more memory.

    Raises:
        UsageError: for a ring that holds too little of a layer.
        CapacityError: for a certain chunk whose room is gone.
    """
    away = streamed_experts(part, placement)
    if not away.any() and not (is_certain and steps.lends):
        return None if steps.lends else PromptPlan()
    size = int(slot_bytes(placement.expert_bytes).max())
    scratch = scratch_bytes(config, steps) if steps.lends else 0
    away = away | PromptPlan(lent_bytes=scratch).lent_experts(placement)
    counted, left = settings.expert_cache is not None, primary.room_bytes
    if counted and left is not None:
        left -= placement.primary_bytes  # which otherwise give way
    room = auto_room(primary.memory_bytes, left)
    slots = ring_slots(settings.prefill_ring, away, size, room)
    is_only_way = part is not None and part.is_far
    if is_only_way:
        slots = max(slots, least_slots(away))
    own = PromptPlan(ring_slots=slots, owned_bytes=slots * size)
    if is_only_way and not scratch:
        return own
    if counted and left is not None and not scratch and slots * size <= max(left, 0):
        return own
    share = 1 if is_certain else _LENT_SHARE
    most = placement.primary_bytes // share
    room = min(auto_room(primary.memory_bytes, None), most - scratch)
    slots = ring_slots(settings.prefill_ring, away, size, room)
    lent = slots * size + scratch
    found = PromptPlan(ring_slots=slots, lent_bytes=lent, scratch_bytes=scratch)
    if slots and lent <= most and found.home_bytes(placement) <= ram_bytes // share:
        return found
    if is_certain and steps.lends:
        raise CapacityError(
            f"plan: a chunk of {steps.chunk_rows} rows has no room any more; ask again, or choose less with "
            "--prefill"
        )
    return None if steps.lends else own
