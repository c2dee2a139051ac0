"""What a plan tells beside its figures: what is off, clamped, idle, and where things are."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from strata_jax.config import TierSettings
from strata_jax.weights.budget import (
    GIB,
    MIB,
    shown,
)
from strata_jax.weights.pack import Pack, open_pack
from strata_jax.weights.plan import make_plan
from strata_jax.weights.tier_needs import TierPlan
from strata_jax.weights.tier_plan import Machine, plan_tiers
from tests.gguf_maker import make_model
from tests.weights.tier_plans import (
    ALL,
    EXPERTS,
    HOST,
    LAYERS,
    fixed_bytes,
    make_pack_file,
    planner,
)


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pack]:
    with open_pack(make_pack_file(tmp_path_factory.mktemp("model"))) as pack:
        yield pack


@pytest.fixture(scope="module")
def planned(pack: Pack) -> Callable[..., TierPlan]:
    return planner(pack)


def test_says_what_little_a_count_leaves_free(planned):
    fixed = fixed_bytes(planned(device_memory_mib=1000))

    tiers = planned(device_memory_mib=fixed // MIB + 3, expert_cache=4)

    tiers.check()
    assert any("stay free, auto would leave" in note for note in tiers.notes)
    assert any("kept as asked (--expert_cache=4)" in note for note in tiers.notes)


def test_tells_which_number_is_which_device_and_what_stays_free_there(planned):
    """Reports 42 and 43."""
    tiers = planned(
        expert_cache=4, device_memory_mib=1024, peer_device=1, peer_slots=2, peer_memory_mib=64
    )

    lines = [note for note in tiers.notes if note.startswith("device ")]
    free = {need.name: (need.have_bytes or 0) - need.need_bytes for need in tiers.needs}
    assert lines == [
        "device 0, the primary, emulated in RAM: 4 experts in 1015.5 KiB; "
        f"{shown(free['primary'])} of 1.0 GiB stay free (--vram_reserve_mib)",
        "device 1, the peer, emulated in RAM: 2 experts in 1.5 MiB; "
        f"{shown(free['peer'])} of 64.0 MiB stay free (--peer_reserve_mib)",
    ]


@pytest.mark.parametrize(
    ("platform", "peer", "expected"),
    [
        ("cuda", "loopback", "device 0, the peer (loopback): 2 experts"),
        ("cuda", 1, "device 1, the peer: 2 experts"),
        ("cpu", "loopback", "device 1, the peer, emulated in RAM: 2 experts"),
    ],
)
def test_tells_which_device_the_peer_is_on(planned, platform: str, peer, expected: str):
    free = (GIB, GIB) if platform == "cuda" else (None, None)

    tiers = planned(platform=platform, free=free, expert_cache=4, peer_device=peer, peer_slots=2)

    assert any(note.startswith(expected) for note in tiers.notes)


def test_tells_what_is_no_device_and_what_has_no_bound(planned):
    def lines(**settings) -> list[str]:
        return [note for note in planned(**settings).notes if note.startswith("device ")]

    assert lines() == []
    assert lines(expert_cache=4) == [
        "device 0, the primary, emulated in RAM: 4 experts in 1015.5 KiB"
    ]
    (line,) = lines(platform="cuda", free=(GIB, None))
    assert line.startswith("device 0, the primary: 16 experts in ")


@pytest.mark.parametrize(
    ("lockable", "settings", "expected"),
    [
        (None, {}, "mapped, not page-locked: nothing copies them; --host_ram_limit_gib=N locks"),
        (None, {"host_ram_limit_gib": 1}, "100 % to be page-locked"),
        (None, {"host_ram_limit_gib": 0}, "mapped, not page-locked: --host_ram_limit_gib=0 leaves"),
        (None, {"expert_cache": 4}, "100 % to be page-locked"),
        (0, {"expert_cache": 4}, "mapped, not page-locked: nothing may be locked (ulimit -l"),
    ],
)
def test_says_whether_the_hosts_experts_are_locked_and_why_not(
    planned, lockable: int | None, settings: dict, expected: str
):
    host = dataclasses.replace(HOST, lockable_bytes=lockable)

    tiers = planned(host=host, **settings)

    tiers.check()
    (line,) = [note for note in tiers.notes if note.startswith("host tier: ")]
    assert expected in line


def test_says_what_auto_is_on_the_cpu_where_experts_are_missed(planned):
    lines = ("--pcie_frac=auto: 0 on the CPU", "--pool_workers=0: on the CPU the ops' own threads")

    def said(**settings) -> list[bool]:
        notes = planned(**settings).notes
        return [any(note.startswith(line) for note in notes) for line in lines]

    assert said(expert_cache=4) == [True, True]
    assert said(expert_cache=4, pcie_frac=0.0, pool_workers=1) == [False, False]
    assert said(expert_cache=ALL) == [False, False]  # nothing is missed
    assert said() == [False, False]  # the first line says that the cache is off


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"expert_cache": 1}, "expert cache: 1 experts are fewer than the 2 a token uses in one"),
        ({"expert_cache": 0}, "expert cache: off (--expert_cache=0)"),
        ({"expert_cache": ALL + 1}, f"primary: {ALL + 1} experts asked for, the model has {ALL}"),
        ({"expert_cache": ALL, "peer_device": 1}, "peer: on, but it holds no expert: the primary"),
    ],
)
def test_says_when_a_tier_is_off_or_hardly_on(planned, settings: dict, expected: str):
    """Report 52."""
    assert any(note.startswith(expected) for note in planned(**settings).notes)


RESIDENT = {"expert_cache": ALL}


TWO_CARDS = {"expert_cache": ALL - 5, "peer_device": 1}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {**RESIDENT, "adapt_swaps": 8, "adapt_decay": 0.5},
            "--adapt_swaps, --adapt_decay: no effect, devices hold all experts",
        ),
        ({**RESIDENT, "pcie_frac": 1.0}, "--pcie_frac: no effect, devices hold all experts"),
        ({**TWO_CARDS, "adapt_every": 1}, "--adapt_every: no effect, devices hold all experts"),
        (
            {**TWO_CARDS, "peer_adapt_swaps": 4},
            "--peer_adapt_swaps: no effect, devices hold all experts",
        ),
        (
            {"expert_cache": LAYERS, "peer_device": 1, "peer_slots": EXPERTS - 1},
            "peer: it holds all that the primary does not of each layer it has, so nothing is swapped "
            "in there; an --expert_profile of all experts spreads it over the layers",
        ),
    ],
)
def test_says_what_nothing_can_be_swapped_for(planned, settings: dict, expected: str):
    """Report 96: a flag that does nothing with this placement."""
    assert expected in planned(**settings).notes


@pytest.mark.parametrize(
    "settings",
    [
        RESIDENT,
        {"expert_cache": ALL - 1, "adapt_swaps": 8, "pcie_frac": 1.0},
        {"expert_cache": LAYERS, "peer_device": 1, "peer_slots": EXPERTS},
        {
            "expert_cache": LAYERS,
            "peer_device": 1,
            "peer_slots": EXPERTS - 1,
            "peer_adapt_swaps": 0,
        },
    ],
)
def test_says_nothing_of_flags_that_do_something(planned, settings: dict):
    notes = planned(**settings).notes

    assert not [note for note in notes if "no effect" in note or note.startswith("peer: it holds")]


def test_says_when_no_expert_fits(planned):
    roomy = {"free": (1000 << 20, None), "adapt_swaps": 0, "vram_reserve_mib": 0}
    fixed = fixed_bytes(planned(platform="cuda", **roomy))

    tiers = planned(platform="cuda", free=(fixed + 1000, None), vram_reserve_mib=0)

    tiers.check()
    assert "expert cache: on, but no expert fits beside what the model needs" in tiers.notes


def test_says_when_there_is_no_table(tmp_path: Path):
    path = make_model(
        tmp_path / "m.gguf",
        pairs=dict.fromkeys(_ple_keys(tmp_path)),
        drop=["per_layer_token_embd*", "*ple_*"],
        sparse=True,
    ).path
    with open_pack(path) as bare:
        settings = TierSettings(ple_io="ram")
        tiers = plan_tiers(
            bare, make_plan(bare, None), settings, Machine(platform="cpu", host=HOST)
        )

    assert "--ple_io: no effect, the model has no n-gram table" in tiers.notes


def _ple_keys(folder: Path) -> list[str]:
    with open_pack(make_model(folder / "with.gguf", sparse=True).path) as pack:
        return [key for key in pack.file.metadata if ".ple." in key or "ngram" in key]
