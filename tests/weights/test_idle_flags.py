from pathlib import Path

import pytest

from strata_jax.config import TierSettings
from strata_jax.weights.idle_flags import idle_flags


@pytest.mark.parametrize(
    ("settings", "platform", "expected"),
    [
        ({}, "cuda", ()),
        (
            {},
            "cpu",
            (
                "expert cache: off on the CPU, experts are read where they lie; --expert_cache=N or "
                "--device_memory_mib=N emulates a device",
            ),
        ),
        (
            {"expert_cache": 0, "adapt_every": 1, "adapt_swaps": 8, "adapt_decay": 0.5},
            "cuda",
            (
                "expert cache: off (--expert_cache=0)",
                "--adapt_every, --adapt_swaps, --adapt_decay: no effect, the expert cache is off",
            ),
        ),
        (
            {"expert_cache": 8, "peer_reserve_mib": 1, "peer_slots": 2, "peer_adapt_swaps": 0},
            "cpu",
            (
                "--peer_reserve_mib, --peer_slots, --peer_adapt_swaps: no effect, there is no peer; "
                "--peer_device=N adds one",
            ),
        ),
        (
            {"expert_cache": 8, "peer_memory_mib": 2, "given": frozenset({"peer_device"})},
            "cpu",
            ("--peer_memory_mib: no effect, there is no peer; --peer_device=N adds one",),
        ),
        (
            {"expert_cache": 8, "peer_device": 1, "peer_link": "host"},
            "cpu",
            ("--peer_link: no effect, an emulated peer is in the same memory",),
        ),
        (
            {"expert_cache": 8, "adapt_swaps": 0, "adapt_every": 1},
            "cpu",
            ("--adapt_every: no effect, --adapt_swaps=0 freezes the experts",),
        ),
        (
            {"expert_cache": 8, "expert_cache_fill_all": True},
            "cpu",
            ("--expert_cache_fill_all: no effect, --expert_cache=8 is filled in any case",),
        ),
        (
            {"expert_cache_fill_all": True},
            "cuda",
            ("--expert_cache_fill_all: no effect, all are ranked without --expert_profile",),
        ),
        ({"expert_cache_fill_all": True, "expert_profile": Path("p")}, "cuda", ()),
        (
            {"expert_cache": 8, "vram_reserve_mib": 5},
            "cpu",
            (
                "--vram_reserve_mib: no effect, the emulated device has no bound; "
                "--device_memory_mib=N gives it one",
            ),
        ),
        ({"device_memory_mib": 64, "vram_reserve_mib": 5}, "cpu", ()),
        (
            {"expert_cache": 0, "expert_profile": Path("p")},
            "cuda",
            (
                "expert cache: off (--expert_cache=0)",
                "--expert_profile: no effect, the expert cache is off",
            ),
        ),
        (
            {"expert_cache": 0, "expert_profile": Path("p"), "resident_budget_gib": 1.0},
            "cuda",
            ("expert cache: off (--expert_cache=0)",),
        ),
    ],
)
def test_tiers_name_what_has_no_effect(settings: dict, platform: str, expected: tuple[str, ...]):
    assert idle_flags(TierSettings(**settings), platform) == expected
