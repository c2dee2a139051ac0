"""Which tier every expert begins in, and which bytes of an arena it fills: pure and deterministic.

What a device must have beside experts (weights, caches, workspaces of the largest tile, window and
context, a reserve) is `ArenaBudget.reserved_bytes`: it is taken first, experts get what is left.

Order. With a profile its ranked pairs come first, in its order. Pairs without a rank follow

- for the primary, the host's RAM and page-locking in rounds over the layers: expert 0 of every layer,
  then expert 1 of every layer. So N experts are N / L in each layer, and every slot size is there for
  adapting. Source: reference-engine.md, sections 2.6 and 2.8 ("expert-major").
- for the peer by layer, then expert (design.md): a peer needs no profile.

Auto sizing stops behind the ranked pairs unless `fill_all`; a count that was asked for does not.
"""

import dataclasses
import enum
from collections.abc import Sequence

import numpy as np

ALIGNMENT = 256
"""Bytes; slots begin at multiples of it and are that much long."""


class Tier(enum.IntEnum):
    """Where an expert's bytes are (values of `Placement.tiers`)."""

    HOST = 0
    """In host memory or its page cache: mapped, perhaps page-locked."""
    PRIMARY = 1
    PEER = 2
    FILE = 3
    """In the file; read into host memory when it is used."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArenaBudget:
    """What one device can give to experts."""

    memory_bytes: int | None
    """Memory for everything; None = not bounded."""
    reserved_bytes: int = 0
    """Taken before the first expert."""
    exactly: int | None = None
    """Experts that somebody asked for by number: placed though they may not fit, which is for the
    plan to say. Never fewer, never overruled."""
    at_most: int | None = None
    """Bound on auto sizing; None = as many as fit."""

    @property
    def room_bytes(self) -> int | None:
        """What is left for slots; None = no bound."""
        if self.memory_bytes is None:
            return None
        return max(0, self.memory_bytes - self.reserved_bytes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlacementRequest:
    """Everything the placement depends on."""

    expert_bytes: np.ndarray
    """int64 [L, E]: bytes of each expert of the trunk."""
    ranking: Sequence[tuple[int, int]] | None = None
    """(layer, expert) pairs of a profile, hottest first, none twice; None = no profile."""
    primary: ArenaBudget | None = None
    """None = no slots on the primary."""
    peer: ArenaBudget | None = None
    fill_all: bool = False
    """Auto sizing goes on behind the ranked pairs."""
    resident_bytes: int | None = None
    """Expert bytes that stay in RAM, the hottest; the rest is in the file tier. None = all."""
    lock_bytes: int = 0
    """Bytes of host experts to page-lock, the hottest first."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Placement:
    """Tier and slot of every expert. Arrays are read-only."""

    expert_bytes: np.ndarray
    """int64 [L, E], as in the request."""
    tiers: np.ndarray
    """uint8 [L, E], values of `Tier`."""
    slots: np.ndarray
    """int64 [L, E]: offset in the arena of the expert's device in bytes, -1 without one."""
    locked: np.ndarray
    """bool [L, E]: host experts whose bytes are to be page-locked."""
    primary_bytes: int
    """Size of the primary's arena: its slots end where it ends."""
    peer_bytes: int
    notes: tuple[str, ...]

    def count(self, tier: Tier) -> int:
        """Experts in a tier."""
        return int((self.tiers == tier).sum())

    def total_bytes(self, tier: Tier) -> int:
        """Bytes of the experts in a tier, without what aligns slots."""
        return int(self.expert_bytes[self.tiers == tier].sum())

    @property
    def locked_bytes(self) -> int:
        """Bytes of the host experts to be page-locked."""
        return int(self.expert_bytes[self.locked].sum())


def file_stage_bytes(tiers: np.ndarray, expert_bytes: np.ndarray) -> int:
    """Page-locked bytes in which a GPU's tiles find experts of the file tier: two layers' at a time.

    Args:
        tiers: of every expert, [L, E].
        expert_bytes: of every expert as panels, [L, E].
    """
    by_layer = np.where(tiers == Tier.FILE, expert_bytes, 0).sum(axis=1)
    return 2 * int(by_layer.max())


def slot_bytes(expert_bytes: np.ndarray) -> np.ndarray:
    """Bytes of the slots for experts of given bytes."""
    return -(-expert_bytes // ALIGNMENT) * ALIGNMENT


def round_order(num_layers: int, num_experts: int) -> np.ndarray:
    """All experts in rounds over the layers, int64 [L * E], each as layer * E + expert."""
    return np.arange(num_layers * num_experts).reshape(num_layers, num_experts).T.reshape(-1)


def place(request: PlacementRequest) -> Placement:
    """Gives every expert one tier, and a slot to those on a device.

    The primary chooses first; the peer holds what the primary does not. Equal requests give equal
    placements, on every machine. An expert too large for what is left of a device is passed over for
    smaller ones behind it.
    """
    draft = _Draft(request)
    L, E = request.expert_bytes.shape
    primary_bytes = draft.fill(Tier.PRIMARY, request.primary, round_order(L, E))
    peer_bytes = draft.fill(Tier.PEER, request.peer, np.arange(L * E))
    locked = draft.split_host(round_order(L, E))
    return Placement(
        expert_bytes=_fixed(draft.size, (L, E)),
        tiers=_fixed(draft.tiers, (L, E)),
        slots=_fixed(draft.slots, (L, E)),
        locked=_fixed(locked, (L, E)),
        primary_bytes=primary_bytes,
        peer_bytes=peer_bytes,
        notes=tuple(draft.notes),
    )


class _Draft:
    """A placement in the making; experts are flat, layer * E + expert."""

    def __init__(self, request: PlacementRequest) -> None:
        L, E = request.expert_bytes.shape
        self.request = request
        self.size = request.expert_bytes.astype(np.int64).reshape(-1)
        self.tiers = np.full(L * E, Tier.HOST, np.uint8)
        self.slots = np.full(L * E, -1, np.int64)
        self.notes: list[str] = []
        pairs = np.asarray(request.ranking or (), np.int64).reshape(-1, 2)
        assert (pairs >= 0).all(), "the profile was checked against the model"
        assert (pairs < (L, E)).all(), "the profile was checked against the model"
        self.ranked = pairs[:, 0] * E + pairs[:, 1]
        assert len(np.unique(self.ranked)) == len(pairs), "a profile ranks an expert once"

    def fill(self, tier: Tier, budget: ArenaBudget | None, unranked: np.ndarray) -> int:
        """Fills a device's slots; returns the size of its arena in bytes."""
        if budget is None:
            return 0
        request = self.request
        counted = budget.exactly is not None or budget.at_most is not None
        ranked_only = request.ranking is not None and not (request.fill_all or counted)
        order = self.ranked if ranked_only else self._complete(unranked)
        free = order[self.tiers[order] == Tier.HOST]
        sizes = slot_bytes(self.size)
        chosen = free[: budget.exactly] if budget.exactly is not None else _fit(free, sizes, budget)
        self.tiers[chosen] = tier
        ends = np.cumsum(sizes[chosen])
        self.slots[chosen] = ends - sizes[chosen]
        self.notes += _notes(tier, budget, len(chosen), len(free))
        unplaced = int((self.tiers == Tier.HOST).sum())
        if ranked_only and len(chosen) == len(free) and unplaced:
            self.notes.append(
                f"{tier.name.lower()}: all {len(chosen)} experts that the profile ranks and no other "
                "device holds; --expert_cache_fill_all goes on behind them"
            )
        return int(ends[-1]) if len(ends) else 0

    def split_host(self, unranked: np.ndarray) -> np.ndarray:
        """Moves what shall not stay in RAM to the file tier; returns which of the rest to lock."""
        order = self._complete(unranked)
        host = order[self.tiers[order] == Tier.HOST]
        used = np.cumsum(self.size[host])
        if self.request.resident_bytes is not None:
            stays = used <= self.request.resident_bytes
            self.tiers[host[~stays]] = Tier.FILE
            host, used = host[stays], used[stays]
        locked = np.zeros(len(self.tiers), bool)
        locked[host[used <= self.request.lock_bytes]] = True
        return locked

    def _complete(self, unranked: np.ndarray) -> np.ndarray:
        missing = np.ones(len(self.tiers), bool)
        missing[self.ranked] = False
        return np.concatenate([self.ranked, unranked[missing[unranked]]])


def _fit(free: np.ndarray, sizes: np.ndarray, budget: ArenaBudget) -> np.ndarray:
    """As many of `free` as fit, in its order."""
    most = len(free) if budget.at_most is None else budget.at_most
    room = budget.room_bytes
    if room is None:
        return free[:most]
    chosen = []
    smallest = int(sizes[free].min()) if len(free) else 0
    for expert, size in zip(free.tolist(), sizes[free].tolist()):
        if room < smallest or len(chosen) == most:
            break
        if size <= room:
            chosen.append(expert)
            room -= size
    return np.asarray(chosen, np.int64)


def _notes(tier: Tier, budget: ArenaBudget, count: int, free: int) -> list[str]:
    name = tier.name.lower()
    if budget.exactly is not None and budget.exactly > count:
        return [f"{name}: {budget.exactly} experts asked for, the model has {count}: it holds all"]
    if budget.at_most is not None and count < min(budget.at_most, free):
        return [f"{name}: {count} of the {budget.at_most} experts asked for fit"]
    return []


def _fixed(array: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    array = array.reshape(shape)
    array.flags.writeable = False
    return array
