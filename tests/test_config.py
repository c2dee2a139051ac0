import dataclasses
import os
from pathlib import Path

import pytest

from strata_jax import config
from strata_jax.errors import UsageError

VARIABLES = (
    "STRATA_PF_PEER_STREAM",
    "STRATA_PREFILL_TIMING",
    "STRATA_MMQ_NO_STREAMK",
    "JAX_PLATFORMS",
    "JAX_PLATFORM_NAME",
    "XDG_CACHE_HOME",
    "XLA_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_PREALLOCATE",
    "XLA_PYTHON_CLIENT_ALLOCATOR",
)


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("STRATA_MMQ_NO_STREAMK", "1"),
        ("JAX_PLATFORMS", "cuda"),
        ("JAX_PLATFORMS", "cuda,cpu"),
        ("JAX_PLATFORM_NAME", "gpu"),
        ("XLA_PYTHON_CLIENT_MEM_FRACTION", ".9"),
        ("XLA_PYTHON_CLIENT_PREALLOCATE", "false"),
    ],
)
def test_names_a_variable_that_decides_nothing(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(name, value)

    (line,) = config.environment_notes()

    assert line.startswith(name)


@pytest.mark.parametrize(
    ("name", "value"),
    [("STRATA_MMQ_NO_STREAMK", "0"), ("JAX_PLATFORMS", "cpu"), ("JAX_PLATFORMS", "")],
)
def test_says_nothing_about_what_is_so_anyway(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(name, value)

    assert config.environment_notes() == ()


def test_names_a_peers_share_where_there_is_no_peer(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("STRATA_PF_PEER_STREAM", "much")

    (line,) = config.environment_notes()

    assert line == (
        "STRATA_PF_PEER_STREAM=much has no effect: there is no peer; --peer_device=N adds one"
    )
    assert config.environment_notes(has_peer=True) == ()


def test_takes_the_peers_share_from_the_environment(monkeypatch: pytest.MonkeyPatch):
    assert config.environment_peer_stream() is None
    monkeypatch.setenv("STRATA_PF_PEER_STREAM", "0.25")
    assert config.environment_peer_stream() == 0.25
    for wrong in ("2", "x", "nan"):
        monkeypatch.setenv("STRATA_PF_PEER_STREAM", wrong)
        with pytest.raises(
            UsageError, match=f"STRATA_PF_PEER_STREAM={wrong}: a number from 0 to 1"
        ):
            config.environment_peer_stream()


def test_times_prompts_where_the_environment_says_so(monkeypatch: pytest.MonkeyPatch):
    assert not config.wants_prefill_timing()
    for value, wanted in (("", False), ("0", False), ("1", True)):
        monkeypatch.setenv("STRATA_PREFILL_TIMING", value)
        assert config.wants_prefill_timing() is wanted
    monkeypatch.setenv("STRATA_PREFILL_TIMING", "no")
    with pytest.raises(UsageError, match="STRATA_PREFILL_TIMING=no: 0 or 1 expected"):
        config.wants_prefill_timing()


def test_keeps_caches_in_the_users_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert config.user_cache_dir() == tmp_path / ".cache/strata_jax"

    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert config.user_cache_dir() == tmp_path / ".cache/strata_jax"

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert config.user_cache_dir() == tmp_path / "xdg/strata_jax"


def test_keeps_none_without_a_home(monkeypatch: pytest.MonkeyPatch):
    def no_home() -> Path:
        raise RuntimeError("no home")

    monkeypatch.setattr(Path, "home", no_home)

    assert config.user_cache_dir() is None


def test_lists_what_the_loader_sees(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LD_LIBRARY_PATH", "/somewhere")
    monkeypatch.setenv("LD_PRELOAD", "")

    found = config.loader_environment()

    assert found["LD_LIBRARY_PATH"] == "/somewhere"
    assert "LD_PRELOAD" not in found


def _refused(**settings) -> str:
    with pytest.raises(UsageError) as error:
        config.TierSettings(**settings)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_tiers_have_the_documented_defaults():
    tiers = config.TierSettings()

    assert (tiers.expert_cache, tiers.pcie_frac, tiers.peer_device) == (None, None, None)
    assert (tiers.adapt_every, tiers.adapt_swaps, tiers.adapt_decay) == (4, 96, 0.7)
    assert (tiers.vram_reserve_mib, tiers.peer_reserve_mib) == (700, 600)
    assert (tiers.peer_slots, tiers.peer_adapt_swaps, tiers.pool_workers) == (0, -1, 0)
    assert (tiers.ple_io, tiers.given) == (None, frozenset())


def test_tiers_know_what_was_chosen():
    chosen = config.TierSettings(adapt_swaps=8, peer_slots=0, given=frozenset({"peer_slots"}))

    assert chosen.given == {"adapt_swaps", "peer_slots"}
    assert dataclasses.replace(chosen, adapt_every=1).given == {
        "adapt_swaps",
        "peer_slots",
        "adapt_every",
    }


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("expert_cache", -1, "--expert_cache=-1: a whole number from 0 to 2147483647 exp"),
        ("expert_cache", 1.5, "a whole number"),
        ("expert_cache", True, "a whole number"),
        ("adapt_every", 0, "from 1 to"),
        ("adapt_swaps", -1, "from 0 to"),
        ("adapt_decay", 1.01, "--adapt_decay=1.01: a number from 0 to 1 expected"),
        ("adapt_decay", float("nan"), "a number from 0 to 1"),
        ("pcie_frac", -0.1, "a number from 0 to 1"),
        ("pool_workers", 1025, "from 0 to 1024"),
        (
            "peer_device",
            -2,
            "--peer_device=-2: loopback, or a whole number from 0 to 1023 expected",
        ),
        ("peer_device", "both", "--peer_device=both: loopback, or a whole number"),
        ("peer_link", "nvlink", "--peer_link=nvlink: one of auto, p2p, host expected"),
        ("peer_slots", -1, "from 0 to"),
        ("peer_adapt_swaps", -2, "from -1 to"),
        ("host_ram_limit_gib", float("inf"), "--host_ram_limit_gib=inf: a number from 0"),
        ("resident_budget_gib", -1.0, "--resident_budget_gib=-1.0"),
        ("device_memory_mib", 0, "from 1 to"),
        ("peer_memory_mib", 10**400, "from 1 to"),
        ("ple_io", "ssd", "--ple_io=ssd: one of auto, direct, mmap, ram expected"),
    ],
)
def test_tiers_refuse_what_is_out_of_range(name: str, value, expected: str):
    assert expected in _refused(**{name: value})


@pytest.mark.parametrize("name", [name for name, kind, _, _ in config._TIER_RANGES if kind is int])
def test_no_count_is_larger_than_native_code_counts(name: str):
    assert "a whole number from " in _refused(**{name: 99999999999999999999})


@pytest.mark.parametrize(
    ("settings", "flags"),
    [
        ({"peer_device": 1, "expert_cache": 0}, ("--peer_device=1", "--expert_cache=0")),
        (
            {"vram_reserve_mib": 800, "device_memory_mib": 800},
            ("--vram_reserve_mib=800", "--device_memory_mib=800"),
        ),
        (
            {"peer_device": 1, "expert_cache": 8, "peer_reserve_mib": 65, "peer_memory_mib": 64},
            ("--peer_reserve_mib=65", "--peer_memory_mib=64"),
        ),
        ({"peer_device": 0}, ("--peer_device=0", "the primary")),
    ],
)
def test_tiers_refuse_contradictions_by_both_names(settings: dict, flags: tuple[str, str]):
    message = _refused(**settings)

    assert all(flag in message for flag in flags)


def test_a_default_reserve_contradicts_nothing():
    assert config.TierSettings(device_memory_mib=64, peer_memory_mib=64).vram_reserve_mib == 700


@pytest.mark.parametrize(
    ("settings", "platform", "num_devices", "expected"),
    [
        ({"peer_device": 7, "expert_cache": 8}, "cpu", 1, "--peer_device=7: there is no such"),
        ({"peer_device": 2, "expert_cache": 8}, "cpu", 4, "on the CPU 1 is an emulated peer"),
        (
            {"peer_device": 1},
            "cpu",
            1,
            "--peer_device=1 needs the primary's cache, which --expert_c",
        ),
        ({"peer_device": 1, "peer_slots": 4}, "cpu", 1, "--device_memory_mib=N turns it on"),
        ({"peer_device": "loopback"}, "cpu", 1, "--peer_device=loopback needs the primary's cache"),
        ({"peer_device": 1}, "cuda", 1, "0 to 0 are visible"),
        ({"peer_device": 1}, "cuda", 1, "loopback is a peer on the primary's device"),
        ({"peer_device": 7}, "cuda", 4, "--peer_device=7: there is no such device, 0 to 3"),
    ],
)
def test_tiers_refuse_a_peer_that_is_not_there(
    settings: dict, platform: str, num_devices: int, expected: str
):
    with pytest.raises(UsageError) as error:
        config.TierSettings(**settings).check_devices(platform, num_devices)

    assert expected in str(error.value)


@pytest.mark.parametrize(
    ("settings", "platform", "num_devices"),
    [
        ({}, "cpu", 1),
        ({"peer_device": -1}, "cpu", 1),
        ({"peer_device": 1, "expert_cache": 8}, "cpu", 1),
        ({"peer_device": 1, "device_memory_mib": 64}, "cpu", 1),
        ({"peer_device": "loopback", "expert_cache": 8}, "cpu", 1),
        ({"peer_device": 1}, "cuda", 2),
        ({"peer_device": "loopback"}, "cuda", 1),
        ({"peer_device": 3, "expert_cache": 8}, "cuda", 4),
    ],
)
def test_tiers_take_a_peer_that_is_there(settings: dict, platform: str, num_devices: int):
    config.TierSettings(**settings).check_devices(platform, num_devices)


@pytest.mark.parametrize(
    ("settings", "platform", "is_on"),
    [
        ({}, "cpu", False),
        ({}, "cuda", True),
        ({"expert_cache": 0}, "cpu", False),
        ({"expert_cache": 0, "device_memory_mib": 64}, "cuda", False),
        ({"expert_cache": 1}, "cpu", True),
        ({"device_memory_mib": 64}, "cpu", True),
    ],
)
def test_the_cpu_emulates_a_device_only_where_it_has_a_size(
    settings: dict, platform: str, is_on: bool
):
    assert config.TierSettings(**settings).cache_is_on(platform) == is_on


@pytest.mark.parametrize(
    ("settings", "adapts"),
    [
        ({}, True),
        ({"adapt_swaps": 0}, False),
        ({"adapt_swaps": 0, "peer_adapt_swaps": 4}, False),
        ({"adapt_swaps": 0, "peer_adapt_swaps": 4, "peer_device": 1}, True),
        ({"adapt_swaps": 0, "peer_device": 1}, False),
        ({"adapt_swaps": 1, "peer_adapt_swaps": 0}, True),
    ],
)
def test_tiers_know_whether_experts_move(settings: dict, adapts: bool):
    assert config.TierSettings(**settings).adapts() == adapts


def test_overrules_what_the_user_gives_xla_of_the_card_while_it_starts(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", ".9")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

    with config.reserve_xla_memory(0.25):
        inside = {n: v for n, v in os.environ.items() if n.startswith("XLA_") and "FLAGS" not in n}

    assert inside == {"XLA_CLIENT_MEM_FRACTION": "0.2500"}
    assert os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] == ".9"
    assert "XLA_CLIENT_MEM_FRACTION" not in os.environ


@pytest.mark.parametrize(("given", "expected"), [(None, "PCI_BUS_ID"), ("FASTEST_FIRST",) * 2])
def test_devices_are_numbered_as_the_driver_does_unless_the_user_says_otherwise(
    monkeypatch, given: str | None, expected: str
):
    monkeypatch.setenv("CUDA_DEVICE_ORDER", given or "")
    if given is None:
        monkeypatch.delenv("CUDA_DEVICE_ORDER")

    config.number_devices_as_the_driver()

    assert os.environ["CUDA_DEVICE_ORDER"] == expected


@pytest.mark.parametrize(("value", "reached"), [("", True), ("platform", True), ("vmm", False)])
def test_knows_allocators_whose_memory_no_peer_reaches(monkeypatch, value: str, reached: bool):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_ALLOCATOR", value)

    assert (config.unreachable_xla_memory() == "") == reached
