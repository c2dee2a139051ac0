"""The host's share of the experts that a GPU does not hold: who computes them, and where they lie.

Every such expert lies twice in RAM: as panels in page-locked memory, which the GPU reads over its link
(tiles read nothing else), and as the file's rows in the page cache, which the host's threads read. Of a
row's misses some are read over the link and the others computed by the host at the same time. Where RAM
has no room for both, all of them are read over the link.
"""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from strata_jax.errors import StrataError
from strata_jax.weights.budget import SWAP_SPARES
from strata_jax.weights.experts import AdaptSettings
from strata_jax.weights.placement import Tier

_ROUND_TRIP_S = 12e-6
"""From the doorbell to the answer, beside the work (jax-ffi.md, section 0)."""
_MEASURED = 8
"""Experts that a measurement of the host runs at once: about the misses of a row."""
_HOST_TAG = 2
"""`ExpertTag::kHost` of ffi/cuda/expert_word.h."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostSettings:
    """What the host's tier of a device is opened with."""

    window_rows: int
    num_active: int
    """Experts of a row."""
    width: int
    """Values of a row."""
    threads: int
    """That compute experts; 0 = the host computes none, all misses are read over the link."""
    stream_share: float | None
    """Of a row's misses, read over the link; None = measured."""
    timeout_ms: int
    """Silence of the threads after which a step is given up."""
    adapt: AdaptSettings
    """When and how far residency follows use."""


def host_threads(asked: int, sysfs: Path = Path("/sys/devices/system/cpu")) -> int:
    """Threads that compute the host's experts: as asked, or one for each physical core but one.

    Args:
        asked: 0 = not asked.
        sysfs: where the system tells which processors share a core.
    """
    if asked:
        return asked
    cores = set()
    for cpu in os.sched_getaffinity(0):
        siblings = sysfs / f"cpu{cpu}" / "topology" / "thread_siblings_list"
        cores.add(siblings.read_text().strip() if siblings.exists() else str(cpu))
    return max(1, len(cores) - 1)


def streamed_share(num_active: int, share: float) -> list[int]:
    """Of n misses of a row, those that are read over the link, for n = 0..num_active."""
    return [int(n * share) for n in range(num_active + 1)]


def streamed_measured(num_active: int, link_s: float, host_s: float) -> list[int]:
    """The same for the least time of the slower of the two.

    Args:
        num_active: experts of a row.
        link_s: seconds of one expert over the link.
        host_s: seconds of one expert on the host, with others beside it.
    """

    def time(streamed: int, missed: int) -> float:
        left = missed - streamed
        return max(streamed * link_s, left * host_s + (_ROUND_TRIP_S if left else 0.0))

    return [
        min(range(n, -1, -1), key=lambda streamed, n=n: time(streamed, n))
        for n in range(num_active + 1)
    ]


def sides_that_move(adapt: AdaptSettings, tiers: np.ndarray) -> list[Tier]:
    """Devices whose experts change places: those that hold some while some are on no device.

    Args:
        adapt: how many may in a round.
        tiers: of every expert, [L, E].
    """
    away = tiers == Tier.HOST
    most = {Tier.PRIMARY: adapt.swaps, Tier.PEER: adapt.peer_swaps}
    if len(tiers) < 2 or not away.any():
        return []
    return [tier for tier, swaps in most.items() if swaps > 0 and (tiers == tier).any()]


def start_swaps(
    native: Any, adapt: AdaptSettings, slots: list[int], sides: Mapping[Tier, int], on_host: int
) -> None:
    """Lets experts change places.

    Args:
        native: the store, all experts put.
        adapt: when, and how many.
        slots: bytes of an expert of each layer.
        sides: the devices, and where in their arenas spare room begins.
        on_host: where it begins in the host's.
    """
    primary = adapt.swaps if Tier.PRIMARY in sides else 0
    peer = adapt.peer_swaps if Tier.PEER in sides else 0
    native.start_swaps(adapt.every, primary, peer, adapt.decay)
    for tier, begin in sides.items():
        at = begin
        for size in sorted(set(slots)):
            for _ in range(SWAP_SPARES):
                native.add_spares(slots.index(size), tier, at, on_host)
                at, on_host = at + size, on_host + size


class DeviceHost:
    """The host behind the open doors of a native store: its threads, if there are any."""

    def __init__(self, native: Any, settings: HostSettings, note: str):
        self._native = native
        self._timeout_ms = settings.timeout_ms
        self.note = note
        """How misses are shared, a line for the user."""

    @classmethod
    def open(
        cls,
        native: Any,
        settings: HostSettings,
        slots: list[int],
        away: np.ndarray,
        in_file: np.ndarray,
    ) -> "DeviceHost":
        """Measures, and hands the host its experts; publish them afterwards.

        Args:
            native: the store, its doors open, all experts put.
            settings: see there; with threads if experts stay in the file.
            slots: bytes of an expert of each layer.
            away: bool [L, E], experts in the host's memory.
            in_file: bool [L, E], experts that stay in the file.
        """
        if settings.threads == 0:
            return cls(native, settings, "all misses are read over the link")
        native.start_host(settings.threads, settings.timeout_ms)
        if in_file.any():
            native.start_files(settings.threads, settings.timeout_ms)
        if settings.stream_share is None and away.any():
            counts, note = _measured(native, settings, slots, away)
        else:
            share = 0.0 if settings.stream_share is None else settings.stream_share
            counts = streamed_share(settings.num_active, share)
            note = f"{100 * share:.0f} % of a row's misses are read over the link"
        native.set_streamed(counts)
        for layer, expert in np.argwhere(away).tolist():
            native.set_tag(layer, expert, _HOST_TAG)
        note += f", the others computed by {settings.threads} threads of the host"
        return cls(native, settings, note)

    def recover(self) -> None:
        """After an abort: makes the threads fit for the next request, with no step under way.

        Raises:
            StrataError: if a thread is still lost.
        """
        if self._native.aborted() and not self._native.recover():
            raise StrataError(f"{self._silence()}, and one is still lost; open the model again")

    def before_window(self) -> None:
        """Wakes the threads."""
        self._native.wake()

    def check(self) -> None:
        """StrataError if a step gave up waiting for the threads: its results mean nothing."""
        if self._native.aborted():
            raise StrataError(
                f"{self._silence()}; ask again, and if that does not help do without them "
                "(--pcie_frac=1)"
            )

    def stall(self, milliseconds: int, timeout_ms: int) -> None:
        """For tests: the next letter is looked at so much later (0: now), and waits end that soon."""
        self._native.stall(milliseconds, timeout_ms)
        self._timeout_ms = timeout_ms

    def _silence(self) -> str:
        return f"expert tiers: the host's workers gave no sign of life for {self._timeout_ms} ms"


def _measured(
    native: Any, settings: HostSettings, slots: list[int], away: np.ndarray
) -> tuple[list[int], str]:
    layer = int(np.argmax(away.any(axis=1) * np.asarray(slots)))
    size = slots[layer]
    link_s = native.link_seconds_per_byte() * size
    count = min(_MEASURED, settings.num_active)
    host_s = native.host_seconds_per_expert(layer, count)
    counts = streamed_measured(settings.num_active, link_s, host_s)
    share = counts[-1] / settings.num_active
    link, host = (size / max(s, 1e-12) / 1e9 for s in (link_s, host_s))
    note = f"link {link:.1f} GB/s, host {host:.1f} GB/s (--pcie_frac=auto): "
    note += f"{100 * share:.0f} % of a row's misses are read over the link"
    return counts, note
