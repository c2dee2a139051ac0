"""The n-gram table where a device's kernels read it (`ffi/cuda/device_table.h`)."""

from collections.abc import Callable
from typing import Any

import numpy as np

from strata_jax.config import NgramConfig
from strata_jax.errors import CapacityError
from strata_jax.ops.native import Backend
from strata_jax.weights.ngram_table import TENSOR
from strata_jax.weights.pack import Pack

_SLICE_S = 0.5
"""Seconds between two lines of progress."""


class DeviceNgramTable:
    """The table in page-locked memory that the device reads over its link: 16 short rows a token."""

    mode = "ram"

    def __init__(
        self, pack: Pack, asked: str | None, backend: Backend, report: Callable[[str], None]
    ):
        """Copies the table.

        Args:
            pack: the model.
            asked: --ple_io; what is not `ram` is answered by a note.
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
            raise CapacityError(f"{error}; a GPU reads the table from page-locked RAM") from None
        note = f"n-gram table: {info.nbytes / 2**20:.1f} MiB page-locked, read by the GPU"
        if asked not in (None, "ram"):
            note += f"; --ple_io={asked} has no effect there"
        self.notes = (note,)

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
