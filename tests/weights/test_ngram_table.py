import errno
import functools
import itertools
import os
import pathlib
import re
import subprocess
import sys
import time

import jax.numpy as jnp
import numpy as np
import pytest

from strata_jax.errors import BadFileError, CapacityError, StrataError
from strata_jax.model import ngram as model_ngram
from strata_jax.ops.ngram_rows import ngram_row_ids_ref, ngram_rows
from strata_jax.weights.ngram_table import (
    TENSOR,
    NgramTable,
    bring_in,
    contexts,
    lock_advice,
    row_ids,
)
from strata_jax.weights.pack import open_pack

EMBEDDED = pathlib.Path(__file__).parents[2] / "strata_jax/models/strata-small/model-IQ3_S.gguf"
MODES = ("direct", "mmap", "ram")
MIB = 1 << 20


@pytest.fixture(scope="module")
def pack():
    with open_pack(EMBEDDED) as opened:
        yield opened


@pytest.fixture
def own_pack(tmp_path):
    """A copy of the embedded model that a test may spoil."""
    path = tmp_path / "model.gguf"
    path.write_bytes(EMBEDDED.read_bytes())
    with open_pack(path) as opened:
        yield opened


def rows_of(pack, count=3000, seed=0):
    return np.random.default_rng(seed).integers(0, pack.tensor(TENSOR).shape[1], count)


def file_rows(pack, rows):
    num_rows = pack.tensor(TENSOR).shape[1]
    return pack.view(TENSOR).reshape(num_rows, -1)[rows]


def no_report(line):
    raise AssertionError(f"nothing to say expected, but: {line}")


def is_direct(table):
    """Whether unbuffered reads are to be had here; without them one line says so."""
    assert (table.mode == "direct") != any("no unbuffered reads" in line for line in table.notes)
    return table.mode == "direct"


@pytest.mark.parametrize("mode", MODES)
def test_reads_a_file_whose_name_is_not_utf8(tmp_path, mode):
    path = tmp_path / os.fsdecode(b"caf\xe9.gguf")
    path.symlink_to(EMBEDDED)

    with open_pack(path) as pack, NgramTable(pack, mode, print) as table:
        rows = rows_of(pack)
        np.testing.assert_array_equal(table.read_rows(rows), file_rows(pack, rows))


def test_names_a_file_whose_name_is_not_utf8(tmp_path):
    path = tmp_path / os.fsdecode(b"caf\xe9.gguf")
    path.symlink_to(EMBEDDED)

    with open_pack(path) as pack:
        path.unlink()
        with pytest.raises(BadFileError, match="gguf: cannot be opened"):
            NgramTable(pack, "direct", print)


@pytest.mark.parametrize("mode", MODES)
def test_gives_the_files_bytes_in_every_mode(pack, mode):
    with NgramTable(pack, mode, print) as table:
        assert table.mode == mode or not is_direct(table)
        for seed in range(3):
            rows = rows_of(pack, seed=seed)
            np.testing.assert_array_equal(table.read_rows(rows), file_rows(pack, rows))
        assert table.read_rows(np.zeros(0, np.int64)).shape == (0, 32)
        assert table.counters()["rows"] == 9000


def test_reads_a_row_from_the_disk_once(pack):
    with NgramTable(pack, "direct", no_report) as table:
        rows = rows_of(pack, 200)
        table.read_rows(rows)
        before = table.counters()
        table.read_rows(rows[::-1])
        after = table.counters()

        assert after["reads"] == before["reads"]
        assert after["cache_hits"] - before["cache_hits"] == 200 * is_direct(table)
        assert after["bytes_read"] % 4096 == 0


def test_finds_what_was_read_ahead(pack):
    ngram = pack.config.ngram
    ids = np.random.default_rng(0).integers(0, 4000, 64)
    with NgramTable(pack, "direct", no_report) as table:
        table.read_ahead(ngram, ids[:0], ids)
        rows = np.unique(row_ids(ngram, contexts(ngram, ids[:0], ids)))
        deadline = time.monotonic() + 20
        # Two rows of the probe at the start may be among them.
        while table.counters()["ahead_rows"] < len(rows) - 2:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        before = table.counters()["reads"]
        table.read_rows(rows)

        assert table.counters()["reads"] == before
        assert table.counters()["ahead_dropped"] == 0


def test_describes_itself_in_a_line(pack):
    described = {}
    for mode in MODES:
        with NgramTable(pack, mode, lambda line: None) as table:
            described[mode] = table.describe()
            assert table.notes[-1].startswith("n-gram table: 2.0 MiB, ")
            residency = table.residency()
            assert residency is None or 0 <= residency <= 1

    for line in described.values():
        assert line.startswith("n-gram table: 2.0 MiB, 64896 rows of F16, ")
        assert re.search(r"; in the page cache: (unknown|[\d.]+%)$", line)
    assert "mapped; " in described["mmap"]
    assert re.search(r"mapped and (locked|read in once, not locked); ", described["ram"])
    assert "row cache; " in described["direct"] or described["direct"] == described["mmap"]


def test_names_a_row_outside_the_table(pack):
    with (
        NgramTable(pack, "direct", no_report) as table,
        pytest.raises(StrataError, match=re.escape("rows[1] is 64896, outside [0, 64896)")),
    ):
        table.read_rows(np.array([0, 64896]))


def test_names_row_and_byte_of_a_file_that_was_shortened(own_pack):
    info = own_pack.tensor(TENSOR)
    with NgramTable(own_pack, "direct", no_report, cache_bytes=0) as table:
        if not is_direct(table):
            return  # a mapping that is cut off ends the process
        with pathlib.Path(own_pack.file.paths[0]).open("r+b") as file:
            file.truncate(info.offset + 32 * 1000)
        place = f"row 5000 at byte {info.offset + 32 * 5000} gave: the file ends after"
        with pytest.raises(StrataError, match=place):
            table.read_rows(np.array([5000]))


def test_names_a_shortened_file_in_a_steps_error_though_its_name_is_not_utf8(tmp_path):
    path = tmp_path / os.fsdecode(b"caf\xe9.gguf")
    path.write_bytes(EMBEDDED.read_bytes())
    with open_pack(path) as pack, NgramTable(pack, "direct", no_report, cache_bytes=0) as table:
        if not is_direct(table):
            return  # a mapping that is cut off ends the process
        with path.open("r+b") as file:
            file.truncate(pack.tensor(TENSOR).offset)
        tokens, streams = jnp.full((1, 3), 5, jnp.int32), jnp.zeros((1, 4, 256))
        assert pack.config.ngram is not None
        read = functools.partial(ngram_rows, table=table.slot, ngram=pack.config.ngram)
        with pytest.raises(RuntimeError, match=r"caf\\xe9.gguf: row \d+ at byte"):
            read(tokens, streams, jnp.int32(1)).block_until_ready()


def test_refuses_a_file_that_was_replaced(own_pack):
    path = pathlib.Path(own_pack.file.paths[0])
    path.unlink()
    path.write_bytes(bytes(own_pack.file.sizes[0]))
    with pytest.raises(BadFileError, match="it was replaced while it was open, start anew"):
        NgramTable(own_pack, "direct", no_report)


def test_refuses_ram_that_is_not_there_and_names_what_fits(pack):
    with pytest.raises(CapacityError, match=r"has 2\.0 MiB, but only 1\.0 MiB .*--ple_io=direct"):
        NgramTable(pack, "ram", no_report, available_bytes=MIB)


def test_keeps_the_mapping_until_it_is_closed():
    opened = open_pack(EMBEDDED)
    rows = rows_of(opened, 100)
    expected = file_rows(opened, rows).copy()
    table = NgramTable(opened, "mmap", no_report)
    opened.close()

    np.testing.assert_array_equal(table.read_rows(rows), expected)

    table.close()
    with pytest.raises(StrataError, match="the table is closed"):
        table.read_rows(rows)


def test_reuses_the_lowest_slot(pack):
    first, second = (NgramTable(pack, "mmap", no_report) for _ in range(2))
    slot = first.slot
    assert second.slot > slot  # other tests may hold slots between them
    first.close()
    with NgramTable(pack, "mmap", no_report) as again:
        assert again.slot == slot
    second.close()


class SlowLoading:
    """Half a MiB a second, by a clock that only loading moves."""

    def __init__(self, interrupt_at=None):
        self.now = 100.0
        self.done = 0
        self.interrupt_at = interrupt_at

    def load(self, max_s):
        self.now += max_s
        self.done += int(max_s * MIB / 2)
        if self.interrupt_at is not None and self.now > self.interrupt_at:
            raise KeyboardInterrupt
        return min(self.done, 10 * MIB)

    def clock(self):
        return self.now


class TestLoading:
    """Reports 25 and 97: slow is shown as slow, and Ctrl-C is heard."""

    def test_says_how_far_it_is_every_two_seconds(self):
        loading, lines = SlowLoading(), []

        took = bring_in(loading, 10 * MIB, lines.append, loading.clock)

        assert took == 20
        assert lines[0] == "n-gram table: bringing 10.0 MiB into RAM"
        assert lines[1] == "n-gram table: 1.0 MiB of 10.0 MiB in RAM, 1 MB/s, 18 s left"
        assert len(lines) == 10

    def test_lets_an_interrupt_through(self):
        loading = SlowLoading(interrupt_at=103)
        with pytest.raises(KeyboardInterrupt):
            bring_in(loading, 10 * MIB, lambda line: None, loading.clock)

    def test_leaves_nothing_locked_behind(self, pack):
        def interrupt(line):
            raise KeyboardInterrupt

        before = locked_kib()
        with pytest.raises(KeyboardInterrupt):
            NgramTable(pack, "ram", interrupt)
        left = locked_kib() - before
        assert left <= 2 * 64, "the two pages at the ends stay until the file is closed"

    def test_says_what_lifts_the_limit(self):
        line = lock_advice(errno.ENOMEM, 10 * MIB)

        assert "the n-gram table cannot be locked (Cannot allocate memory)" in line
        assert "`ulimit -l 10248` before the start lifts it" in line or "limit is" not in line

    def test_reads_the_table_in_where_locking_is_not_allowed(self):
        """Report 38: `ulimit -l 64` and ram."""
        done = subprocess.run(
            [sys.executable, "-c", WITHOUT_LOCKS, str(EMBEDDED), *sys.path],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

        assert done.returncode == 0, done.stderr
        _, warning, loaded, described, same = done.stdout.splitlines()
        assert "cannot be locked" in warning
        assert re.search(r"the limit is 64 KiB, `ulimit -l 20\d\d` before the start", warning)
        assert "2.0 MiB in RAM after" in loaded
        assert "read in once, not locked; in the page cache: 100%" in described
        assert same == "True"


WITHOUT_LOCKS = """
import ctypes, resource, sys
sys.path[:] = sys.argv[2:]
import numpy as np
from strata_jax.weights.ngram_table import TENSOR, NgramTable
from strata_jax.weights.pack import open_pack

# capabilities(7): without CAP_IPC_LOCK the limit holds for root, too. capset takes effective, permitted
# and inheritable sets of 32 bits, twice; version 3 of its header.
header = (ctypes.c_uint32 * 2)(0x20080522, 0)
nothing = (ctypes.c_uint32 * 6)()
assert ctypes.CDLL(None).capset(header, nothing) == 0
resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 << 10, 64 << 10))
with open_pack(sys.argv[1]) as pack, NgramTable(pack, "ram", print) as table:
    print(*table.notes, sep="\\n")
    rows = np.arange(0, 64896, 7)
    print((table.read_rows(rows) == pack.view(TENSOR).reshape(64896, -1)[rows]).all())
"""


def locked_kib():
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.partition("VmLck:")[2].split()[0])


class TestRowIds:
    """The rows read ahead are those that the model asks for."""

    @pytest.mark.parametrize("border", range(9))
    def test_have_the_contexts_of_the_model(self, pack, border):
        ngram = pack.config.ngram
        ids = np.array([4, 5, ngram.eos_id, 6, 7, 8, ngram.eos_id, 9, 4])
        before = jnp.full(ngram.ngram_size - 1, ngram.eos_id)
        expected = model_ngram.contexts(ngram, before, jnp.asarray(ids))

        first = contexts(ngram, ids[:0], ids[:border])
        second = contexts(ngram, ids[:border], ids[border:])

        np.testing.assert_array_equal(np.concatenate([first, second]), expected)

    def test_are_those_of_plain_integers(self, pack):
        ngram = pack.config.ngram
        tokens = np.array(list(itertools.product((0, 1, 4087, 4094), repeat=3)))

        np.testing.assert_array_equal(row_ids(ngram, tokens), ngram_row_ids_ref(tokens, ngram))
