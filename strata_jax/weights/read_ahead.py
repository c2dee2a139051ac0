"""Brings a pack's weights from disk into memory before the first step needs them.

A mapping filled by one page fault at a time reads a disk at a tenth of its speed; asked for in order and one
piece ahead, it reads at full speed. The n-gram table is left alone: its rows are few and far between.
"""

import time
from collections.abc import Callable, Iterator

import numpy as np

from strata_jax.weights.pack import Pack

PIECE_BYTES = 64 << 20
"""Between two looks at the clock, and the most that is asked for ahead."""
_PAGE = 4096
_REPORT_EVERY_S = 2.0


def read_ahead(
    pack: Pack,
    available_bytes: int,
    report: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Touches every page of the dense weights, then of the experts if they fit in memory too.

    Args:
        pack: an open pack.
        available_bytes: memory that may be filled; what does not fit is read when it is needed.
        report: gets a line with bytes, rate and time left every two seconds.
        clock: seconds, rising.

    Returns:
        bytes touched.
    """
    tensors = _wanted(pack, available_bytes)
    total = sum(pack.tensor(name).nbytes for name in tensors)
    start = last = clock()
    done = 0
    for piece in _pieces(pack, tensors):
        piece[::_PAGE].sum()
        done += len(piece)
        if clock() - last >= _REPORT_EVERY_S:
            last = clock()
            rate = done / (last - start)
            report(
                f"reading weights: {done / 2**30:.1f} of {total / 2**30:.1f} GiB, "
                f"{rate / 2**20:.0f} MiB/s, {(total - done) / rate:.0f} s left"
            )
    return done


def _wanted(pack: Pack, available_bytes: int) -> list[str]:
    by_tier = {"dense": [], "embedding": [], "experts": []}
    for name, spec in pack.specs.items():
        if spec.tier in by_tier:
            by_tier[spec.tier].append(name)
    wanted: list[str] = []
    for names in by_tier.values():
        size = sum(pack.tensor(name).nbytes for name in names)
        if size > available_bytes:
            break
        available_bytes -= size
        wanted += names
    return sorted(wanted, key=lambda name: (pack.tensor(name).shard, pack.tensor(name).offset))


def _pieces(pack: Pack, tensors: list[str]) -> Iterator[np.ndarray]:
    for name, after in zip(tensors, [*tensors[1:], None]):
        if after is not None:
            pack.file.read_ahead(after)
        view = pack.view(name)
        for begin in range(0, len(view), PIECE_BYTES):
            yield view[begin : begin + PIECE_BYTES]
