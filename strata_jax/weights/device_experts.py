"""A model's matrices and experts on a device (`ffi/cuda/device_store.h`): filled, counted, closed."""

import dataclasses
from collections.abc import Callable
from typing import Any, Self

import numpy as np

from strata_jax.errors import CapacityError, StrataError, UsageError
from strata_jax.ops.native import Backend
from strata_jax.ops.roles import EXPERT_ROLES, Role
from strata_jax.weights.budget import swap_spare_bytes
from strata_jax.weights.device_host import DeviceHost, HostSettings, sides_that_move, start_swaps
from strata_jax.weights.device_peer import PeerDevice
from strata_jax.weights.matrices import MatrixAt, matrices_of
from strata_jax.weights.pack import Pack
from strata_jax.weights.panels import EXPERT_PARTS, expert_slot_bytes, matrix_bytes
from strata_jax.weights.peer_prompts import PeerWay
from strata_jax.weights.placement import Placement, Tier, slot_bytes
from strata_jax.weights.prefill_ring import PATIENCE_MS, min_rows
from strata_jax.weights.tier_needs import TierPlan

_SHARED_ROLES = (Role.FFN_GATE_SHARED, Role.FFN_UP_SHARED, Role.FFN_DOWN_SHARED)
_HOMES = 7
"""`kEntryHomes` of ffi/cuda/expert_word.h."""
_NOT_MATRICES = EXPERT_ROLES | {Role.NGRAM_TABLE}
"""Roles that do not lie in the arena of matrices."""


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """Of one device."""

    free_bytes: int
    total_bytes: int


def device_memory(backend: Backend, number: int = 0) -> DeviceMemory:
    """What a device has now.

    Raises:
        StrataError: if there is no device that works.
    """
    try:
        return DeviceMemory(*backend.library.memory(number))
    except RuntimeError as error:
        raise StrataError(f"device {number}: {error}") from None


class DeviceExperts:
    """Everything the device's kernels read. Open it after planning; close it after the last step.

    An expert lies in a slot of the device's memory, or of the peer's, or in the host's, where the
    device reads it over the link or the host computes it (`device_host.py`), or stays in the file
    (`ffi/cuda/file_stage.h`): that shows in counters and speed, never in a result.
    """

    def __init__(
        self,
        native: Any,
        placement: Placement,
        experts: list[list[MatrixAt]],
        host: DeviceHost | None,
        peer: PeerDevice | None,
    ):
        self._native = native
        self._host = host
        self._peer = peer
        self._homes = np.zeros(_HOMES, np.int64)
        self._placement = placement
        self._experts = experts
        self._usage = np.zeros(placement.tiers.shape, np.int64)
        self._last: dict[str, int] | None = None
        self._is_lent = False  # whether slots may be: the library knows it

    @classmethod
    def open(
        cls,
        pack: Pack,
        plan: TierPlan,
        host: HostSettings,
        backend: Backend,
        report: Callable[[str], None],
        *,
        peer: PeerDevice | None,
    ) -> Self:
        """Allocates the arenas and copies every matrix and expert.

        Args:
            pack: the model.
            plan: tier of every expert (those without a slot go to the host's page-locked memory), and
                sizes of the compiled programs.
            host: how the host takes part, if there are such experts.
            backend: whose device.
            report: takes lines on progress.
            peer: whose slots hold the experts of the peer's tier, if there is one.

        Raises:
            CapacityError: if the memory is not to be had, with numbers.
        """
        placement = plan.placement
        matrices = list(matrices_of(pack))
        layers, experts = placement.tiers.shape
        parts = [_experts_of(matrices, layer) for layer in range(layers)]
        slots = [expert_slot_bytes(matrices, layer) for layer in range(layers)]
        away = placement.tiers == Tier.HOST
        in_file = placement.tiers == Tier.FILE
        host_bytes = int((away * np.asarray(slots)[:, None]).sum())
        fixed = [m for m in matrices if m.role not in _NOT_MATRICES]
        sides = sides_that_move(host.adapt, placement.tiers)
        spare = {tier: swap_spare_bytes(slots) if tier in sides else 0 for tier in Tier}
        homes = plan.prompt.home_bytes(placement)
        total = sum(m.count * matrix_bytes(m.type, m.rows, m.cols) for m in fixed)
        try:
            native = backend.library.DeviceStore(
                len(Role),
                layers,
                experts,
                total,
                placement.primary_bytes + spare[Tier.PRIMARY],
                host_bytes + homes + sum(spare.values()),
            )
        except RuntimeError as error:
            raise CapacityError(str(error)) from None
        try:
            if peer is not None or away.any() or in_file.any():
                native.open_doors(host.window_rows, host.num_active, host.width)
            if peer is not None:
                expert_bytes = placement.peer_bytes + spare[Tier.PEER]
                _open_peer(native, pack, peer, expert_bytes, plan)
            _put_matrices(native, fixed, total, report)
            _put_experts(native, parts, placement, slots, report)
            _lend_experts(native, plan, host_bytes)
            native.publish_experts()  # all is in place: what follows is measured
            doors = None
            if away.any() or in_file.any():
                doors = DeviceHost.open(native, host, slots, away, in_file)
            if sides:
                ends = {Tier.PRIMARY: placement.primary_bytes, Tier.PEER: placement.peer_bytes}
                begins = {tier: ends[tier] for tier in sides}
                start_swaps(native, host.adapt, slots, begins, host_bytes + homes)
            native.publish_experts()  # with tags, and addresses of what stays in the file
            _open_streams(native, backend.library, plan, host.threads)
            for layer in range(layers if peer is not None else 0):
                native.warm_peer(layer, _SHARED_ROLES)
        except RuntimeError as error:
            native.close()
            raise CapacityError(str(error)) from None
        except BaseException:
            native.close()
            raise
        return cls(native, placement, parts, doors, peer)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know, one line each."""
        notes = () if self._peer is None else (self._peer.note,)
        if self._host is not None:
            away = int(_without_slot(self._placement).sum())
            total = self._placement.tiers.size
            notes += (f"experts: {away} of {total} are on no GPU; {self._host.note}",)
        return notes

    @property
    def store(self) -> int:
        """Number in the library's registry, an attribute of the compiled programs."""
        return self._native.slot

    @property
    def slot(self) -> int:
        """Of expert tiers beside the store: none on a device."""
        return -1

    def check(self) -> None:
        """StrataError saying why, if a step gave up waiting for the host, the peer or copies."""
        if self._native.take_missed():
            raise StrataError(
                f"prompts: experts of the peer did not arrive for {PATIENCE_MS} ms; ask again, and if "
                "that does not help do without it (--peer_device=-1)"
            )
        if self._native.peer_aborted():
            raise StrataError(
                "expert tiers: the peer's rows of a layer did not come in time (on one card kernels "
                "must run side by side, which CUDA_DEVICE_MAX_CONNECTIONS=1 forbids); ask again, and if "
                "that does not help do without it (--peer_device=-1)"
            )
        if self._host is not None:
            self._host.check()

    def recover(self) -> None:
        """Makes the peer and the host's threads fit for the next request, if a step gave up waiting.

        Raises:
            StrataError: if a thread was lost and still is, or the device fails.
        """
        try:
            self._native.recover_peer()
        except RuntimeError as error:
            raise StrataError(str(error)) from None
        if self._host is not None:
            self._host.recover()

    def before_window(self) -> None:
        """Wakes the host's threads."""
        if self._host is not None:
            self._host.before_window()

    def open_timeline(self, capacity: int) -> None:
        """Room for marks of programs that are timed; before they are compiled."""
        self._native.open_timeline(capacity)

    def take_marks(self) -> tuple[tuple[int, int], ...]:
        """(nanoseconds, phase) of the marks since the last time; waits for the device."""
        return tuple(self._native.take_timeline())

    def borrow_slots(self) -> None:
        """Before a program that may use what prompts borrow, other than by `before_tile`.

        Raises:
            StrataError: if a copy failed.
        """
        self._is_lent = True
        try:
            self._native.borrow_slots()
        except RuntimeError as error:
            raise StrataError(str(error)) from None

    def give_slots_back(self) -> None:
        """Before a window, or whoever looks where experts are: fills slots that a prompt has borrowed.

        Raises:
            StrataError: if a copy failed; the next call tries again.
        """
        if not self._is_lent:
            return
        try:
            self._native.give_slots_back()
        except RuntimeError as error:
            raise StrataError(str(error)) from None
        self._is_lent = False

    def take_peer_marks(self) -> tuple[tuple[int, int], ...]:
        """The same of the peer's own timeline, by the clock of its device."""
        return tuple(self._native.take_peer_timeline())

    def before_prompt(self) -> None:
        """Forgets what a prompt before may have left unfinished."""
        self._native.begin_prompt()

    def before_tile(self, num_rows: int) -> None:
        """Lets the copies begin that a tile's or chunk's program of so many live rows needs.

        Raises:
            StrataError: if copies failed.
        """
        self._is_lent = True
        try:
            self._native.begin_pass(num_rows)
        except RuntimeError as error:
            raise StrataError(str(error)) from None

    def after_window(self) -> None:
        """Looks whether the window's results mean anything, and moves experts that are due.

        Raises:
            StrataError: as `check` does.
        """
        self.check()
        self._native.after_window()

    def counters(self) -> dict[str, int]:
        """Entries since the start by tier, as `weights/experts.py` names them. Waits for the device."""
        if self._last is not None:
            return self._last
        self._usage += np.asarray(self._native.take_usage(), np.int64).reshape(self._usage.shape)
        self._homes += np.asarray(self._native.take_homes(), np.int64)
        _, peer, windows, host, in_file, read_by_tiles, tiles = self._homes.tolist()
        streamed, ring = windows + tiles, self._native.ring_counts()
        peers_ring = self._native.peer_ring_counts()
        swaps, peer_swaps, swapped = self._native.swapped()
        # Kernels without doors count no homes: all is the primary's.
        primary = int(self._usage.sum()) - peer - streamed - host - in_file
        return {
            "entries_primary": primary,
            "entries_peer": peer,
            "entries_stream": streamed,
            "entries_stream_frac": windows,
            "entries_host": host,
            "entries_file": in_file,
            "bytes_swapped": swapped,
            "bytes_streamed": ring["bytes"]
            + peers_ring["bytes"]
            + int((windows + read_by_tiles) * self._placement.expert_bytes.mean()),
            "experts_streamed": ring["copied"] + peers_ring["copied"],
            "experts_unrouted": ring["unrouted"] + peers_ring["unrouted"],
            "experts_not_awaited": ring["given_up"] + peers_ring["given_up"],
            "peer_experts_streamed": peers_ring["copied"],
            "peer_bytes_streamed": peers_ring["bytes"],
            "peer_waits_us": peers_ring["waited_us"],
            "swaps_primary": swaps,
            "swaps_peer": peer_swaps,
            "waits_us": ring["waited_us"],
        }

    def tiers(self) -> np.ndarray:
        """Tier of every expert now, uint8 [L, E]."""
        self.give_slots_back()
        return np.reshape(self._native.tiers(), self._placement.tiers.shape).astype(np.uint8)

    def usage(self) -> np.ndarray:
        """Use of every expert since the start, float32 [L, E]."""
        self.counters()
        return self._usage.astype(np.float32)

    def audit(self) -> list[str]:
        """Compares every expert's bytes on the device with the file; one line for each fault."""
        self.give_slots_back()
        layers, experts = self._placement.tiers.shape
        found = [
            self._native.audit_expert(layer, expert, _addresses(self._experts[layer], expert))
            for layer in range(layers)
            for expert in range(experts)
        ]
        return [line for line in found if line]

    def stall(self, milliseconds: int, timeout_ms: int) -> None:
        """For tests: see `DeviceHost.stall`."""
        assert self._host is not None
        self._host.stall(milliseconds, timeout_ms)

    def record_routing(self, on: bool) -> None:
        """Refuses: a step that is replayed by the device tells nobody what it routed.

        Raises:
            UsageError: if it is to be on.
        """
        if on:
            raise UsageError(
                "--routing_out: not available on a GPU; --platform=cpu records routing"
            )

    def take_routing(self) -> list[tuple[int, np.ndarray]]:
        """Nothing: see `record_routing`."""
        return []

    def close(self) -> None:
        """Waits for the device and frees everything."""
        if self._last is None:
            self._last = self.counters()
        self._native.close()


def _without_slot(placement: Placement) -> np.ndarray:
    """Which experts no device holds, bool [L, E]."""
    return (placement.tiers != Tier.PRIMARY) & (placement.tiers != Tier.PEER)


def _open_peer(
    native: Any, pack: Pack, peer: PeerDevice, expert_bytes: int, plan: TierPlan
) -> None:
    assert plan.peer_part is not None
    native.open_peer(
        peer.number,
        peer.through_host,
        expert_bytes,
        max(pack.config.expert_width, pack.config.shared_width),
        plan.peer_part.most_rows(plan.steps),
    )


def _lend_experts(native: Any, plan: TierPlan, begin: int) -> None:
    """Second copies of the experts whose slots prompts borrow, from `begin` of the host's arena on."""
    sizes = slot_bytes(plan.placement.expert_bytes)
    for layer, expert in np.argwhere(plan.prompt.lent_experts(plan.placement)).tolist():
        native.lend_expert(layer, expert, begin)
        begin += int(sizes[layer, expert])


def _open_streams(native: Any, library: Any, plan: TierPlan, num_threads: int) -> None:
    """Lets prompts stream experts, and the peer take part in them."""
    part, steps = plan.peer_part, plan.steps
    least = min_rows(steps) if part is None else part.ring_min_rows(steps)
    if part is not None and part.way == PeerWay.COMPUTES:
        native.open_peer_tiles(steps.chunk_rows, part.ring_slots, part.share, least, PATIENCE_MS)
    if part is not None and part.attention is not None:
        native.open_peer_attention(library.PeerAttentionSizes(dict(part.attention)))
    if not plan.ring_slots:
        return
    prompt, lent_at = plan.prompt, -1
    if prompt.lent_bytes:
        lent_at = plan.placement.primary_bytes - prompt.lent_bytes
    native.open_ring(
        plan.ring_slots,
        least,
        PATIENCE_MS,
        num_threads,
        lent_at,
        prompt.scratch_bytes,
        steps.tile_rows,
    )


def _experts_of(matrices: list[MatrixAt], layer: int) -> list[MatrixAt]:
    """Gate, up and down of a layer's experts."""
    found = {m.role: m for m in matrices if m.layer == layer and m.role in EXPERT_PARTS}
    return [found[role] for role in EXPERT_PARTS]


def _addresses(parts: list[MatrixAt], expert: int) -> tuple[int, ...]:
    """Where an expert's matrices begin in the mapping."""
    return tuple(m.address_of(expert) for m in parts)


def _put_matrices(
    native: Any, matrices: list[MatrixAt], total: int, report: Callable[[str], None]
) -> None:
    done = 0
    for m in matrices:
        native.put(m.role, m.layer, m.type, m.count, m.rows, m.cols, m.stride, m.address)
        done += m.count * matrix_bytes(m.type, m.rows, m.cols)
        report(f"copying matrices to the device: {done >> 20} of {total >> 20} MiB")


def _put_experts(
    native: Any,
    parts: list[list[MatrixAt]],
    placement: Placement,
    slots: list[int],
    report: Callable[[str], None],
) -> None:
    layers, experts = placement.tiers.shape
    host_at, done = 0, 0
    for layer in range(layers):
        gate, up, down = parts[layer]
        native.put_expert_shape(layer, (gate.type, up.type, down.type), gate.rows, gate.cols)
        for expert in range(experts):
            tier = Tier(placement.tiers[layer, expert])
            if tier == Tier.FILE:
                native.put_file_expert(layer, expert, _addresses(parts[layer], expert))
                continue
            at, arena = int(placement.slots[layer, expert]), tier
            if tier not in (Tier.PRIMARY, Tier.PEER):
                at, arena = host_at, Tier.HOST
                host_at += slots[layer]
            native.put_expert(layer, expert, arena, at, _addresses(parts[layer], expert))
        done += experts * slots[layer]
        report(f"copying experts: layer {layer + 1} of {layers}, {done >> 20} MiB")
