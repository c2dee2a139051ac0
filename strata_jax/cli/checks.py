"""What `doctor` finds out. Every check answers; none ends the report."""

import contextlib
import functools
import importlib
import importlib.metadata
import os
import platform
import re
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import psutil

from strata_jax import __version__
from strata_jax.cli.devices import cuda_library, nvidia_devices, pci_link, pin_jax_to_cpu
from strata_jax.cli.native import load_native, runtime_api_version
from strata_jax.config import loader_environment
from strata_jax.errors import StrataError
from strata_jax.weights.pack import Pack, open_pack
from strata_jax.weights.plan import Plan, make_plan

_KERNEL_NEEDS = {
    "avx512": ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"),
    "avx2": ("avx2", "fma", "f16c"),
    "scalar": (),
}
"""CPU features (names of /proc/cpuinfo) by set of kernels, the best set first."""
_PACKAGES = ("jax", "jaxlib", "numpy", "tokenizers", "absl-py")
_PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")
_LIBRARIES = re.compile(r"(jax|xla|_native|cuda|nvidia|nccl|cudnn|stdc\+\+|gomp|omp5|torch)")
_COPY_BYTES = 1 << 26
_RELEASED_TOKEN_BYTES = 6.6e9
"""Bytes that a token of the released 48-layer model reads at 3 to 4 bits. Source: speed.md."""


def examine(path: Path) -> dict[str, Any]:
    """Everything about this machine that decides how a model runs on it.

    Args:
        path: the model whose speed is estimated.
    """
    problems: list[str] = []
    native = _native(problems)
    _jax_runs(problems, native)
    features = cpu_features()
    devices = _devices(bool(problems))
    return {
        "works": not problems,
        "problems": problems,
        "devices": devices,
        "tiers": _tiers(_usable_gpus(devices)),
        "kernels": _kernels(native, features),
        "speed": _speed(path),
        "cpu": {
            "model": _cpu_model(),
            "usable_cores": len(os.sched_getaffinity(0)),
            "threads": native.num_threads() if native else None,
            "features": [name for name in _KERNEL_NEEDS["avx512"] if name in features],
        },
        "memory": _memory(),
        "versions": _versions(),
        "ffi_api": {
            "built": _dotted(native.BUILT_API_VERSION if native else None),
            "runtime": _dotted(runtime_api_version()),
        },
        "libraries": loaded_libraries(),
        "environment": loader_environment(),
    }


def cpu_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """What the kernel says the CPU can do; empty where it says nothing."""
    return frozenset(_cpuinfo("flags", cpuinfo).split())


def loaded_libraries(maps: Path = Path("/proc/self/maps")) -> dict[str, str]:
    """Path of each loaded library that may matter, by file name; all paths where it is there twice.

    The wrong copy of a library loaded first is a common reason for a backend that does not start.
    """
    found: dict[str, list[str]] = {}
    with contextlib.suppress(OSError):
        for line in maps.read_text(errors="replace").splitlines():
            _, _, path = line.partition("/")
            name = path.rpartition("/")[2]
            if ".so" in name and _LIBRARIES.search(name):
                paths = found.setdefault(name, [])
                paths += [f"/{path}"] if f"/{path}" not in paths else []
    return {name: ", ".join(paths) for name, paths in sorted(found.items())}


def _native(problems: list[str]) -> ModuleType | None:
    try:
        return load_native()
    except StrataError as error:
        problems.append(str(error))
        return None


def _jax_runs(problems: list[str], native: ModuleType | None) -> None:
    """JAX's CPU backend starts and runs one of our handlers: what every command needs."""
    try:
        pin_jax_to_cpu()
        import jax

        jax.devices()
        if native is not None:
            from strata_jax.ops.router_topk import router_topk

            logits = np.array([[0, 2, 1, 3, 0]], np.float32)
            ids, *_ = jax.jit(functools.partial(router_topk, num_active=2))(logits, np.int32(1))
            if np.asarray(ids).tolist() != [[3, 1]]:
                problems.append(f"router_topk: gave {np.asarray(ids).tolist()}, [[3, 1]] expected")
    except Exception as error:  # whatever a broken installation comes up with
        first_line = str(error).partition("\n")[0]
        problems.append(f"JAX on the CPU: {type(error).__name__}: {first_line}")


def _devices(is_broken: bool) -> list[dict[str, Any]]:
    why = "see the problems" if is_broken else "JAX and the native library run there"
    devices = [{"name": "CPU", "usable": not is_broken, "why": why}]
    return devices + _gpus(nvidia_devices())


def _gpus(seen: tuple[str, ...]) -> list[dict[str, Any]]:
    """The GPUs as the CUDA library finds them; as the driver lists them where there is no library.

    Args:
        seen: `nvidia_devices()`.
    """
    try:
        library = cuda_library()
    except ImportError as error:
        why = f"this build has no CUDA library ({error}); tools/run builds one where nvcc is"
        return [_gpu(name, why, is_there=bool(seen)) for name in seen or ("GPU",)]
    machine = library.machine()
    found = []
    for device in machine["devices"]:
        archs = ", ".join(library.built_archs())
        fine = (
            f"{device['free_mib']} of {device['total_mib']} MiB free, compute capability "
            f"{device['capability']} (built for {archs}), CUDA {machine['driver']} driver, "
            f"{device['pci_id']}, {pci_link(device['pci_id']) or 'link unknown'}"
        )
        fine += _peers(device, len(machine["devices"]))
        problem = device["problem"]
        found.append(_gpu(device["name"], problem or fine, usable=problem is None))
    if not found:
        found.append(_gpu("GPU", machine["problem"] or "none is here", is_there=bool(seen)))
    return found


def _gpu(name: str, why: str, *, usable: bool = False, is_there: bool = True) -> dict[str, Any]:
    return {"name": name, "usable": usable, "is_there": is_there, "why": why}


def _usable_gpus(devices: list[dict[str, Any]]) -> int:
    """GPUs that a model may run on: none if the first cannot be used, for no other is taken in its place."""
    gpus = [device["usable"] for device in devices[1:]]
    return sum(gpus) if gpus and gpus[0] else 0


def _peers(device: dict[str, Any], count: int) -> str:
    """Whether rows go straight from this device to a peer."""
    if count == 1:
        return ""
    if device["peers"]:
        return f", P2P with {', '.join(map(str, device['peers']))}"
    return ", no P2P: rows of a peer go through RAM"


def _tiers(num_gpus: int) -> dict[str, dict[str, Any]]:
    """Where experts may lie on the device that `auto` takes: one of the usable GPUs, or the CPU."""
    if num_gpus == 0:
        return _tiers_of_cpu()
    second = f"--peer_device=N names another of the {num_gpus} GPUs"
    return {
        "primary": {
            "on": True,
            "why": "experts fill what the GPU has free; --expert_cache=N or --device_memory_mib=N bounds them",
        },
        "peer": {
            "on": False,
            "why": f"{second if num_gpus > 1 else 'no second GPU can be used'}; "
            "--peer_device=loopback is a second store on the first",
        },
        "stream": {
            "on": True,
            "why": "the GPU reads its share of the misses over its link; --pcie_frac, else measured at start",
        },
        "host": {
            "on": True,
            "why": "RAM holds what the GPU does not, and the host's threads compute their share there",
        },
        "file": {
            "on": False,
            "why": "takes what RAM has no room for, and what --resident_budget_gib=N leaves out",
        },
    }


def _tiers_of_cpu() -> dict[str, dict[str, Any]]:
    return {
        "primary": {
            "on": False,
            "why": "experts are read where they lie; --expert_cache=N or --device_memory_mib=N emulates "
            "a device",
        },
        "peer": {
            "on": False,
            "why": "--peer_device=1 emulates one beside an emulated primary",
        },
        "stream": {"on": False, "why": "--pcie_frac is for the misses of an emulated primary"},
        "host": {"on": True, "why": "the CPU computes experts where the mapped file has them"},
        "file": {"on": False, "why": "--resident_budget_gib=N leaves the rest in the file"},
    }


def _kernels(native: ModuleType | None, features: frozenset[str]) -> dict[str, Any]:
    used = native.kernels() if native else None
    sets = {}
    for name, needs in _KERNEL_NEEDS.items():
        lacking = [feature for feature in needs if feature not in features]
        if name == used:
            sets[name] = "used"
        elif native is not None and native.cpu_runs(name):
            sets[name] = f"runs too, {used} is faster"
        elif native is None:
            sets[name] = "unknown without the native library"
        else:
            sets[name] = f"not on this CPU, which lacks {', '.join(lacking) or 'it'}"
    return {"used": used, "sets": sets}


def _speed(path: Path) -> dict[str, Any]:
    """An upper bound: a token cannot come faster than the weights it needs are read."""
    rate = _copy_rate()
    summary = (
        f"memory is read at about {rate / 1e9:.0f} GB/s by one core; the released 48-layer model "
        f"could write at most {rate / _RELEASED_TOKEN_BYTES:.1f} tok/s per core here"
    )
    speed: dict[str, Any] = {"read_bytes_per_s": rate, "model": str(path)}
    try:
        with open_pack(path) as pack:
            needed = token_bytes(pack, make_plan(pack, None))
    except StrataError as error:
        return speed | {"summary": f"{summary}; {error}"}
    bound = rate / needed
    summary += f"; {path.name} ({needed / 1e6:.1f} MB a token) at most {bound:.0f} tok/s per core"
    return speed | {"token_bytes": needed, "max_tok_s_per_core": bound, "summary": summary}


def token_bytes(pack: Pack, plan: Plan) -> int:
    """Bytes of weights that one token reads: all dense ones, of the experts those in use."""
    sizes = {tier.name: tier.bytes for tier in plan.tiers}
    config = pack.config
    active = sizes["experts"] * config.num_experts_active // config.num_experts
    head = "output.weight" if pack.has("output.weight") else "token_embd.weight"
    return sizes["dense"] + active + pack.tensor(head).nbytes


def _copy_rate() -> float:
    """Bytes per second that one core reads and writes elsewhere, the best of three tries."""
    source = np.zeros(_COPY_BYTES, np.uint8)
    target = np.ones_like(source)
    seconds = []
    for _ in range(3):
        begin = time.perf_counter()
        np.copyto(target, source)
        seconds.append(time.perf_counter() - begin)
    return _COPY_BYTES / min(seconds)


def _memory() -> dict[str, int]:
    memory = psutil.virtual_memory()
    return {"total_bytes": memory.total, "available_bytes": memory.available}


def _versions() -> dict[str, str]:
    found = {"strata_jax": __version__, "python": platform.python_version()}
    for package in (*_PACKAGES, *_PLUGINS):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def _dotted(version: tuple[int, ...] | None) -> str | None:
    return None if version is None else ".".join(str(part) for part in version)


def _cpu_model() -> str:
    return _cpuinfo("model name", Path("/proc/cpuinfo")) or platform.machine()


def _cpuinfo(key: str, cpuinfo: Path) -> str:
    with contextlib.suppress(OSError):
        for line in cpuinfo.read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == key:
                return value.strip()
    return ""
