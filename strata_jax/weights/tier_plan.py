"""Plans the tiers of a model on a machine: from headers, settings and free memory to a placement."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from strata_jax.config import LOOPBACK, KvType, NgramIo, TierSettings
from strata_jax.errors import CapacityError, UsageError
from strata_jax.weights.budget import (
    GIB,
    MIB,
    StepSizes,
    choose_chunk,
    lockable_experts,
    peer_result_bytes,
    reserve_bytes,
    shown,
    stream_slots,
    swap_spare_bytes,
    workspace_bytes,
)
from strata_jax.weights.draft_needs import DraftNeeds
from strata_jax.weights.idle_flags import idle_flags
from strata_jax.weights.machine import Machine
from strata_jax.weights.matrices import matrices_of
from strata_jax.weights.ngram_table import choose_io
from strata_jax.weights.pack import Pack
from strata_jax.weights.panels import expert_slot_bytes
from strata_jax.weights.peer_needs import PeerNeeds
from strata_jax.weights.placement import (
    ArenaBudget,
    Placement,
    PlacementRequest,
    Tier,
    file_stage_bytes,
    place,
    slot_bytes,
)
from strata_jax.weights.plan import Plan, expert_bytes_by_layer
from strata_jax.weights.prefill_ring import can_stream, stager_bytes
from strata_jax.weights.profile import Profile
from strata_jax.weights.prompt_plan import PromptPlan, chunk_choices, plan_prompts
from strata_jax.weights.tier_advice import Advisor
from strata_jax.weights.tier_needs import DRAFT_XLA, Need, TierPlan
from strata_jax.weights.tier_notes import device_notes, little_left, placement_notes

_HEADROOM_SHARE = 8
"""Auto leaves this part of the RAM to others, but no more than `_HEADROOM_BYTES`."""
_HEADROOM_BYTES = 2 * GIB


def plan_tiers(
    pack: Pack,
    plan: Plan,
    settings: TierSettings,
    machine: Machine,
    *,
    steps: StepSizes | None = None,
    profile: Profile | None = None,
    draft: DraftNeeds | None = None,
) -> TierPlan:
    """Places every expert and adds up what each memory has to hold.

    Nothing is allocated and no weight is read. What does not fit is in the result: call its `check`.

    Args:
        pack: the opened model.
        plan: its sizes.
        settings: of the tiers.
        machine: what there is.
        steps: sizes of the compiled programs; None for the defaults.
        profile: ranking for the first fill, of this model.
        draft: what drafts need; None = there are none.

    Raises:
        UsageError: for a peer that the machine has not.
    """
    settings.check_devices(machine.platform, machine.num_devices)
    return _Planner(pack, plan, settings, machine, steps or StepSizes(), profile, draft).plan()


_MEMORY_FLAG = {"primary": "device_memory_mib", "peer": "peer_memory_mib"}
_RESERVE_FLAG = {"primary": "vram_reserve_mib", "peer": "peer_reserve_mib"}
_SPARE_SHARE = 4
"""Spare room for swaps is at most this part of what a GPU has for experts."""


class _Planner:
    """The steps of `plan_tiers`, with what they share."""

    def __init__(
        self,
        pack: Pack,
        plan: Plan,
        settings: TierSettings,
        machine: Machine,
        steps: StepSizes,
        profile: Profile | None,
        draft: DraftNeeds | None,
        is_trial: bool = False,
    ) -> None:
        self.settings = settings
        self.trial = None
        if not is_trial:
            self.trial = lambda changed: _Planner(
                pack, plan, changed, machine, steps, profile, draft, is_trial=True
            )
        self.machine = machine
        self.config = pack.config
        self.profile = profile
        self.emulated = machine.platform == "cpu"
        self.loopback = settings.peer_device == LOOPBACK and not self.emulated
        self.peer_free = machine.peer_free_bytes  # of a loopback peer: what the primary leaves
        asked, free = settings.device_memory_mib, machine.primary_free_bytes
        memory = free if free is None or asked is None else min(free, asked * MIB)
        steps = dataclasses.replace(steps, on_gpu=not self.emulated)
        self.has_expert_tiles = False
        layers = self._expert_bytes(pack)
        self.notes = list(idle_flags(settings, machine.platform))
        self.peer = PeerNeeds(settings, machine, self.has_expert_tiles)
        self.kv: KvType = plan.kv
        # Whether the primary computes all that is neither resident nor the peer's.
        self.may_stream = not self.emulated and not self.peer.is_by_windows
        self.asked, self.memory = steps, memory if self.may_stream else None
        self.steps = choose_chunk(self.config, steps, self.memory)
        self.draft = draft
        self.cache_is_on = settings.cache_is_on(machine.platform)
        self.max_context = plan.max_context
        self.kv_per_token = plan.kv_bytes // plan.max_context
        sizes = {tier.name: tier.bytes for tier in plan.tiers}
        self.ngram_bytes = sizes["ngram"]
        self.ngram_io: NgramIo = self._choose_io()
        self.fixed = {
            "dense": sizes["dense"] + sizes["embedding"],
            "kv": plan.kv_bytes,
            "state": plan.state_bytes,
        }
        if machine.runtime_bytes:
            self.fixed["runtime"] = machine.runtime_bytes
        if settings.peer_device is not None and not self.emulated:
            self.fixed["peer rows"] = peer_result_bytes(self.config, self.steps)
        if draft is not None:
            self.fixed |= {"draft": draft.weight_bytes}
        self._use_chunk(self.steps)
        shape = (self.config.num_layers, self.config.num_experts)
        self.expert_bytes = np.broadcast_to(np.asarray(layers, np.int64)[:, None], shape)
        self.largest_slot = int(slot_bytes(self.expert_bytes).max())
        self.staging, self.peer.staging = self._staging_bytes()

    def _use_chunk(self, steps: StepSizes) -> None:
        self.steps = steps
        self.peer.size(self.config, steps, self.max_context, self.kv)
        self.fixed["workspace"] = self._workspace_bytes(self.max_context)
        if self.draft is not None:
            self.fixed[DRAFT_XLA] = self.draft.xla_bytes_of(steps)

    def _choose_io(self) -> NgramIo:
        settings, memory = self.settings, self.machine.host.available_bytes
        if settings.host_ram_limit_gib is not None:
            memory = min(memory, int(settings.host_ram_limit_gib * GIB))
        return choose_io(settings.ple_io, self.ngram_bytes, memory, is_device=not self.emulated)

    def _staging_bytes(self) -> tuple[int, int]:
        """Room beside the slots of primary and peer: for streamed copies, or for swaps on a GPU."""
        settings = self.settings
        if self.emulated:
            share = settings.stream_share(self.machine.platform)
            return stream_slots(self.config.num_experts, share) * self.largest_slot, 0
        peer_swaps = settings.peer_adapt_swaps
        if peer_swaps == -1:
            peer_swaps = settings.adapt_swaps
        primary = peer = 0
        if self.cache_is_on and settings.adapt_swaps > 0:
            fixed = sum(self.fixed.values())
            primary = self._spare_bytes("primary", self.machine.primary_free_bytes, fixed)
        if settings.peer_device is not None and peer_swaps > 0:
            free = None if self.loopback else self.machine.peer_free_bytes
            peer = self._spare_bytes("peer", free, self.peer.workspace)
        return primary, peer

    def _spare_bytes(self, name: str, free: int | None, fixed: int) -> int:
        """Room for experts that change places; none where it would take too much of the slots'."""
        wanted = swap_spare_bytes(slot_bytes(self.expert_bytes[:, 0]).tolist())
        asked = getattr(self.settings, _MEMORY_FLAG[name])
        memory = free if asked is None else asked * MIB if free is None else min(free, asked * MIB)
        if memory is None:
            return wanted
        room = max(0, memory - fixed - self._reserve(_RESERVE_FLAG[name], memory))
        if wanted <= room // _SPARE_SHARE:
            return wanted
        self.notes.append(
            f"{name}: experts do not move there: {shown(wanted)} of spare room are too much of the "
            f"{shown(room)} for experts"
        )
        return 0

    def _expert_bytes(self, pack: Pack) -> Sequence[int]:
        """Bytes of an expert of each layer: as in the file, or as a device lays it out."""
        layers = range(self.config.num_layers)
        if self.emulated:
            return expert_bytes_by_layer(pack)[: len(layers)]
        matrices = list(matrices_of(pack))
        self.has_expert_tiles = can_stream(matrices)
        return [expert_slot_bytes(matrices, layer) for layer in layers]

    def plan(self) -> TierPlan:
        """Devices first, then what they leave to the host."""
        request, placement, prompt = self._with_prompts()
        host = self._host_parts(placement, prompt)
        request, placement = self._split_ram(request, placement, host, prompt.ring_slots)
        needs = [
            *self._device_needs(request, placement),
            *self._host_needs(request, host, placement),
        ]
        self.notes += device_notes(self.settings, self.machine.platform, needs, placement)
        self.notes += placement_notes(self.settings, self.machine.platform, self.config, placement)
        if self.ngram_bytes == 0 and "ple_io" in self.settings.given:
            self.notes.append("--ple_io: no effect, the model has no n-gram table")
        return TierPlan(
            needs=tuple(needs),
            placement=placement,
            ngram_io=self.ngram_io if self.ngram_bytes else None,
            steps=self.steps,
            prompt=prompt,
            cache_is_on=self.cache_is_on,
            peer_is_on=request.peer is not None,
            peer_part=self.peer.part,
            primary_moves=self.emulated or self.staging > 0,
            peer_moves=self.emulated or self.peer.staging > 0,
            notes=tuple(dict.fromkeys([*self.notes, *self.peer.notes, *placement.notes])),
        )

    def _split_ram(
        self, request: PlacementRequest, placement: Placement, host: dict[str, int], ring: int
    ) -> tuple[PlacementRequest, Placement]:
        """Which experts stay in RAM; a GPU's tiles want room there for a part of the others, too."""
        told, staging = len(self.notes), host.get("staging", 0)
        while True:
            del self.notes[told:]
            others = sum(host.values())
            request = dataclasses.replace(
                request,
                resident_bytes=self._resident_bytes(placement, others),
                lock_bytes=self._lock_bytes(placement, others),
            )
            placed = place(request)
            stage = 0 if self.emulated else file_stage_bytes(placed.tiers, self.expert_bytes)
            if stage:
                stage += stager_bytes(ring, self.largest_slot)
            if staging + stage <= host.get("staging", 0):
                return request, placed
            host["staging"] = staging + stage  # which leaves less for experts: once more

    def _placed(self) -> tuple[PlacementRequest, Placement]:
        request = self._request()
        placement = place(request)
        if request.peer is not None and request.peer.memory_bytes is None:
            request = self._bound_peer(request, self._peer_memory(request, placement.primary_bytes))
            placement = place(request)
        return request, placement

    def _with_prompts(self) -> tuple[PlacementRequest, Placement, PromptPlan]:
        """Placement and prompts together: who has too few slots lends some, and then larger chunks fit."""
        request, placement = self._placed()
        if not self.may_stream or not self.has_expert_tiles:
            return request, placement, PromptPlan()
        prompt = None
        for steps in chunk_choices(self.config, self.asked, self.steps, self.memory):
            self._use_chunk(steps)
            request, placement = self._placed()
            assert request.primary is not None
            if request.peer is not None:
                host = placement.tiers == Tier.HOST
                self.peer.choose_ring(host, self.largest_slot, request.peer.memory_bytes)
            prompt = plan_prompts(
                self.config,
                self.settings,
                self.peer.part,
                steps,
                request.primary,
                placement,
                ram_bytes=self._lock_bytes(placement, self.staging + self._locked_table_bytes()),
                is_certain=bool(self.asked.lends),
            )
            if prompt is not None:
                break
        assert prompt is not None, "the last choice borrows nothing"
        if prompt.owned_bytes or self.peer.ring:
            self.fixed["prefill ring"] = prompt.owned_bytes
            request, placement = self._placed()
        self.notes += prompt.notes(self.settings, self.peer.part, placement)
        return request, placement, prompt

    def _request(self) -> PlacementRequest:
        settings, primary, peer = self.settings, None, None
        if self.cache_is_on or settings.device_memory_mib is not None or not self.emulated:
            memory = self._memory("device_memory_mib", self.machine.primary_free_bytes)
            reserve = self._reserve("vram_reserve_mib", memory)
            primary = ArenaBudget(
                memory_bytes=memory,
                reserved_bytes=sum(self.fixed.values()) + self.staging + reserve,
                exactly=settings.expert_cache,
            )
        if settings.peer_device is not None:
            memory = None  # of a loopback peer: what the primary leaves, which is not known yet
            if not self.loopback:
                memory = self._memory("peer_memory_mib", self.machine.peer_free_bytes)
            reserve = self._reserve("peer_reserve_mib", memory)
            peer = ArenaBudget(
                memory_bytes=memory,
                reserved_bytes=self.peer.fixed + reserve,
                at_most=settings.peer_slots or None,
            )
        return PlacementRequest(
            expert_bytes=self.expert_bytes,
            ranking=None if self.profile is None else self.profile.ranked,
            primary=primary,
            peer=peer,
            fill_all=settings.expert_cache_fill_all,
        )

    def _memory(self, name: str, free: int | None) -> int | None:
        """What a flag allows, but no more than is free; None if nothing bounds it."""
        asked = getattr(self.settings, name)
        if asked is None:
            return free
        if free is not None and asked * MIB > free:
            self.notes.append(f"--{name}={asked}: {shown(free)} are free, that much is used")
            return free
        return asked * MIB

    def _reserve(self, name: str, memory: int | None) -> int:
        """Bytes to leave free; a count that was asked for gives way to a reserve only if given."""
        is_given = name in self.settings.given
        counted = name == "vram_reserve_mib" and self.settings.expert_cache is not None
        if memory is None or (counted and not is_given):
            return 0
        return reserve_bytes(getattr(self.settings, name), is_given, memory)

    def _peer_memory(self, request: PlacementRequest, primary_bytes: int) -> int:
        """Of a peer that shares the memory it is in: what nothing else there needs."""
        if self.loopback:
            assert request.primary is not None
            assert self.machine.primary_free_bytes is not None
            taken = request.primary.reserved_bytes + primary_bytes
            self.peer_free = max(0, self.machine.primary_free_bytes - taken)
            return self._memory("peer_memory_mib", self.peer_free) or 0
        copied = primary_bytes + self.staging + self._locked_table_bytes()
        others = sum(self.fixed.values()) + copied
        memory = max(0, self.machine.host.available_bytes - others - self._headroom_bytes())
        if self.settings.host_ram_limit_gib is not None:
            limit = int(self.settings.host_ram_limit_gib * GIB)
            memory = min(memory, max(0, limit - copied))
        self.notes.append(
            f"peer: emulated in {shown(memory)} of free RAM; --peer_memory_mib=N or --peer_slots=N "
            "bound it"
        )
        return memory

    def _bound_peer(self, request: PlacementRequest, memory: int) -> PlacementRequest:
        assert request.peer is not None
        is_given = "peer_reserve_mib" in self.settings.given
        reserve = self._reserve("peer_reserve_mib", memory) if is_given else 0
        spare = self.peer.staging
        if self.loopback and spare:  # only now it is known of how much that is
            self.peer.staging = self._spare_bytes("peer", memory, self.peer.workspace)
        peer = dataclasses.replace(
            request.peer,
            memory_bytes=memory,
            # The memory it shares has a reserve of its own.
            reserved_bytes=request.peer.reserved_bytes + reserve + self.peer.staging - spare,
        )
        return dataclasses.replace(request, peer=peer)

    def _host_parts(self, placement: Placement, prompt: PromptPlan) -> dict[str, int]:
        """What is in RAM beside experts of the host tier."""
        table = {"n-gram table": self._locked_table_bytes()}
        if not self.emulated:
            moves = self.staging + self.peer.staging if placement.count(Tier.HOST) else 0
            return {"staging": moves + prompt.home_bytes(placement), **table}
        arenas = {"primary arena": placement.primary_bytes, "peer arena": placement.peer_bytes}
        return {**self.fixed, **arenas, "staging": self.staging, **table}

    def _locked_table_bytes(self) -> int:
        return self.ngram_bytes if self.ngram_io == "ram" else 0

    def _headroom_bytes(self) -> int:
        return min(self.machine.host.total_bytes // _HEADROOM_SHARE, _HEADROOM_BYTES)

    def _resident_bytes(self, placement: Placement, others: int) -> int:
        """Expert bytes that stay in RAM: as given, but no more than there is."""
        free = max(0, self.machine.host.available_bytes - others - self.largest_slot)
        asked = self.settings.resident_budget_gib
        if asked is None:
            room, wanted = max(0, free - self._headroom_bytes()), placement.total_bytes(Tier.HOST)
            if room < wanted:
                self.notes.append(
                    f"host tier: {shown(room)} of RAM are free for {shown(wanted)} of experts, the "
                    "lowest ranked are read from the file; --resident_budget_gib=N decides how many"
                )
            return self._lockable_on_gpu(room, placement, others)
        if asked * GIB > free:
            self.notes.append(
                f"--resident_budget_gib={asked:g}: {shown(free)} of RAM are free, that much is used"
            )
        return self._lockable_on_gpu(int(min(asked * GIB, free)), placement, others)

    def _lockable_on_gpu(self, room: int, placement: Placement, others: int) -> int:
        """Of so many bytes those that may be page-locked, as all are that a GPU reads."""
        return room if self.emulated else min(room, self._lock_bytes(placement, others))

    def _lock_bytes(self, placement: Placement, others: int) -> int:
        """Bytes of host experts to page-lock: within the limits, as many as there are."""
        host, limit = self.machine.host, self.settings.host_ram_limit_gib
        if self.emulated and limit is None and not self.cache_is_on:
            return 0  # nothing copies from there: the page cache may give way to others
        bounds = [max(0, host.available_bytes - others)]
        table = self._locked_table_bytes()
        if limit is not None:
            if limit * GIB > host.total_bytes:
                self.notes.append(
                    f"--host_ram_limit_gib={limit:g}: this machine has {shown(host.total_bytes)}"
                )
            copied = placement.primary_bytes + placement.peer_bytes + self.staging
            bounds.append(int(limit * GIB) - (copied + table if self.emulated else others))
        if self.emulated and host.lockable_bytes is not None:
            smallest = int(self.expert_bytes.min())
            bounds.append(lockable_experts(host.lockable_bytes - table, smallest))
        return max(0, min(bounds))

    def _advisor(self) -> Advisor:
        free = self.machine.primary_free_bytes, self.peer_free
        return Advisor(
            self.settings,
            self.max_context,
            self._context_bytes,
            None if self.emulated else free,
            None if self.trial is None else self._would_fit,
        )

    def _would_fit(self, name: str, settings: TierSettings) -> bool:
        """Whether that memory would do with other settings."""
        assert self.trial is not None
        try:
            needs = self.trial(settings).plan().needs
        except (UsageError, CapacityError):  # flags that do not go together, or no plan at all
            return False
        return all(need.fits for need in needs if need.name == name)

    def _workspace_bytes(self, context: int) -> int:
        return workspace_bytes(self.config, self.steps, context, self.kv_per_token)

    def _context_bytes(self, context: int) -> int:
        """What depends on the context, of a context of so many tokens."""
        return self.kv_per_token * context + self._workspace_bytes(context)

    def _device_needs(self, request: PlacementRequest, placement: Placement) -> list[Need]:
        needs = []
        advice = self._advisor()
        if request.primary is not None:
            fixed = sum(self.fixed.values()) + self.staging
            parts = {
                **self.fixed,
                "staging": self.staging,
                "reserve": request.primary.reserved_bytes - fixed,
                "experts": placement.primary_bytes,
            }
            needs.append(advice.primary(request, parts))
            self.notes += little_left(self.settings, needs[-1])
        if request.peer is not None:
            parts = self.peer.parts(request.peer.reserved_bytes, placement.peer_bytes)
            needs.append(advice.peer(request, parts))
        return needs

    def _host_needs(
        self, request: PlacementRequest, host: dict[str, int], placement: Placement
    ) -> list[Need]:
        advice = self._advisor()
        parts = {**host, "experts": placement.total_bytes(Tier.HOST)}
        # One more copy, whether experts of the file tier are read or not.
        parts["staging"] = host.get("staging", 0) + self.largest_slot
        need = advice.host(request, parts, self.machine.host, placement)
        if need.fits and need.have_bytes is not None and need.need_bytes > need.have_bytes:
            self.notes.append(
                f"host: {shown(need.need_bytes)} are needed and {shown(need.have_bytes)} free; kept as "
                f"asked, the rest of {shown(self.machine.host.total_bytes)} must be given up by others"
            )
        needs = [need]
        if self.settings.host_ram_limit_gib is not None:
            copied = {name: host[name] for name in host if name not in self.fixed}
            needs.append(advice.locked({**copied, "experts": placement.locked_bytes}))
        return needs
