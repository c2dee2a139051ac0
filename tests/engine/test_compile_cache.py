import warnings
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from strata_jax.engine.compile_cache import damage_removed, use_compile_cache

SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    before = {name: getattr(jax.config, name) for name in SETTINGS}
    use_compile_cache(tmp_path)
    yield tmp_path
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def _compile(folder: Path) -> list[str]:
    numbers = jax.ShapeDtypeStruct((3,), jnp.float32)
    with damage_removed(folder) as notes:
        jax.jit(lambda x: x * 3 + 1).lower(numbers).compile()
    return notes


def test_what_cannot_be_read_is_told_and_written_anew(folder: Path):
    assert _compile(folder) == []
    (kept,) = folder.iterdir()
    whole = kept.read_bytes()
    kept.write_bytes(whole[:40])  # as a process leaves it that ends meanwhile

    (note,) = _compile(folder)

    assert "could not be read and were removed" in note
    assert not kept.exists()
    assert [_compile(folder), _compile(folder)] == [[], []]  # written, read
    assert kept.stat().st_size > 40


def test_other_warnings_and_errors_go_on(tmp_path: Path):
    with pytest.warns(UserWarning, match="something else"), damage_removed(tmp_path):
        warnings.warn("something else", stacklevel=1)
    with pytest.raises(ValueError, match="wrong"), damage_removed(tmp_path):
        raise ValueError("wrong")
