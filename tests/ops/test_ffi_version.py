from pathlib import Path

import pytest

from strata_jax.errors import StrataError
from strata_jax.ops.ffi_version import check_built_version, read_api_version, runtime_api_version


def test_reads_the_version_of_a_header(tmp_path: Path):
    header = tmp_path / "c_api.h"
    header.write_text("// x\n#define XLA_FFI_API_MAJOR 0\n\n#define XLA_FFI_API_MINOR 4\n")

    assert read_api_version(header) == (0, 4)


def test_knows_no_version_without_a_header(tmp_path: Path):
    (tmp_path / "c_api.h").write_text("#define XLA_FFI_API_MAJOR 0\n")

    assert read_api_version(tmp_path / "c_api.h") is None
    assert read_api_version(tmp_path / "none.h") is None


def test_finds_the_version_of_the_installed_jaxlib():
    version = runtime_api_version()

    assert version is not None
    assert version >= (0, 3)


@pytest.mark.parametrize("runtime", [(0, 3), (0, 4), None])
def test_accepts_a_library_that_is_not_newer(runtime: tuple[int, int] | None):
    check_built_version((0, 3), runtime)


@pytest.mark.parametrize("built", [(0, 4), (1, 0)])
def test_refuses_a_library_that_is_newer(built: tuple[int, int]):
    with pytest.raises(StrataError, match=r"runs up to 0\.3; .* pip install --no-build-isolation"):
        check_built_version(built, (0, 3))
