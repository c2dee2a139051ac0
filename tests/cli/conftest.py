import pytest


@pytest.fixture(autouse=True)
def _own_surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory):
    """No test writes into the user's cache or depends on the user's settings."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
    for name in ("STRATA_MMQ_NO_STREAMK", "JAX_PLATFORMS", "JAX_PLATFORM_NAME"):
        monkeypatch.delenv(name, raising=False)
