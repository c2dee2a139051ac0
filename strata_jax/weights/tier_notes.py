"""What a plan tells beside its figures: where things are, and what is on and holds or does little."""

from collections.abc import Sequence

from strata_jax.config import LOOPBACK, ModelConfig, TierSettings
from strata_jax.weights.budget import reserve_bytes, shown
from strata_jax.weights.placement import Placement, Tier
from strata_jax.weights.tier_needs import Need

_FOR_MISSES = ("adapt_every", "adapt_swaps", "adapt_decay", "peer_adapt_swaps", "pcie_frac")
"""Flags about experts that no device holds."""


def device_notes(
    settings: TierSettings, platform: str, needs: Sequence[Need], placement: Placement
) -> list[str]:
    """Which number is which device, what it holds and what stays free there."""
    devices = {
        "primary": (0, Tier.PRIMARY, "vram_reserve_mib", settings.cache_is_on(platform)),
        "peer": (_peer_number(settings, platform), Tier.PEER, "peer_reserve_mib", True),
    }
    notes = []
    for need in needs:
        number, tier, reserve, is_on = devices.get(need.name, (None, Tier.HOST, "", False))
        if not is_on:
            continue
        where = ", emulated in RAM" if platform == "cpu" else ""
        if need.name == "peer" and number == 0:
            where = f" ({LOOPBACK})"
        line = f"device {number}, the {need.name}{where}: {placement.count(tier)} experts"
        line += f" in {shown(need.parts['experts'])}"
        if need.have_bytes is not None and need.fits:
            free = shown(need.have_bytes - need.need_bytes)
            line += f"; {free} of {shown(need.have_bytes)} stay free (--{reserve})"
        notes.append(line)
    return notes


def _peer_number(settings: TierSettings, platform: str) -> int | None:
    """Of the peer's device: a loopback one is on the primary's, and on the CPU the emulated one."""
    if settings.peer_device == LOOPBACK:
        return 1 if platform == "cpu" else 0
    return settings.peer_device


def placement_notes(
    settings: TierSettings, platform: str, config: ModelConfig, placement: Placement
) -> list[str]:
    """What a reader of a placement might miss: tiers that are on and hold little or nothing."""
    notes = []
    cache_is_on = settings.cache_is_on(platform)
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
    notes += _nothing_to_swap(settings, placement) if cache_is_on else []
    if placement.count(Tier.HOST):
        notes += _host_notes(settings, platform, placement)
    return notes


def little_left(settings: TierSettings, primary: Need) -> list[str]:
    """A count that was asked for may eat into the usual reserve, but not in silence."""
    asked, have = settings.expert_cache, primary.have_bytes
    if not asked or not primary.fits or have is None or primary.parts["reserve"]:
        return []
    left = have - primary.need_bytes
    usual = reserve_bytes(settings.vram_reserve_mib, False, have)
    if left >= usual:
        return []
    return [
        f"primary: {shown(left)} stay free, auto would leave {shown(usual)}; kept as "
        f"asked (--expert_cache={asked})"
    ]


def _host_notes(settings: TierSettings, platform: str, placement: Placement) -> list[str]:
    """How the host's experts lie in RAM, and who computes them."""
    emulated, cache_is_on = platform == "cpu", settings.cache_is_on(platform)
    size = placement.total_bytes(Tier.HOST)
    line = f"host tier: {shown(size)}, "
    if emulated and placement.locked_bytes == 0:
        why = (
            "nothing may be locked (ulimit -l, free RAM)" if cache_is_on else "nothing copies them"
        )
        if settings.host_ram_limit_gib is not None:
            why = (
                f"--host_ram_limit_gib={settings.host_ram_limit_gib:g} leaves no room to lock them"
            )
        line += f"mapped, not page-locked: {why}"
        if settings.host_ram_limit_gib is None and not cache_is_on:
            line += "; --host_ram_limit_gib=N locks"
    else:
        share = 100 * placement.locked_bytes / size
        line += f"{int(share)} % to be page-locked"
        line += "" if share == 100 else "; the rest may be paged out"
        line += "" if share == 100 or emulated else " and is copied slower"
    notes = [line]
    if emulated and settings.pool_workers == 0 and cache_is_on:
        notes.append("--pool_workers=0: on the CPU the ops' own threads compute the host's experts")
    if emulated and settings.pcie_frac is None and cache_is_on:
        notes.append("--pcie_frac=auto: 0 on the CPU, missed experts are read where they lie")
    return notes


def _nothing_to_swap(settings: TierSettings, placement: Placement) -> list[str]:
    """Flags and tiers that wait in vain for an expert that no device holds."""
    on_peer = placement.tiers == Tier.PEER
    elsewhere = ~on_peer & (placement.tiers != Tier.PRIMARY)
    if not elsewhere.any():
        idle = ", ".join(f"--{name}" for name in _FOR_MISSES if name in settings.given)
        return [f"{idle}: no effect, devices hold all experts"] if idle else []
    swaps = settings.adapt_swaps if settings.peer_adapt_swaps == -1 else settings.peer_adapt_swaps
    if not on_peer.any() or swaps == 0 or (on_peer.any(axis=1) & elsewhere.any(axis=1)).any():
        return []
    return [
        "peer: it holds all that the primary does not of each layer it has, so nothing is swapped in "
        "there; an --expert_profile of all experts spreads it over the layers"
    ]
