"""Python's hold on the native expert tiers: placed, filled, adapting between windows, counted."""

import dataclasses
import time
from collections.abc import Callable
from typing import Self

import numpy as np

from strata_jax import _native
from strata_jax.errors import StrataError
from strata_jax.ops.roles import Role
from strata_jax.weights.budget import stream_slots
from strata_jax.weights.placement import Placement, Tier

_ROLES = (Role.FFN_GATE_EXPS, Role.FFN_UP_EXPS, Role.FFN_DOWN_EXPS)
_FILL_BYTES = 64 << 20
TIMEOUT_MS = 60_000
"""Silence after which a worker is given up. Each panel of 16 weight rows is a sign of life."""


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
        self._last_counters: dict[str, int] | None = None

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
        timeout_ms: int = TIMEOUT_MS,
    ) -> Self:
        """Allocates the arenas, places every expert and copies those that have a slot.

        With `ram_is_short` an expert that leaves a device goes back to the file tier, not to the host's.

        Args:
            store: where the matrices lie in the file.
            placement: tier and slot of every expert.
            adapt: when and how far residency follows use.
            ram_is_short: see above.
            peer_threads: of the emulated peer, if it has an arena.
            host_threads: that compute the host's experts beside the ops' own; 0 = the ops' own do.
            stream_share: of a call's missed experts, copied to the primary for this use.
            report: takes lines on progress.
            timeout_ms: silence after which the peer's or the host's workers are given up.

        Raises:
            StrataError: if the memory of an arena, or a thread, is not to be had.
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
                stream_slots(placement.tiers.shape[1], stream_share),
                timeout_ms,
            )
        except (ValueError, RuntimeError) as error:
            raise StrataError(str(error)) from None
        try:
            native.place(placement.tiers, placement.slots, _homes(placement, ram_is_short))
            _fill(native, placement, report)
            _lock(native, placement, report)
        except BaseException:
            native.close()
            raise
        return cls(native, adapt)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know beside the plan's notes: nothing."""
        return ()

    @property
    def store(self) -> int:
        """Of matrices that lie with the experts: none on the CPU."""
        return -1

    @property
    def slot(self) -> int:
        """Number in the native registry, an attribute of the compiled programs."""
        return self._native.slot

    def check(self) -> None:
        """StrataError saying why, if a worker was given up: nothing can be computed any more."""
        failure = self._native.failure()
        if failure:
            raise StrataError(f"expert tiers: {failure}")

    def recover(self) -> None:
        """Nothing: a worker that was given up stays so, and `check` says it."""

    def take_peer_marks(self) -> tuple[tuple[int, int], ...]:
        """None: see `take_marks`."""
        return ()

    def take_marks(self) -> tuple[tuple[int, int], ...]:
        """None: phases are a device's."""
        return ()

    def before_prompt(self) -> None:
        """Nothing: see `DeviceExperts.before_prompt`."""

    def before_tile(self, num_rows: int) -> None:
        """Nothing: on the CPU a tile reads experts where they lie."""

    def borrow_slots(self) -> None:
        """Nothing: nobody borrows slots on the CPU."""

    def give_slots_back(self) -> None:
        """Nothing: see `borrow_slots`."""

    def before_window(self) -> None:
        """Waits for an adaptive round under way, so that its swaps never depend on timing.

        Raises:
            StrataError: as `check` does.
        """
        self.check()
        self._native.finish_adapt()

    def after_window(self) -> None:
        """Counts a window and begins an adaptive round when one is due; returns at once."""
        self._windows += 1
        moves = self._adapt.swaps > 0 or self._adapt.peer_swaps > 0
        if moves and self._windows % self._adapt.every == 0:
            self._native.start_adapt(self._adapt.swaps, self._adapt.peer_swaps, self._adapt.decay)

    def counters(self) -> dict[str, int]:
        """Totals since the start, or what they were at `close`; see `ffi/weights/expert_tiers.h`.

        `entries_stream_frac` are those of `entries_stream` that `pcie_frac` chose: on the CPU all, on a
        GPU those of windows, for tiles stream whatever is not on the card.
        """
        if self._last_counters is not None:
            return self._last_counters
        counters: dict[str, int] = self._native.counters()
        return counters | {"entries_stream_frac": counters["entries_stream"]}

    def tiers(self) -> np.ndarray:
        """Tier of every expert now, uint8 [L, E]."""
        return self._native.tiers()

    def usage(self) -> np.ndarray:
        """Routed entries of every expert since the start, without decay, int64 [L, E]."""
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

    def stall(self, tier: Tier, milliseconds: int) -> None:
        """For tests: the next job of the peer's or the host's workers begins so much later; 0 ends it.

        Raises:
            ValueError: if that tier has no workers.
        """
        self._native.stall(tier, milliseconds)

    def close(self) -> None:
        """Stops the workers and frees the arenas.

        Workers that were given up and are stuck still get a second, or `timeout_ms` in the middle of
        a product; then they are left where they are with all they may look at but the model's file.
        """
        if self._last_counters is None:
            self._last_counters = self.counters()
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
