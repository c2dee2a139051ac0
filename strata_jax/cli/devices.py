"""Which device runs the model, found out without JAX: the answer must not depend on its plugins."""

import contextlib
import dataclasses
import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from strata_jax.config import (
    LOOPBACK,
    Platform,
    TierSettings,
    number_devices_as_the_driver,
    reserve_xla_memory,
)
from strata_jax.errors import StrataError

if TYPE_CHECKING:
    from strata_jax.weights.tier_plan import Machine

_DRIVER_GPUS = Path("/proc/driver/nvidia/gpus")
_DEVICE_NODES = Path("/dev")
_PCI_DEVICES = Path("/sys/bus/pci/devices")


def nvidia_devices(
    driver_gpus: Path = _DRIVER_GPUS, device_nodes: Path = _DEVICE_NODES
) -> tuple[str, ...]:
    """Names of the NVIDIA devices this process can reach, as the kernel driver lists them.

    Containers may hide the driver's folder; a device node then counts without a name.
    """
    names = []
    for folder in sorted(driver_gpus.glob("*")):
        with contextlib.suppress(OSError):
            for line in (folder / "information").read_text().splitlines():
                key, _, value = line.partition(":")
                if key.strip() == "Model":
                    names.append(value.strip())
    nodes = sorted(device_nodes.glob("nvidia[0-9]*"))
    return tuple(names) if names else tuple(f"NVIDIA device {node.name[6:]}" for node in nodes)


def pci_link(pci_id: str, pci_devices: Path = _PCI_DEVICES) -> str | None:
    """Speed and width of a device's link to the host, as the kernel tells; None where it does not.

    Cards slow their link down while they idle, so what it can do is told too if that is more.
    """

    def link(which: str) -> str:
        folder = pci_devices / pci_id.lower()
        speed = (folder / f"{which}_link_speed").read_text().split()[0]
        return f"{float(speed):g} GT/s x{int((folder / f'{which}_link_width').read_text())}"

    try:
        now, most = link("current"), link("max")
    except (OSError, ValueError, IndexError):
        return None
    return f"link {now}" if now == most else f"link {now} now, {most} at most"


@dataclasses.dataclass(frozen=True)
class Choice:
    """Where the model runs."""

    platform: Platform
    note: str | None = None
    """What to tell about it."""


def choose_platform(
    asked: str, devices: tuple[str, ...], problem: Callable[[], str | None] | None = None
) -> Choice:
    """Where to run: auto takes an NVIDIA device if there is one, else the CPU.

    Args:
        asked: --platform.
        devices: `nvidia_devices()`.
        problem: tells why the device cannot be used, or None; `cuda_problem` if not given.

    Raises:
        StrataError: if a device that is there, or was asked for, cannot be used.
    """
    if asked == "cpu":
        return Choice("cpu")
    if asked == "auto" and not devices:
        return Choice("cpu", "no NVIDIA device here: the CPU is used; --platform=cpu asks for that")
    why = (problem or cuda_problem)()
    if why is not None:
        found = "no NVIDIA device can be used"
        if devices:
            found = f"{', '.join(devices)} is here, but cannot be used"
        raise StrataError(f"--platform={asked}: {found}: {why}; --platform=cpu runs without it")
    return Choice("cuda")


def cuda_library() -> ModuleType:
    """The CUDA library, which numbers devices as nvidia-smi does. ImportError if this build has none."""
    number_devices_as_the_driver()
    return importlib.import_module("strata_jax._native_cuda")


def cuda_problem() -> str | None:
    """Why the first GPU cannot run this build's kernels; None if it can."""
    try:
        library = cuda_library()
    except ImportError as error:
        return f"this build has no CUDA library ({error}); build one where nvcc is: tools/run"
    machine = library.machine()
    if machine["problem"] is not None:
        return machine["problem"]
    return machine["devices"][0]["problem"]


def cuda_machine(settings: TierSettings) -> "Machine":
    """This machine for a plan on its first GPU, with the peer that the settings name.

    Raises:
        StrataError: if the first GPU, or the peer, cannot be used.
    """
    from strata_jax.weights.budget import CUDA_RUNTIME_BYTES, host_memory
    from strata_jax.weights.tier_plan import Machine

    why = cuda_problem()
    if why is not None:
        raise StrataError(f"--platform=cuda: {why}; --platform=cpu runs without it")
    devices = cuda_library().machine()["devices"]
    peer = settings.peer_device
    peer_free, is_reached = None, peer == LOOPBACK
    if peer is not None and peer != LOOPBACK and peer < len(devices):
        if devices[peer]["problem"] is not None:
            raise StrataError(
                f"--peer_device={peer}: {devices[peer]['name']} cannot be used: "
                f"{devices[peer]['problem']}; --peer_device=-1 runs without it"
            )
        peer_free = devices[peer]["free_mib"] << 20
        is_reached = settings.peer_link != "host" and peer in devices[0]["peers"]
    return Machine(
        platform="cuda",
        host=host_memory(),
        primary_free_bytes=devices[0]["free_mib"] << 20,
        peer_free_bytes=peer_free,
        peer_is_reached=is_reached,
        num_devices=len(devices),
        runtime_bytes=CUDA_RUNTIME_BYTES,
    )


def start_jax(platform: Platform, xla_bytes: int = 0) -> None:
    """Makes JAX start this backend and no other, whatever plugins and variables say.

    Args:
        platform: where the model runs.
        xla_bytes: on a GPU, the memory that XLA may take for states, caches and temporaries. It takes
            all of it at once, so that addresses never change and nothing is allocated later.

    Raises:
        StrataError: if the GPU's backend does not start.
    """
    import jax

    if platform == "cpu":
        pin_jax_to_cpu()
        return
    machine = cuda_library().machine()
    share = xla_bytes / (machine["devices"][0]["total_mib"] << 20)
    # The peer is the native side's: JAX would otherwise take most of its memory.
    jax.config.update("jax_cuda_visible_devices", "0")
    jax.config.update("jax_platforms", "cuda,cpu")
    try:
        with reserve_xla_memory(share):
            jax.devices("cuda")
    except RuntimeError as error:
        first_line = str(error).partition("\n")[0]
        raise StrataError(
            f"--platform=cuda: JAX's CUDA backend does not start: {first_line}; install "
            "jax[cuda13], or --platform=cpu runs without it"
        ) from None
    taken = (jax.devices("cuda")[0].memory_stats() or {}).get("bytes_limit", xla_bytes)
    check_xla_share(taken, xla_bytes)


def check_xla_share(taken: int, planned: int) -> None:
    """Whether XLA took what the plan gives it: a backend that was started before keeps its own share.

    Args:
        taken: bytes of the device that XLA holds.
        planned: bytes that it was to take.

    Raises:
        StrataError: if they differ by more than rounding of a share to four digits makes.
    """
    slack = planned // 10 + (64 << 20)
    if planned and abs(taken - planned) > slack:
        raise StrataError(
            f"--platform=cuda: XLA holds {taken >> 20} MiB of the GPU, {planned >> 20} MiB planned: "
            "JAX's backend was started before strata_jax in this process; start it afterwards, or let "
            "strata_jax run in a process of its own"
        )


def pin_jax_to_cpu() -> None:
    """Makes JAX start its CPU backend and no other, whatever plugins and variables say."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_platform_name", "cpu")
