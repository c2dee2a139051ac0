from pathlib import Path

import pytest

from strata_jax.cli import devices
from strata_jax.cli.devices import (
    Choice,
    check_xla_share,
    choose_platform,
    cuda_machine,
    nvidia_devices,
    pci_link,
)
from strata_jax.config import TierSettings
from strata_jax.errors import StrataError


def test_finds_no_device_on_a_machine_without_driver(tmp_path: Path):
    assert nvidia_devices(tmp_path / "gpus", tmp_path) == ()


def test_names_the_devices_the_driver_lists(tmp_path: Path):
    for number, name in enumerate(("H200", "RTX 3090")):
        folder = tmp_path / f"gpus/0000:0{number}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t\t NVIDIA {name}\nIRQ: 24\n")

    assert nvidia_devices(tmp_path / "gpus", tmp_path) == ("NVIDIA H200", "NVIDIA RTX 3090")


def test_counts_device_nodes_where_the_driver_lists_nothing(tmp_path: Path):
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()

    found = nvidia_devices(tmp_path / "gpus", tmp_path)

    assert found == ("NVIDIA device 0", "NVIDIA device 1")


def fine() -> None:
    return None


def test_auto_takes_a_device_that_works():
    assert choose_platform("auto", ("NVIDIA H200",), fine) == Choice("cuda")


def test_auto_says_that_there_is_no_gpu_and_names_the_flag():
    choice = choose_platform("auto", ())

    assert choice.platform == "cpu"
    assert "no NVIDIA device" in (choice.note or "")
    assert "--platform=cpu" in (choice.note or "")


def test_the_cpu_asked_for_needs_no_words():
    assert choose_platform("cpu", ("NVIDIA H200",)) == Choice("cpu")


@pytest.mark.parametrize("asked", ["auto", "cuda"])
def test_a_device_that_fails_is_an_error_and_no_silent_fall_back(asked: str):
    with pytest.raises(StrataError, match="--platform=cpu") as error:
        choose_platform(asked, ("NVIDIA H200",), lambda: "built for sm_80 only")

    assert error.value.exit_code == 1
    assert "NVIDIA H200 is here" in str(error.value)
    assert "built for sm_80 only" in str(error.value)


def test_a_device_that_was_asked_for_must_be_there():
    with pytest.raises(
        StrataError, match="--platform=cuda: no NVIDIA device can be used: no driver"
    ):
        choose_platform("cuda", (), lambda: "no driver")


def test_tells_the_link_of_a_card_and_what_it_can_do_if_that_is_more(tmp_path: Path):
    folder = tmp_path / "0000:1b:00.0"
    folder.mkdir()
    files = {
        "current_link_speed": "2.5 GT/s PCIe\n",
        "current_link_width": "16\n",
        "max_link_speed": "32.0 GT/s PCIe\n",
        "max_link_width": "16\n",
    }
    for name, text in files.items():
        (folder / name).write_text(text)

    assert pci_link("0000:1B:00.0", tmp_path) == "link 2.5 GT/s x16 now, 32 GT/s x16 at most"

    (folder / "current_link_speed").write_text("32.0 GT/s PCIe\n")
    assert pci_link("0000:1B:00.0", tmp_path) == "link 32 GT/s x16"


def test_knows_nothing_of_a_link_the_kernel_does_not_tell(tmp_path: Path):
    assert pci_link("0000:1B:00.0", tmp_path) is None


@pytest.mark.parametrize("taken", [100 << 30, 1 << 30])
def test_refuses_an_xla_that_was_started_with_another_share(taken: int):
    with pytest.raises(StrataError, match="started before strata_jax"):
        check_xla_share(taken, 8 << 30)


@pytest.mark.parametrize("taken", [8 << 30, (8 << 30) + (50 << 20)])
def test_takes_the_share_that_was_planned_but_for_rounding(taken: int):
    check_xla_share(taken, 8 << 30)


class FakeLibrary:
    """Two devices of which the second cannot be used."""

    def machine(self):
        fields = {"free_mib": 900, "name": "Card", "problem": None, "peers": [2]}
        second = fields | {"free_mib": 7, "name": "Old card", "problem": "built for sm_90 only"}
        return {"problem": None, "devices": [fields, second, fields | {"free_mib": 50}]}


@pytest.fixture
def machine(monkeypatch):
    monkeypatch.setattr(devices, "cuda_library", FakeLibrary)
    return cuda_machine


@pytest.mark.parametrize(("peer", "free"), [(None, None), ("loopback", None), (2, 50 << 20)])
def test_a_plan_knows_the_memory_of_the_peer_that_was_named(machine, peer, free):
    found = machine(TierSettings(peer_device=peer))

    assert (found.platform, found.num_devices) == ("cuda", 3)
    assert (found.primary_free_bytes, found.peer_free_bytes) == (900 << 20, free)
    assert found.peer_is_reached == (peer is not None)


def test_a_plan_knows_that_rows_of_the_peer_go_through_ram(machine):
    assert not machine(TierSettings(peer_device=2, peer_link="host")).peer_is_reached


def test_a_peer_that_cannot_run_the_kernels_is_refused_by_name(machine):
    with pytest.raises(StrataError) as error:
        machine(TierSettings(peer_device=1))

    assert str(error.value) == (
        "--peer_device=1: Old card cannot be used: built for sm_90 only; --peer_device=-1 runs "
        "without it"
    )
