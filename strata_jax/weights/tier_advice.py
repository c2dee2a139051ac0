"""Need against have of each memory, with the flags and values that would make it fit."""

import bisect
import dataclasses
from collections.abc import Callable

from strata_jax.config import ModelConfig, TierSettings
from strata_jax.weights.budget import GIB, MIB, HostMemory, shown
from strata_jax.weights.placement import Placement, PlacementRequest, Tier, place, slot_bytes
from strata_jax.weights.tier_needs import Need

_LEAST_CONTEXT = 256
"""Shorter contexts are no advice."""


class Advisor:
    """Works out what to change. Every value given is one with which the memory would do."""

    def __init__(
        self,
        settings: TierSettings,
        max_context: int,
        context_bytes: Callable[[int], int],
        emulated: bool,
    ) -> None:
        """Takes the settings, and how many bytes a context of so many tokens costs."""
        self.settings = settings
        self.max_context = max_context
        self.context_bytes = context_bytes
        self.emulated = emulated

    def primary(self, request: PlacementRequest, parts: dict[str, int]) -> Need:
        """The primary device's."""
        assert request.primary is not None
        have = request.primary.memory_bytes
        bound_by = self._bound_by("device_memory_mib", have)
        need = Need(name="primary", parts=parts, have_bytes=have, bound_by=bound_by)
        if need.fits:
            return need
        assert have is not None
        without = need.need_bytes - parts["experts"]
        advice = self._shorter(have - need.need_bytes)
        if without <= have:
            auto = dataclasses.replace(
                request.primary, exactly=None, at_most=request.primary.exactly
            )
            fits = place(dataclasses.replace(request, primary=auto, peer=None)).count(Tier.PRIMARY)
            advice.append(f"--expert_cache={fits}")
        elif parts["experts"] and not advice:
            advice += [f"{flag} with --expert_cache=0" for flag in self._shorter(have - without)]
        if "vram_reserve_mib" in self.settings.given and need.need_bytes - parts["reserve"] <= have:
            advice.append(
                f"--vram_reserve_mib={(have - need.need_bytes + parts['reserve']) // MIB}"
            )
        if self.settings.device_memory_mib is not None:
            least = self._least_memory(need.need_bytes, parts["reserve"], "vram_reserve_mib")
            advice.append(f"--device_memory_mib={least}")
        return dataclasses.replace(need, advice=tuple(advice))

    def peer(self, request: PlacementRequest, parts: dict[str, int]) -> Need:
        """The peer device's."""
        assert request.peer is not None
        have = request.peer.memory_bytes
        bound_by = self._bound_by("peer_memory_mib", have)
        need = Need(name="peer", parts=parts, have_bytes=have, bound_by=bound_by)
        if need.fits:
            return need
        least = self._least_memory(need.need_bytes, parts["reserve"], "peer_reserve_mib")
        return dataclasses.replace(need, advice=(f"--peer_memory_mib={least}", "--peer_device=-1"))

    def host(self, parts: dict[str, int], memory: HostMemory, placement: Placement) -> Need:
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
        advice = self._shorter(most - need.need_bytes) if "kv" in parts else []
        if need.need_bytes - parts["n-gram table"] <= most:
            advice += self._other_table(parts)
        if self.emulated:
            advice += self._smaller_arena(placement, need.need_bytes - most)
        return dataclasses.replace(need, have_bytes=most, bound_by="all RAM", advice=tuple(advice))

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
        if need.need_bytes - parts["n-gram table"] <= int(limit * GIB):
            advice += self._other_table(parts)
        return dataclasses.replace(need, advice=tuple(advice))

    def _shorter(self, free: int) -> list[str]:
        """The longest context with which `free` bytes, now below 0, are no longer missing."""
        if free >= 0:
            return []
        most = self.context_bytes(self.max_context) + free
        tokens = bisect.bisect_right(range(self.max_context), most, key=self.context_bytes) - 1
        return [f"--max_context={tokens}"] if tokens >= _LEAST_CONTEXT else []

    def _smaller_arena(self, placement: Placement, excess: int) -> list[str]:
        """How many experts less an emulated device must hold to save `excess` bytes of RAM."""
        tier, flag = (
            (Tier.PEER, "peer_slots") if placement.peer_bytes else (Tier.PRIMARY, "expert_cache")
        )
        held = placement.tiers == tier
        ends = placement.slots[held] + slot_bytes(placement.expert_bytes[held])
        arena = int(ends.max(initial=0))
        count = int((ends <= arena - excess).sum())
        return [f"--{flag}={count}"] if count else []

    def _other_table(self, parts: dict[str, int]) -> list[str]:
        return ["--ple_io=direct"] if parts["n-gram table"] else []

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


def placement_notes(
    settings: TierSettings, platform: str, config: ModelConfig, placement: Placement
) -> list[str]:
    """What a reader of a placement might miss: tiers that are on and hold little or nothing."""
    notes = []
    cache_is_on, emulated = settings.cache_is_on(platform), platform == "cpu"
    count, active = placement.count(Tier.PRIMARY), config.num_experts_active
    if cache_is_on and count == 0:
        notes.append("expert cache: on, but no expert fits beside what the model needs")
    elif cache_is_on and count < active:
        notes.append(
            f"expert cache: {count} experts are fewer than the {active} a token uses in one layer"
        )
    if settings.peer_device is not None and placement.count(Tier.PEER) == 0:
        all_on_primary = count == placement.tiers.size
        why = "the primary holds all experts" if all_on_primary else "nothing fits"
        notes.append(f"peer: on, but it holds no expert: {why}")
    host_bytes = placement.total_bytes(Tier.HOST)
    if host_bytes and (not emulated or placement.locked_bytes or cache_is_on):
        share = 100 * placement.locked_bytes / host_bytes
        cost = "" if share == 100 else "; the rest may be paged out"
        cost += "" if share == 100 or emulated else " and is copied slower"
        notes.append(f"host tier: {shown(host_bytes)}, {int(share)} % to be page-locked{cost}")
    return notes


def _ceil_hundredths(count: int) -> str:
    return f"{-(-count * 100 // GIB) / 100:g}"
