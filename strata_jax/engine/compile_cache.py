"""The folder that keeps compiled programs between processes: JAX's cache, and what is damaged in it."""

import contextlib
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

_UNREADABLE = re.compile(r"Error reading persistent compilation cache entry for '(\w+)'")


def use_compile_cache(folder: Path) -> None:
    """What is compiled from now on is kept there, and looked for there first."""
    compilation_cache.reset_cache()  # it settles at a process's first compilation, used or not
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@contextlib.contextmanager
def damage_removed(folder: Path | None) -> Iterator[list[str]]:
    """For a block that compiles: removes what cannot be read; afterwards the list has a line about it.

    A process that ends while it writes leaves half a file. JAX compiles anew then, with a warning, but
    never replaces the file: every start would be slow.
    """
    notes: list[str] = []
    if folder is None:
        yield notes
        return
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            yield notes
        finally:
            damaged = {match[1] for each in told if (match := _UNREADABLE.match(str(each.message)))}
            for name in damaged:
                for path in folder.glob(f"{name}-*"):
                    with contextlib.suppress(OSError):  # then it is as it was
                        path.unlink()
    if damaged:
        notes.append(
            f"compiled programs: {len(damaged)} of those in {folder} could not be read and were removed; "
            "compiled anew, the next start keeps them"
        )
    for each in told:
        if not _UNREADABLE.match(str(each.message)):
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
