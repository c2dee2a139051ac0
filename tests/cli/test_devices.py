from pathlib import Path

import pytest

from strata_jax.cli.devices import choose_platform, nvidia_devices
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


def test_auto_says_that_there_is_no_gpu_and_names_the_flag():
    line = choose_platform("auto", ())

    assert line is not None
    assert "no GPU backend" in line
    assert "--platform=cpu" in line


def test_auto_names_the_device_it_leaves_alone():
    assert "NVIDIA H200 is here" in (choose_platform("auto", ("NVIDIA H200",)) or "")


def test_the_cpu_asked_for_needs_no_words():
    assert choose_platform("cpu", ("NVIDIA H200",)) is None


@pytest.mark.parametrize("devices", [(), ("NVIDIA H200",)])
def test_refuses_what_this_version_cannot_do(devices: tuple[str, ...]):
    with pytest.raises(StrataError, match="--platform=cpu") as error:
        choose_platform("cuda", devices)

    assert error.value.exit_code == 1
