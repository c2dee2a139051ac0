import re

import pytest

ARCH = re.compile(r"(sm|compute)_\d+[af]?")


@pytest.fixture
def native_cuda():
    """The CUDA library, which is not built everywhere."""
    return pytest.importorskip(
        "strata_jax._native_cuda",
        reason="no CUDA library here; STRATA_CUDA=ON tools/test builds it",
    )


def test_names_the_architectures_of_the_build(native_cuda):
    archs = native_cuda.built_archs()

    assert archs
    assert all(ARCH.fullmatch(arch) for arch in archs)


def test_answers_where_there_is_no_device(native_cuda):
    machine = native_cuda.machine()

    assert re.fullmatch(r"\d+\.\d+", machine["runtime"])
    assert (machine["problem"] is None) == bool(machine["devices"])


@pytest.mark.gpu
def test_runs_its_code_on_a_device(native_cuda):
    device = native_cuda.machine()["devices"][0]

    assert device["problem"] is None
    assert 0 < device["free_mib"] <= device["total_mib"]
    assert re.fullmatch(r"\d+\.\d+", device["capability"])
