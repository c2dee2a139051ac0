import mmap
from pathlib import Path

from strata_jax.cli.process import process_memory


def test_tells_own_memory_from_that_of_mapped_files(tmp_path: Path):
    """Report 36: a mapped table that warms up is no leak."""
    size = 32 << 20
    path = tmp_path / "table"
    path.write_bytes(bytes(size))
    before = process_memory()

    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert sum(mapped[::4096]) == 0
        warm = process_memory()
        own = bytearray(b"\1" * size)
        grown = process_memory()
    assert len(own) == size

    assert warm["file_bytes"] - before["file_bytes"] > 0.9 * size
    assert warm["anonymous_bytes"] - before["anonymous_bytes"] < 0.1 * size
    assert grown["anonymous_bytes"] - warm["anonymous_bytes"] > 0.9 * size
    assert grown["peak_bytes"] >= grown["anonymous_bytes"] + grown["file_bytes"] - size
    assert before["locked_bytes"] >= 0


def test_says_nothing_where_the_kernel_says_nothing(tmp_path: Path):
    (tmp_path / "status").write_text("Name:\tpython\nVmLck:\t       8 kB\nodd\n")

    assert process_memory(tmp_path / "none") == {}
    assert process_memory(tmp_path / "status") == {"locked_bytes": 8192}
