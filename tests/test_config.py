from pathlib import Path

import pytest

from strata_jax import config

VARIABLES = ("STRATA_MMQ_NO_STREAMK", "JAX_PLATFORMS", "JAX_PLATFORM_NAME", "XDG_CACHE_HOME")


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("STRATA_MMQ_NO_STREAMK", "1"),
        ("JAX_PLATFORMS", "cuda"),
        ("JAX_PLATFORMS", "cuda,cpu"),
        ("JAX_PLATFORM_NAME", "gpu"),
    ],
)
def test_names_a_variable_that_decides_nothing(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(name, value)

    (line,) = config.environment_notes()

    assert line.startswith(name)


@pytest.mark.parametrize(
    ("name", "value"),
    [("STRATA_MMQ_NO_STREAMK", "0"), ("JAX_PLATFORMS", "cpu"), ("JAX_PLATFORMS", "")],
)
def test_says_nothing_about_what_is_so_anyway(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(name, value)

    assert config.environment_notes() == ()


def test_keeps_caches_in_the_users_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert config.user_cache_dir() == tmp_path / ".cache/strata_jax"

    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert config.user_cache_dir() == tmp_path / ".cache/strata_jax"

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert config.user_cache_dir() == tmp_path / "xdg/strata_jax"


def test_keeps_none_without_a_home(monkeypatch: pytest.MonkeyPatch):
    def no_home() -> Path:
        raise RuntimeError("no home")

    monkeypatch.setattr(Path, "home", no_home)

    assert config.user_cache_dir() is None


def test_lists_what_the_loader_sees(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LD_LIBRARY_PATH", "/somewhere")
    monkeypatch.setenv("LD_PRELOAD", "")

    found = config.loader_environment()

    assert found["LD_LIBRARY_PATH"] == "/somewhere"
    assert "LD_PRELOAD" not in found
