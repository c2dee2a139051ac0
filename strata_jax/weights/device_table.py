"""The n-gram table where a device's kernels read it (`ffi/cuda/device_table.h`)."""

from collections.abc import Callable
from typing import Any

import numpy as np

from strata_jax.config import NgramConfig, NgramIo
from strata_jax.errors import CapacityError, StrataError
from strata_jax.ops.native import Backend
from strata_jax.weights.ngram_table import TENSOR, NgramTable
from strata_jax.weights.pack import Pack

_SLICE_S = 0.5
"""Seconds between two lines of progress."""

Report = Callable[[str], None]


class DeviceNgramTable:
    """The table in page-locked memory that the device reads over its link: 16 short rows a token."""

    mode: NgramIo = "ram"

    def __init__(self, pack: Pack, backend: Backend, report: Report):
        """Copies the table.

        Args:
            pack: the model.
            backend: whose device.
            report: takes lines on progress.

        Raises:
            CapacityError: if the memory is not to be had.
        """
        info = pack.tensor(TENSOR)
        cols, rows = info.shape
        try:
            self._native = backend.library.DeviceTable(
                place="mapped",
                type=info.type,
                num_rows=rows,
                num_cols=cols,
                address=pack.address(TENSOR),
            )
            loaded = 0
            while loaded < info.nbytes:
                loaded = self._native.load(_SLICE_S)
                report(f"copying the n-gram table: {loaded >> 20} of {info.nbytes >> 20} MiB")
        except RuntimeError as error:
            raise CapacityError(
                f"{error}; the table needs page-locked RAM with --ple_io=ram, --ple_io=direct does not"
            ) from None
        self.notes = (
            f"n-gram table: {info.nbytes / 2**20:.1f} MiB page-locked, read by the GPU (--ple_io=ram)",
        )

    @property
    def slot(self) -> int:
        """Number in the library's registry, an attribute of the compiled programs."""
        return self._native.slot

    def counters(self) -> dict[str, Any]:
        """Nothing is read by the host."""
        return {}

    def read_ahead(self, ngram: NgramConfig, before: np.ndarray, ids: np.ndarray) -> None:
        """Nothing to read ahead: all of it is in memory."""

    def close(self) -> None:
        """Frees the memory; after the last step."""
        self._native.close()


class HostReadTable:
    """A table that stays in its file: a thread of the host reads the rows that a step asks for.

    A step asks at its beginning, so the rows come while the device works on the layers before the one that
    wants them. Errors of reading and a lost thread end the request: `check` says why.
    """

    def __init__(
        self,
        pack: Pack,
        mode: NgramIo,
        backend: Backend,
        report: Report,
        *,
        most_tokens: int,
        timeout_ms: int,
    ):
        """Opens the table and starts the thread.

        Args:
            pack: the model.
            mode: direct or mmap.
            backend: whose device.
            report: takes lines on progress.
            most_tokens: rows of the widest program.
            timeout_ms: silence of the thread after which a step is given up.

        Raises:
            BadFileError: if the file cannot be read or is not the one that was mapped.
            CapacityError: if memory for the rows is not to be had.
        """
        assert pack.config.ngram is not None
        self._table = NgramTable(pack, mode, report, library=backend.library)
        try:
            self._native = backend.library.DeviceTable.read_by_host(
                table=self._table.slot,
                most_rows=most_tokens * pack.config.ngram.num_heads,
                timeout_ms=timeout_ms,
            )
        except RuntimeError as error:
            self._table.close()
            raise CapacityError(str(error)) from None
        self.notes = (
            *self._table.notes,
            f"n-gram table: a thread of the host reads rows for the GPU (--ple_io={self.mode})",
        )

    @property
    def slot(self) -> int:
        """Number in the library's registry, an attribute of the compiled programs."""
        return self._native.slot

    @property
    def mode(self) -> NgramIo:
        """The mode in use: "mmap" where "direct" is not to be had."""
        return self._table.mode

    def counters(self) -> dict[str, Any]:
        """What was read so far, as of a table on the CPU."""
        return self._table.counters()

    def read_ahead(self, ngram: NgramConfig, before: np.ndarray, ids: np.ndarray) -> None:
        """Starts to read the rows of tokens that come soon, and returns at once."""
        self._table.read_ahead(ngram, before, ids)

    def before_window(self) -> None:
        """Wakes the thread for a step."""
        self._native.wake()

    def check(self) -> None:
        """StrataError saying why, if rows of a step could not be read: its results mean nothing."""
        problem = self._native.problem()
        if problem:
            raise StrataError(f"n-gram table: {problem}")

    def recover(self) -> None:
        """Makes it fit for the next request, with no step under way.

        Raises:
            StrataError: if the thread is still lost.
        """
        problem = self._native.problem()
        if problem and not self._native.recover():
            raise StrataError(
                f"n-gram table: {problem}, and it is still lost; open the model again"
            )

    def stall(self, milliseconds: int, timeout_ms: int) -> None:
        """For tests: the next letter is looked at so much later (0: now), and waits end that soon."""
        self._native.stall(milliseconds, timeout_ms)

    def close(self) -> None:
        """Ends the thread and lets go of the file; after the last step."""
        self._native.close()
        self._table.close()
