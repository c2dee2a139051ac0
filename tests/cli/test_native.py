import types

import pytest

from strata_jax.cli.native import load_native
from strata_jax.errors import StrataError


def _library(version: tuple[int, int]):
    library = types.ModuleType("_native")
    library.__dict__["BUILT_API_VERSION"] = version
    return lambda _name: library


def _raises(error: ImportError):
    def load(_name: str):
        raise error

    return load


@pytest.mark.parametrize("built", [(0, 1), (0, 3)])
def test_accepts_a_library_that_is_not_newer(built: tuple[int, int]):
    assert built == load_native(_library(built), lambda: (0, 3)).BUILT_API_VERSION


@pytest.mark.parametrize("built", [(0, 4), (1, 0)])
def test_refuses_a_library_that_is_newer(built: tuple[int, int]):
    with pytest.raises(StrataError, match=r"built with XLA FFI .*, but the jaxlib here .* 0\.3"):
        load_native(_library(built), lambda: (0, 3))


def test_leaves_it_to_jax_where_the_version_is_unknown():
    assert load_native(_library((9, 9)), lambda: None)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ModuleNotFoundError("No module named 'strata_jax._native'"), "not built for Python"),
        (ImportError("_native.so: wrong ELF class: ELFCLASS32"), "wrong ELF class"),
        (ImportError("libstdc++.so.6: version `GLIBCXX_3.4.32' not found"), "GLIBCXX"),
    ],
)
def test_a_library_that_cannot_be_loaded_is_one_line(error: ImportError, expected: str):
    with pytest.raises(StrataError, match="tools/run") as raised:
        load_native(_raises(error))

    assert expected in str(raised.value)
    assert raised.value.__cause__ is None
