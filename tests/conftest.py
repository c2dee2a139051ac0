"""Which tests run, and what they share.

`--gpu` asks for those that need a device; asked for, they fail without one.
"""

import os
import shutil
import tempfile

import pytest

LONGEST = (
    "test_device_experts.py",
    "test_runner_ring.py",
    "test_tiers.py",
    "test_device_experts_file.py",
    "test_device_tiles.py",
    "test_transformer.py",
    "test_goldens.py",
    "test_drafters.py",
    "test_native_drivers.py",
)
"""Files that take longest: they come first, so that no process is alone with one at the end."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu", action="store_true", help="run the tests that need a CUDA device too")


def pytest_configure(config: pytest.Config) -> None:
    """A program that one test compiled is not compiled again, in none of this run's processes."""
    if hasattr(config, "workerinput") or "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    folder = tempfile.mkdtemp(prefix="strata-tests-")
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    os.environ["JAX_COMPILATION_CACHE_DIR"] = folder
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what needs a device unless it is asked for: no test is skipped in silence."""
    rank = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.name, len(LONGEST)))
    if config.getoption("--gpu"):
        return
    left_out = [item for item in items if item.get_closest_marker("gpu")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and (problem := gpu_problem()):
        pytest.fail(f"asked for with --gpu, but {problem}", pytrace=False)


def gpu_problem() -> str | None:
    """Why tests that need a device cannot run here; None if they can."""
    try:
        from strata_jax import _native_cuda
    except ImportError as error:
        return f"the CUDA library is not there ({error}); STRATA_CUDA=ON tools/test builds it"
    machine = _native_cuda.machine()
    problems = [device["problem"] for device in machine["devices"]]
    if machine["problem"] is None and None in problems:
        return None
    return machine["problem"] or problems[0]
