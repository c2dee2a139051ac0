"""Need against have of each memory, with the flags and values that would make it fit."""

import bisect
import dataclasses
from collections.abc import Callable

import numpy as np

from strata_jax.config import TierSettings
from strata_jax.weights.budget import GIB, MIB, HostMemory
from strata_jax.weights.placement import (
    ArenaBudget,
    Placement,
    PlacementRequest,
    Tier,
    place,
    slot_bytes,
)
from strata_jax.weights.tier_needs import DRAFT_XLA, Need

_LEAST_CONTEXT = 256
"""Shorter contexts are no advice."""
_OTHER_TABLE = "--ple_io=direct"
_NO_RING = "--prefill_ring=0"


class Advisor:
    """Works out what to change. Every value given is one with which the memory would do."""

    def __init__(
        self,
        settings: TierSettings,
        max_context: int,
        context_bytes: Callable[[int], int],
        free: tuple[int | None, int | None] | None,
        would_fit: Callable[[str, TierSettings], bool] | None = None,
    ) -> None:
        """Takes the settings, and how many bytes a context of so many tokens costs.

        `free` are the bytes of the primary and of the peer that no flag can raise; None where both
        are emulated in RAM. `would_fit` plans again with other settings and says whether the memory of
        that name would do then; None: nothing is advised that only such a plan can tell.
        """
        self.settings = settings
        self.max_context = max_context
        self.context_bytes = context_bytes
        self.emulated = free is None
        self.free = free or (None, None)
        self.would_fit = would_fit

    def primary(self, request: PlacementRequest, parts: dict[str, int]) -> Need:
        """The primary device's."""
        assert request.primary is not None
        have = request.primary.memory_bytes
        bound_by = self._bound_by("device_memory_mib", have)
        need = Need(name="primary", parts=parts, have_bytes=have, bound_by=bound_by)
        if need.fits:
            return need
        assert have is not None
        excess = need.need_bytes - have
        reserve = parts["reserve"] if "vram_reserve_mib" in self.settings.given else 0
        # An explicit count takes the place of a reserve that nobody asked for.
        by_count = parts["experts"] + parts["reserve"] - reserve
        advice = self._shorter(excess)
        if excess <= parts.get("draft", 0) + parts.get(DRAFT_XLA, 0):
            advice.append("--mtp=off")
        ring = parts.get("prefill ring", 0)
        if excess <= ring:
            advice.append(_NO_RING)
        if excess <= by_count:
            advice.append(self._fewer(request, by_count - excess))
        if 0 < excess <= reserve:
            advice.append(f"--vram_reserve_mib={(reserve - excess) // MIB}")
        if 0 < excess <= parts["staging"]:
            advice.append("--pcie_frac=0" if self.emulated else "--adapt_swaps=0")
        least = self._least_memory(need.need_bytes, parts["reserve"], "vram_reserve_mib")
        larger = self._more("device_memory_mib", least, self.free[0])
        if not advice:
            cuts = {self._no_cache(): by_count + ring, "--vram_reserve_mib=0": reserve}
            if not larger:
                whole = (self.free[0] or 0) // MIB
                cuts[f"--device_memory_mib={whole}"] = whole * MIB - have
            advice += self._together(excess, cuts)
        advice += larger
        return dataclasses.replace(need, advice=tuple(advice))

    def peer(self, request: PlacementRequest, parts: dict[str, int]) -> Need:
        """The peer device's."""
        assert request.peer is not None
        have = request.peer.memory_bytes
        bound_by = self._bound_by("peer_memory_mib", have)
        need = Need(name="peer", parts=parts, have_bytes=have, bound_by=bound_by)
        if need.fits:
            return need
        assert have is not None
        excess, reserve = need.need_bytes - have, parts["reserve"]
        least = self._least_memory(need.need_bytes, reserve, "peer_reserve_mib")
        advice = self._more("peer_memory_mib", least, self.free[1])
        if "peer_reserve_mib" in self.settings.given and excess <= reserve:
            advice.append(f"--peer_reserve_mib={(reserve - excess) // MIB}")
        if excess <= parts["attention"]:
            advice.append("--peer_attention=0")
        return dataclasses.replace(need, advice=(*advice, self._ringless("--peer_device=-1")))

    def host(
        self,
        request: PlacementRequest,
        parts: dict[str, int],
        memory: HostMemory,
        placement: Placement,
    ) -> Need:
        """RAM: what is in use by others may be given up, so only more than all of it is too much."""
        need = Need(
            name="host",
            parts=parts,
            have_bytes=memory.available_bytes,
            bound_by="free RAM",
            most_bytes=memory.total_bytes,
        )
        if need.fits:
            return need
        most = memory.total_bytes
        if self.emulated:
            advice = self._less_ram(need.need_bytes - most, request, parts, placement)
        else:
            advice = self._less_for_gpu(need)
        return dataclasses.replace(need, have_bytes=most, bound_by="all RAM", advice=tuple(advice))

    def _less_ram(
        self, excess: int, request: PlacementRequest, parts: dict[str, int], placement: Placement
    ) -> list[str]:
        """What of an emulated machine's RAM can be done without."""
        table = parts["n-gram table"]
        advice = self._shorter_in_ram(excess, request, placement)
        if excess <= table:
            advice.append(_OTHER_TABLE)
        advice += self._smaller_arena(request, placement, excess)
        if advice:
            return advice
        arenas = placement.primary_bytes + placement.peer_bytes
        return self._together(excess, {_OTHER_TABLE: table, self._no_cache(): arenas})

    def _less_for_gpu(self, need: Need) -> list[str]:
        """What a GPU's experts can do without in RAM: one of these, or else as many as it takes.

        Less of one thing there leaves room for another (experts, second copies of lent slots, pieces
        of the file), so what is enough is found by planning again.
        """
        cuts: list[dict[str, int | str]] = []
        if need.parts["n-gram table"]:
            cuts.append({"ple_io": "direct"})
        if self.settings.adapts():
            cuts.append({"adapt_swaps": 0})
            if self.settings.peer_adapt_swaps > 0:
                cuts[-1]["peer_adapt_swaps"] = 0
        if self.settings.prefill_ring != 0:
            cuts.append({"prefill_ring": 0})
        if "vram_reserve_mib" in self.settings.given and self.settings.vram_reserve_mib:
            cuts.append({"vram_reserve_mib": 0})
        alone = [cut for cut in cuts if self._is_enough(need.name, cut)]
        together = [
            dict(pair for cut in cuts[:count] for pair in cut.items())
            for count in range(2, len(cuts) + 1)
        ]
        found = alone or [cut for cut in together if self._is_enough(need.name, cut)][:1]
        return [" with ".join(f"--{name}={value}" for name, value in cut.items()) for cut in found]

    def _is_enough(self, name: str, cut: dict[str, int | str]) -> bool:
        changed = dataclasses.replace(self.settings, **cut)  # type: ignore[arg-type]
        return self.would_fit is not None and self.would_fit(name, changed)

    def locked(self, parts: dict[str, int]) -> Need:
        """What --host_ram_limit_gib bounds: everything page-locked or copied."""
        limit = self.settings.host_ram_limit_gib
        assert limit is not None
        need = Need(
            name="locked",
            parts=parts,
            have_bytes=int(limit * GIB),
            bound_by=f"--host_ram_limit_gib={limit:g}",
        )
        if need.fits:
            return need
        advice = [f"--host_ram_limit_gib={_ceil_hundredths(need.need_bytes)}"]
        if not self.emulated:
            advice += self._less_for_gpu(need)
        elif need.need_bytes - int(limit * GIB) <= parts["n-gram table"]:
            advice.append(_OTHER_TABLE)
        return dataclasses.replace(need, advice=tuple(advice))

    def _shorter(self, excess: int) -> list[str]:
        """The longest context with which `excess` bytes are no longer too much."""
        most = self.context_bytes(self.max_context) - excess
        tokens = bisect.bisect_right(range(self.max_context), most, key=self.context_bytes) - 1
        return [f"--max_context={tokens}"] if tokens >= _LEAST_CONTEXT else []

    def _shorter_in_ram(
        self, excess: int, request: PlacementRequest, placement: Placement
    ) -> list[str]:
        """The same where devices are emulated: auto would fill what becomes free with experts."""
        shorter = self._shorter(excess)
        if self.settings.expert_cache is not None or self.settings.device_memory_mib is None:
            return shorter
        return [f"{flag} with {self._fewer(request, placement.primary_bytes)}" for flag in shorter]

    def _fewer(self, request: PlacementRequest, room: int) -> str:
        """As many experts on the primary as `room` bytes hold.

        A count takes them in their order; it does not pass over large ones as auto does.
        """
        every = ArenaBudget(memory_bytes=None, exactly=request.expert_bytes.size)
        ends = _ends(place(dataclasses.replace(request, primary=every, peer=None)), Tier.PRIMARY)
        count = int((ends <= room).sum())
        return self._ringless(f"--expert_cache={count}") if count else self._no_cache()

    def _no_cache(self) -> str:
        both = self.settings.peer_device is not None  # a peer needs the primary's cache
        return self._ringless("--expert_cache=0" + (" with --peer_device=-1" if both else ""))

    def _ringless(self, flag: str) -> str:
        """A flag that takes experts from a GPU: a ring of a size that was asked for might be too small then."""
        has_ring = not self.emulated and self.settings.prefill_ring
        return f"{flag} with {_NO_RING}" if has_ring else flag

    def _together(self, excess: int, cuts: dict[str, int]) -> list[str]:
        """Where no flag alone would do: as many of `cuts` as needed, and then a shorter context."""
        chosen = []
        for flag, saved in cuts.items():
            if excess > 0 and saved > 0:
                chosen.append(flag)
                excess -= saved
        if excess > 0:
            shorter = self._shorter(excess)
            if not shorter:
                return []
            chosen = shorter + chosen
        return [" with ".join(chosen)]

    def _more(self, flag: str, least: int, free: int | None) -> list[str]:
        """A larger device, where it is only a flag that makes it small."""
        is_enough = free is None if self.emulated else free is not None and least * MIB <= free
        return [f"--{flag}={least}"] if is_enough else []

    def _smaller_arena(
        self, request: PlacementRequest, placement: Placement, excess: int
    ) -> list[str]:
        """How many experts less an emulated device must hold to save `excess` bytes of RAM."""
        on_peer = placement.peer_bytes > 0
        arena = placement.peer_bytes if on_peer else placement.primary_bytes
        if not self.emulated or excess > arena:
            return []
        if not on_peer:
            fewer = self._fewer(request, arena - excess)
            if self.settings.peer_device is not None and "peer_device" not in fewer:
                fewer += " with --peer_device=-1"  # it would take what the primary gives up
            return [fewer]
        count = int((_ends(placement, Tier.PEER) <= arena - excess).sum())
        return [f"--peer_slots={count}" if count else "--peer_device=-1"]

    def _bound_by(self, flag: str, have: int | None) -> str:
        value = getattr(self.settings, flag)
        if have is None:
            return "emulated in RAM"
        if value is not None and value * MIB == have:
            return f"--{flag}={value}"
        return "free RAM" if self.emulated else "free memory"

    def _least_memory(self, need: int, reserve: int, flag: str) -> int:
        """MiB of a device that holds `need`, of which `reserve` is the reserve at its old size."""
        if flag in self.settings.given or reserve == 0:
            return -(-need // MIB)
        without = need - reserve
        most = getattr(self.settings, flag) * MIB
        # The default reserve is an eighth of the memory, so what is needed is seven eighths of it.
        return -(-min(without * 8 // 7 + 1, without + most) // MIB)


def _ends(placement: Placement, tier: Tier) -> np.ndarray:
    """Where each slot of a device ends in its arena, in bytes."""
    held = placement.tiers == tier
    return placement.slots[held] + slot_bytes(placement.expert_bytes[held])


def _ceil_hundredths(count: int) -> str:
    return f"{-(-count * 100 // GIB) / 100:g}"
