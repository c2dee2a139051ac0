"""Which tests run. `--gpu` asks for those that need a device; asked for, they fail without one."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu", action="store_true", help="run the tests that need a CUDA device too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what needs a device unless it is asked for: no test is skipped in silence.

    The drivers in C++ come first, for they take longest, and the others run beside them.
    """
    items.sort(key=lambda item: item.path.name != "test_native_drivers.py")
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
