"""Flags of tiers that were given and do nothing: named, never ignored in silence."""

from strata_jax.config import TierSettings

_CACHE_FLAGS = (
    "expert_cache_fill_all",
    "vram_reserve_mib",
    "adapt_every",
    "adapt_swaps",
    "adapt_decay",
    "pcie_frac",
)
_PEER_FLAGS = (
    "peer_reserve_mib",
    "peer_slots",
    "peer_adapt_swaps",
    "peer_memory_mib",
    "peer_link",
    "peer_stream",
    "peer_attention",
)


def idle_flags(settings: TierSettings, platform: str) -> tuple[str, ...]:
    """What is off and which of the given settings have no effect, one line each."""
    notes = []
    if not settings.cache_is_on(platform):
        if settings.expert_cache == 0:
            notes.append("expert cache: off (--expert_cache=0)")
        else:
            notes.append(
                "expert cache: off on the CPU, experts are read where they lie; "
                "--expert_cache=N or --device_memory_mib=N emulates a device"
            )
        notes += _without_effect(settings, _CACHE_FLAGS, "the expert cache is off")
        if settings.resident_budget_gib is None:  # otherwise it ranks the file tier
            notes += _without_effect(settings, ("expert_profile",), "the expert cache is off")
    else:
        notes += _notes_with_cache(settings, platform)
    if platform == "cpu":
        notes += _without_effect(
            settings, ("prefill_ring",), "the CPU reads experts where they lie"
        )
    if settings.peer_device is None:
        notes += _without_effect(
            settings, _PEER_FLAGS, "there is no peer; --peer_device=N adds one"
        )
    elif platform == "cpu":
        notes += _without_effect(settings, ("peer_link",), "an emulated peer is in the same memory")
        idle = ("peer_stream", "peer_attention")
        notes += _without_effect(settings, idle, "an emulated peer computes its own experts' rows")
    return tuple(notes)


def _notes_with_cache(settings: TierSettings, platform: str) -> list[str]:
    notes = []
    if not settings.adapts():
        reason = "--adapt_swaps=0 freezes the experts"
        notes += _without_effect(settings, ("adapt_every", "adapt_decay"), reason)
    fill_all = ("expert_cache_fill_all",)
    if settings.expert_cache is not None:
        reason = f"--expert_cache={settings.expert_cache} is filled in any case"
        notes += _without_effect(settings, fill_all, reason)
    elif settings.expert_profile is None:
        notes += _without_effect(settings, fill_all, "all are ranked without --expert_profile")
    if platform == "cpu" and settings.device_memory_mib is None:
        reason = "the emulated device has no bound; --device_memory_mib=N gives it one"
        notes += _without_effect(settings, ("vram_reserve_mib",), reason)
    return notes


def _without_effect(settings: TierSettings, names: tuple[str, ...], reason: str) -> list[str]:
    idle = ", ".join(f"--{name}" for name in names if name in settings.given)
    return [f"{idle}: no effect, {reason}"] if idle else []
