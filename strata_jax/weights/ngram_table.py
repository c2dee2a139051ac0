"""Where rows of the n-gram table are read from while the model runs.

Native side: `ffi/weights/ngram_table.h`. Programs name the table by its slot; the op is
`ops/ngram_rows.py`.
"""

import errno
import math
import os
import resource
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from strata_jax import _native
from strata_jax.config import NgramConfig, NgramIo
from strata_jax.errors import BadFileError, CapacityError, StrataError
from strata_jax.weights.budget import host_memory, shown
from strata_jax.weights.pack import Pack

TENSOR = "per_layer_token_embd.weight"
ROW_CACHE_BYTES = 64 << 20
"""Of the rows read last, with unbuffered reads. A released model's token takes 16 x 90 bytes."""
_REPORT_S = 2.0
_SLICE_S = 0.25
"""Longest stay in a native call while loading: Ctrl-C and other threads wait for it."""

Report = Callable[[str], None]
Clock = Callable[[], float]


def choose_io(
    asked: NgramIo | None, table_bytes: int, memory_bytes: int, *, is_device: bool
) -> NgramIo:
    """How a table is read where nobody says: by the RAM that it would take.

    Args:
        asked: --ple_io.
        table_bytes: of the table.
        memory_bytes: RAM that may be used.
        is_device: whether a GPU wants the rows.
    """
    if asked is not None:
        return asked
    if is_device:
        # Its kernels read memory faster than a disk answers, but experts need the RAM more.
        return "ram" if 3 * table_bytes <= memory_bytes else "direct"
    # A table that the page cache will hold anyway is not worth a disk read a row.
    return "mmap" if 8 * table_bytes <= memory_bytes else "direct"


class Loading(Protocol):
    """What `bring_in` asks of a table."""

    def load(self, max_s: float) -> int:
        """Brings the next part in; returns the bytes that came so far."""
        ...


class NgramTable:
    """The n-gram table of a model, open. Reading may be done from any thread."""

    def __init__(
        self,
        pack: Pack,
        mode: NgramIo,
        report: Report,
        *,
        available_bytes: int | None = None,
        cache_bytes: int = ROW_CACHE_BYTES,
        clock: Clock = time.monotonic,
        library: Any = _native,
    ):
        """Opens the table; "ram" also brings it into memory and locks it there where it may.

        The answer is the same in every mode. What is not as asked for is in `notes`.

        Args:
            pack: a model with an n-gram table.
            mode: unbuffered reads, the mapping, or the mapping held in RAM.
            report: takes lines about progress.
            available_bytes: memory that "ram" may take; None = what is free.
            cache_bytes: of the row cache of "direct".
            clock: seconds, for tests.
            library: whose ops read the table.

        Raises:
            CapacityError: if "ram" is asked for and memory is too short.
            BadFileError: if the file cannot be read or is not the one that was mapped.
        """
        info = pack.tensor(TENSOR)
        path = pack.file.paths[info.shard]
        self._what = f"{shown(info.nbytes)}, {info.shape[1]} rows of {info.type.name}"
        self._view: np.ndarray | None = pack.view(TENSOR)  # keeps the mapping alive
        self._cache_bytes = min(cache_bytes, info.nbytes)
        if mode == "ram":
            _check_fits(info.nbytes, available_bytes)
        try:
            self._native = library.NgramTable(
                mode=mode,
                type=info.type,
                num_rows=info.shape[1],
                num_cols=info.shape[0],
                address=pack.address(TENSOR),
                path=os.fsencode(path),
                # An error of a step goes through XLA, which passes UTF-8 on and nothing else.
                name=os.fsencode(path).decode(errors="backslashreplace"),
                offset=info.offset,
                cache_bytes=cache_bytes,
            )
        except RuntimeError as error:
            raise BadFileError(str(error)) from None
        try:
            notes = [self._native.note] if self._native.note else []
            if mode == "ram":
                notes += self._load(info.nbytes, report, clock)
        except BaseException:
            self.close()
            raise
        self.notes = (*notes, self.describe())
        """One line for each thing that is not as asked for, then what `describe` said at the start."""

    def _load(self, num_bytes: int, report: Report, clock: Clock) -> list[str]:
        """Returns what to note."""
        error = self._native.lock()
        try:
            took = bring_in(self._native, num_bytes, report, clock)
        except RuntimeError as wrong:
            raise BadFileError(str(wrong)) from None
        loaded = f"n-gram table: {shown(num_bytes)} in RAM after {took:.1f} s"
        loaded += f", {num_bytes / took / 1e6:.0f} MB/s"
        return [lock_advice(error, num_bytes), loaded] if error else [loaded]

    @property
    def slot(self) -> int:
        """What programs name the table by."""
        return self._native.slot

    @property
    def mode(self) -> NgramIo:
        """The mode in use: "mmap" where "direct" is not to be had."""
        mode = self._native.mode
        return "direct" if mode == "direct" else "ram" if mode == "ram" else "mmap"

    @property
    def locked(self) -> bool:
        """Whether the system may not drop the table from memory."""
        return self._native.locked

    def residency(self) -> float | None:
        """Fraction of the table in the system's page cache, from at most 65536 of its pages.

        None where the system does not say: it tells only those who may write to the file.
        """
        return self._native.residency()

    def describe(self) -> str:
        """One line: size, how rows are read, and how much of the table is in memory."""
        how = self._native.how
        if self.mode == "direct":
            how += f", {shown(self._cache_bytes)} row cache"
        elif self.mode == "ram":
            how += " and locked" if self.locked else " and read in once, not locked"
        fraction = self.residency()
        known = "unknown" if fraction is None else _percent(fraction)
        return f"n-gram table: {self._what}, {how}; in the page cache: {known}"

    def read_rows(self, rows: np.ndarray) -> np.ndarray:
        """Raw bytes of rows: int64 [n] to uint8 [n, row_bytes].

        Raises:
            StrataError: if a row cannot be read; names the row and its place in the file.
        """
        try:
            return self._native.read_rows(rows)
        except RuntimeError as error:
            raise StrataError(str(error)) from None

    def read_ahead(self, ngram: NgramConfig, before: np.ndarray, ids: np.ndarray) -> None:
        """Starts to read the rows of tokens that come soon, and returns at once.

        Args:
            ngram: the hash.
            before: ids in front of them, oldest first; none at the start of a sequence.
            ids: the tokens.
        """
        rows = row_ids(ngram, contexts(ngram, before, ids))
        self._native.prefetch(np.unique(rows))

    def counters(self) -> dict[str, int]:
        """What was read so far; the names are explained in `ffi/weights/table_counters.h`."""
        return self._native.counters()

    def close(self) -> None:
        """Ends reading ahead, unlocks and lets go of the file. Close it before the pack."""
        self._native.close()
        self._view = None

    def __enter__(self) -> "NgramTable":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def contexts(ngram: NgramConfig, before: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Each token and those before it in its segment: int64 [T, N], newest first, padded with EOS.

    The same as `model/ngram.py` computes on the device, for tokens that are not there yet.
    """
    T, N = len(ids), ngram.ngram_size
    padding = np.full(N - 1, ngram.eos_id, np.int64)
    history = np.concatenate([padding, before[len(before) - min(N - 1, len(before)) :], ids])
    history = history[len(history) - T - (N - 1) :]
    places = [history[N - 1 - s :][:T] for s in range(N)]
    closed = np.zeros(T, bool)
    for s in range(1, N):
        closed = closed | (places[s] == ngram.eos_id)
        places[s] = np.where(closed, ngram.eos_id, places[s])
    return np.stack(places, axis=1)


def row_ids(ngram: NgramConfig, tokens: np.ndarray) -> np.ndarray:
    """Table rows of token n-grams: [T, N], newest first, to int64 [T, W].

    Source: model.md, section 7; `ops/ngram_rows.py` has it in plain Python integers.
    """
    products = tokens.astype(np.uint64) * np.asarray(ngram.multipliers, np.uint64)  # modulo 2^64
    mixed = np.bitwise_xor.accumulate(products, axis=1)[:, 1:]
    mixed = np.repeat(mixed, ngram.heads_per_ngram, axis=1)
    rows = mixed % np.asarray(ngram.head_sizes, np.uint64)
    return rows.astype(np.int64) + np.asarray(ngram.head_offsets, np.int64)


def bring_in(table: Loading, num_bytes: int, report: Report, clock: Clock) -> float:
    """Loads a whole table, slice by slice, with a line every two seconds; returns the seconds.

    KeyboardInterrupt passes between two slices; what came in stays until the table is closed.
    """
    start = told = clock()
    report(f"n-gram table: bringing {shown(num_bytes)} into RAM")
    while (done := table.load(_SLICE_S)) < num_bytes:
        now = clock()
        if now - told >= _REPORT_S:
            told = now
            report(_progress(done, num_bytes, now - start))
    return max(clock() - start, 1e-9)


def _progress(done: int, num_bytes: int, took: float) -> str:
    rate = done / took
    left = f", {(num_bytes - done) / rate:.0f} s left" if rate > 0 else ""
    return f"n-gram table: {shown(done)} of {shown(num_bytes)} in RAM, {rate / 1e6:.0f} MB/s{left}"


def lock_advice(error: int, num_bytes: int) -> str:
    """The warning that a table could not be locked, with what would help."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    needed = math.ceil(num_bytes / 1024) + 2 * resource.getpagesize() // 1024
    line = (
        f"--ple_io=ram: the n-gram table cannot be locked ({os.strerror(error)}), so it is read in "
        "once and the system may drop it again"
    )
    if error not in (errno.ENOMEM, errno.EPERM, errno.EAGAIN) or soft == resource.RLIM_INFINITY:
        return line
    line += (
        f"; the limit is {soft // 1024} KiB, `ulimit -l {needed}` before the start lifts it (KiB; "
        "more where other things are locked too)"
    )
    if hard != resource.RLIM_INFINITY and hard < needed * 1024:
        line += ", as root or with memlock in /etc/security/limits.conf"
    return line


def _check_fits(num_bytes: int, available_bytes: int | None) -> None:
    have = host_memory().available_bytes if available_bytes is None else available_bytes
    if num_bytes > have:
        raise CapacityError(
            f"--ple_io=ram: the n-gram table has {shown(num_bytes)}, but only {shown(have)} of memory "
            f"are available; --ple_io=direct takes {shown(ROW_CACHE_BYTES)}"
        )


def _percent(fraction: float) -> str:
    return (
        f"{fraction:.0%}" if 0.01 <= fraction <= 0.99 or fraction in (0, 1) else f"{fraction:.2%}"
    )
