"""Which device runs the model, found out without JAX: the answer must not depend on its plugins."""

import contextlib
from pathlib import Path

from strata_jax.errors import StrataError

_DRIVER_GPUS = Path("/proc/driver/nvidia/gpus")
_DEVICE_NODES = Path("/dev")


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


def choose_platform(asked: str, devices: tuple[str, ...]) -> str | None:
    """What to tell about running on the CPU, which is all this version can do.

    Args:
        asked: --platform.
        devices: `nvidia_devices()`.

    Raises:
        StrataError: if the CPU is not what was asked for.
    """
    found = f"{', '.join(devices)} is here" if devices else "there is no NVIDIA device"
    if asked == "cuda":
        raise StrataError(
            f"--platform=cuda: {found}, and this version has no GPU backend; --platform=cpu runs"
        )
    if asked == "cpu":
        return None
    return f"no GPU backend: {found}, this version runs on the CPU; --platform=cpu asks for that"


def pin_jax_to_cpu() -> None:
    """Makes JAX start its CPU backend and no other, whatever plugins and variables say."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_platform_name", "cpu")
