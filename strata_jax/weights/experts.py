"""Python's hold on the native expert tiers: placed, filled, adapting between windows, counted."""

import dataclasses
import time
from collections.abc import Callable
from typing import Self

import numpy as np

from strata_jax import _native
from strata_jax.errors import StrataError
from strata_jax.ops.roles import Role
from strata_jax.weights.placement import Placement, Tier

_ROLES = (Role.FFN_GATE_EXPS, Role.FFN_UP_EXPS, Role.FFN_DOWN_EXPS)
_FILL_BYTES = 64 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaptSettings:
    """When and how far residency follows use (reference-engine.md, section 2.7)."""

    every: int
    """Windows between two rounds."""
    swaps: int
    """Most swaps of a round on the primary; 0 = frozen."""
    peer_swaps: int
    decay: float
    """What a round multiplies the use counted so far by."""


class ExpertTiers:
    """Where every expert is. Open it after the store is filled, close it before the store."""

    def __init__(self, native: _native.ExpertTiers, adapt: AdaptSettings):
        self._native = native
        self._adapt = adapt
        self._windows = 0

    @classmethod
    def open(
        cls,
        store: _native.WeightStore,
        placement: Placement,
        adapt: AdaptSettings,
        *,
        ram_is_short: bool,
        peer_threads: int,
        host_threads: int,
        stream_share: float,
        report: Callable[[str], None],
    ) -> Self:
        """Allocates the arenas, places every expert and copies those that have a slot.

        With `ram_is_short` an expert that leaves a device goes back to the file tier, not to the host's.

        Raises:
            StrataError: if the memory of an arena is not to be had.
        """
        try:
            native = _native.ExpertTiers(
                store,
                _ROLES,
                len(placement.tiers),
                placement.primary_bytes,
                placement.peer_bytes,
                peer_threads,
                host_threads,
                stream_share,
            )
        except ValueError as error:
            raise StrataError(str(error)) from None
        native.place(placement.tiers, placement.slots, _homes(placement, ram_is_short))
        _fill(native, placement, report)
        _lock(native, placement, report)
        return cls(native, adapt)

    @property
    def slot(self) -> int:
        """Number in the native registry, an attribute of the compiled programs."""
        return self._native.slot

    def before_window(self) -> None:
        """Waits for an adaptive round under way, so that its swaps never depend on timing."""
        self._native.finish_adapt()

    def after_window(self) -> None:
        """Counts a window and begins an adaptive round when one is due; returns at once."""
        self._windows += 1
        moves = self._adapt.swaps > 0 or self._adapt.peer_swaps > 0
        if moves and self._windows % self._adapt.every == 0:
            self._native.start_adapt(self._adapt.swaps, self._adapt.peer_swaps, self._adapt.decay)

    def counters(self) -> dict[str, int]:
        """Totals since the start; see `ffi/weights/expert_tiers.h`."""
        return self._native.counters()

    def tiers(self) -> np.ndarray:
        """Tier of every expert now, uint8 [L, E]."""
        return self._native.tiers()

    def usage(self) -> np.ndarray:
        """Decayed use of every expert, float32 [L, E]. Call between rounds."""
        self._native.finish_adapt()
        return self._native.usage()

    def audit(self) -> list[str]:
        """Compares every slot with the file; one line for each fault."""
        self._native.finish_adapt()
        return self._native.audit()

    def record_routing(self, on: bool) -> None:
        """Keeps the routed ids of every call until `take_routing`."""
        self._native.set_recording(on)

    def take_routing(self) -> list[tuple[int, np.ndarray]]:
        """(layer, ids [T, A]) of every call since the last time, in order."""
        flat = self._native.take_records()
        records, at = [], 0
        while at < len(flat):
            layer, rows, active = (int(x) for x in flat[at : at + 3])
            at += 3
            records.append((layer, flat[at : at + rows * active].reshape(rows, active)))
            at += rows * active
        return records

    def close(self) -> None:
        """Stops the workers and frees the arenas."""
        self._native.close()


def _homes(placement: Placement, ram_is_short: bool) -> np.ndarray:
    """Where an expert is when no device holds it, uint8 [L, E]."""
    from_file = placement.tiers == Tier.FILE
    if ram_is_short:
        from_file = placement.tiers != Tier.HOST
    return np.where(from_file, np.uint8(Tier.FILE), np.uint8(Tier.HOST))


def _fill(native: _native.ExpertTiers, placement: Placement, report: Callable[[str], None]) -> None:
    total = placement.primary_bytes + placement.peer_bytes
    if total == 0:
        return
    count = placement.tiers.size
    step = max(1, count * _FILL_BYTES // max(total, 1))
    done = 0
    for first in range(0, count, step):
        done += native.fill(first, step)
        report(f"filling expert slots: {done / 2**20:.0f} of {total / 2**20:.0f} MiB")


def _lock(native: _native.ExpertTiers, placement: Placement, report: Callable[[str], None]) -> None:
    wanted = placement.locked_bytes
    if wanted == 0:
        return
    marks = np.ascontiguousarray(placement.locked, np.uint8)
    start, locked = time.monotonic(), 0
    step = max(1, placement.tiers.size * _FILL_BYTES // max(placement.total_bytes(Tier.HOST), 1))
    for first in range(0, placement.tiers.size, step):
        locked += native.lock(marks, first, step)
        report(f"locking host experts: {locked / 2**20:.0f} of {wanted / 2**20:.0f} MiB")
    took = time.monotonic() - start
    line = f"host tier: {locked / 2**20:.1f} MiB page-locked in {took:.1f} s"
    if locked < wanted:
        line += f" of {wanted / 2**20:.1f} wanted; ulimit -l raises the system's limit"
    report(line)


def shares(counters: dict[str, int]) -> dict[str, float] | None:
    """Part of the routed entries each tier computed; they add up to 1. None if nothing was routed."""
    names = ("primary", "peer", "stream", "host", "file")
    total = sum(counters[f"entries_{name}"] for name in names)
    if total == 0:
        return None
    return {name: counters[f"entries_{name}"] / total for name in names}
