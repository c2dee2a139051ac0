from pathlib import Path

import pytest
from absl import flags

from strata_jax.cli import flags as cli_flags
from strata_jax.cli import tier_flags
from strata_jax.cli.unsupported import INSTEAD
from strata_jax.config import TierSettings
from strata_jax.errors import UsageError


def _values() -> flags.FlagValues:
    values = flags.FlagValues()
    tier_flags.define_tiers(values)
    return values


def _settings(*args: str) -> TierSettings:
    values = _values()
    cli_flags.parse("test", values, list(args), {})
    return tier_flags.tier_settings(values)


def _refused(*args: str) -> str:
    with pytest.raises(UsageError) as error:
        _settings(*args)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_defines_a_flag_for_every_setting():
    names = set(TierSettings.__dataclass_fields__) - {"given"}

    assert names == set(_values())


def test_no_flag_is_the_default():
    assert _settings() == TierSettings()


@pytest.mark.parametrize(
    ("arg", "name", "value"),
    [
        ("--expert_cache=24", "expert_cache", 24),
        ("--expert-cache=0", "expert_cache", 0),
        ("--expert-cache=auto", "expert_cache", None),
        ("--expert-cache-fill-all", "expert_cache_fill_all", True),
        ("--expert_profile=/a/b", "expert_profile", Path("/a/b")),
        ("--vram_reserve_mib=0", "vram_reserve_mib", 0),
        ("--adapt_every=1", "adapt_every", 1),
        ("--adapt_swaps=8", "adapt_swaps", 8),
        ("--adapt_decay=0.5", "adapt_decay", 0.5),
        ("--pcie_frac=0.5", "pcie_frac", 0.5),
        ("--pcie_frac=auto", "pcie_frac", None),
        ("--pool_workers=3", "pool_workers", 3),
        ("--peer_device=-1", "peer_device", None),
        ("--peer-device=1", "peer_device", 1),
        ("--peer-device=loopback", "peer_device", "loopback"),
        ("--peer_link=auto", "peer_link", None),
        ("--peer_link=host", "peer_link", "host"),
        ("--peer_stream=0.5", "peer_stream", 0.5),
        ("--peer_reserve_mib=128", "peer_reserve_mib", 128),
        ("--peer_slots=7", "peer_slots", 7),
        ("--peer_adapt_swaps=0", "peer_adapt_swaps", 0),
        ("--ple_io=ram", "ple_io", "ram"),
        ("--host_ram_limit_gib=0.5", "host_ram_limit_gib", 0.5),
        ("--resident_budget_gib=2", "resident_budget_gib", 2.0),
        ("--device_memory_mib=64", "device_memory_mib", 64),
        ("--peer_memory_mib=64", "peer_memory_mib", 64),
    ],
)
def test_reads_every_flag_and_knows_that_it_was_given(arg: str, name: str, value):
    settings = _settings(arg)

    assert getattr(settings, name) == value
    assert settings.given == {name}


def test_a_flag_with_its_default_value_is_given_too():
    assert _settings("--adapt_swaps=96", "--peer_slots=0").given == {"adapt_swaps", "peer_slots"}
    assert _settings("--noexpert_cache_fill_all").given == frozenset()


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (("--expert_cache=-1",), "a whole number of at least 0 or auto expected"),
        (("--expert_cache=all",), "or auto expected"),
        (("--expert_cache=1.5",), "or auto expected"),
        (("--pcie_frac=1.1",), "a number from 0 to 1 or auto expected"),
        (("--pcie_frac=nan",), "a number from 0 to 1 or auto expected"),
        (("--adapt_every=0",), "at least 1 expected"),
        (("--adapt_decay=2",), "a number from 0 to 1 expected"),
        (("--peer_device=-2",), "at least -1 or loopback expected"),
        (("--peer_link=nvlink",), "auto|p2p|host"),
        (("--peer_stream=1.5",), "a number from 0 to 1"),
        (("--peer_device=0",), "--peer_device=0: device 0 is the primary"),
        (("--peer_device=x",), "a whole number"),
        (("--ple_io=ssd",), "direct|mmap|ram"),
        (("--host_ram_limit_gib=-1",), "at least 0 expected"),
        (("--host_ram_limit_gib=1e300",), "--host_ram_limit_gib=1e+300: a number from 0 to"),
        (("--device_memory_mib=0",), "at least 1 expected"),
        (("--peer_device=1", "--expert_cache=0"), "--peer_device=1 and --expert_cache=0"),
        (("--pear_device=1",), "unknown flag --pear_device; did you mean --peer_device?"),
        (("--expert_profile_save=/none/x",), "--expert_profile_save=/none/x: a file in an exist"),
        (("--expert_profile_save=/tmp",), "a file in an existing folder expected"),
    ],
)
def test_says_what_is_wrong(args: tuple[str, ...], expected: str):
    assert expected in _refused(*args)


@pytest.mark.parametrize("name", sorted(INSTEAD))
def test_names_what_does_the_work_of_other_engines_flags(name: str):
    message = _refused(f"--{name.replace('_', '-')}=1")

    assert message.startswith(f"test: --{name} is not supported; ")
    assert "--" in message.partition("; ")[2]


def test_no_supported_flag_is_called_unsupported():
    from strata_jax.cli import dispatch

    for command in dispatch.COMMANDS:
        assert not INSTEAD.keys() & set(dispatch._define(dispatch._load(command)))


@pytest.mark.parametrize(
    "arg",
    [
        "--layer_split=36,24,12",
        "--layer-split=99",
        "--pipeline_windows=2",
        "--expert_cache_device1=5",
        "--tensor_split=1,1",
        "--split_mode=tensor",
        "--gpu_order=as_given",
        "--main_gpu=1",
        "--device=cuda:1",
    ],
)
def test_flags_for_several_gpus_name_the_peer(arg: str):
    """Reports 44 and 46: refused by name, with what does it here, before anything is loaded."""
    assert "--peer_device=N" in _refused(arg, "--peer_device=1")


def test_the_usage_fits_a_terminal():
    text = cli_flags.usage("test", "tests.", _values())

    assert "  --expert_cache=N\n" in text
    assert "(default auto)" in text
    assert "(default -1)" in text
    assert max(map(len, text.splitlines())) <= 100
