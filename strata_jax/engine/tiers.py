"""The expert tiers of an engine: planned from headers, opened, adapted between windows, saved."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from strata_jax import _native
from strata_jax.config import KvType, TierSettings
from strata_jax.engine.tier_files import TierFiles
from strata_jax.ops.native import CPU, Backend
from strata_jax.weights.budget import CUDA_RUNTIME_BYTES, StepSizes, host_memory, shown
from strata_jax.weights.device_experts import DeviceExperts, device_memory
from strata_jax.weights.device_host import HostSettings, host_threads
from strata_jax.weights.device_peer import PeerDevice, find_peer
from strata_jax.weights.draft_needs import DraftNeeds
from strata_jax.weights.experts import TIMEOUT_MS, AdaptSettings, ExpertTiers, shares
from strata_jax.weights.pack import Pack
from strata_jax.weights.placement import Tier
from strata_jax.weights.plan import make_plan
from strata_jax.weights.profile import Profile, load_profile, routed_model
from strata_jax.weights.read_ahead import read_ahead
from strata_jax.weights.tier_needs import TierPlan
from strata_jax.weights.tier_plan import Machine, plan_tiers


class EngineTiers:
    """Plan and tiers of one engine."""

    def __init__(
        self,
        pack: Pack,
        settings: TierSettings,
        plan: TierPlan,
        experts: ExpertTiers | DeviceExperts,
        profile: Profile | None,
    ):
        self.plan = plan
        self.experts = experts
        prior = () if profile is None else profile.ranked
        self.files = TierFiles(experts, routed_model(pack), settings.expert_profile_save, prior)
        """What the tiers leave in files."""

    @classmethod
    def open(
        cls,
        pack: Pack,
        store: _native.WeightStore | None,
        settings: TierSettings,
        max_context: int,
        kv: KvType,
        steps: StepSizes,
        report: Callable[[str], None],
        backend: Backend = CPU,
        draft: DraftNeeds | None = None,
    ) -> "EngineTiers":
        """Plans, then allocates and fills what the plan says.

        On a device that is everything its kernels read, matrices too; `store` is not used there.

        Raises:
            CapacityError: before anything is allocated, if the plan does not fit.
            UsageError, BadFileError: for settings or a profile that cannot be used.
        """
        profile = load_profile(pack, settings.expert_profile)
        peer = find_peer(settings, backend) if backend.is_device else None
        machine = _machine(backend, settings.peer_device, peer)
        sizes = make_plan(pack, max_context, kv)
        plan = plan_tiers(pack, sizes, settings, machine, steps=steps, profile=profile, draft=draft)
        plan.check()
        peer_swaps = settings.peer_adapt_swaps
        adapt = AdaptSettings(
            every=settings.adapt_every,
            swaps=settings.adapt_swaps if plan.cache_is_on and plan.primary_moves else 0,
            peer_swaps=(settings.adapt_swaps if peer_swaps == -1 else peer_swaps)
            if plan.peer_is_on and plan.peer_moves
            else 0,
            decay=settings.adapt_decay,
        )
        if store is None:
            plan = _on_device(settings, plan)
            host = _host_settings(pack, settings, plan, steps, adapt)
            experts = DeviceExperts.open(pack, plan, host, backend, report, peer=peer)
            return cls(pack, settings, plan, experts, profile)
        read_ahead(pack, machine.host.available_bytes * 3 // 4, report)
        experts = ExpertTiers.open(
            store,
            plan.placement,
            adapt,
            ram_is_short=settings.resident_budget_gib is not None,
            peer_threads=1,
            # On the CPU the host's experts are computed by the ops' own threads unless told otherwise.
            host_threads=settings.pool_workers,
            stream_share=settings.stream_share(machine.platform),
            report=report,
        )
        return cls(pack, settings, plan, experts, profile)

    def counters(self, since: dict[str, int] | None = None) -> dict[str, Any]:
        """Counters since `since` (or the start), shares of the tiers and hit rate for reports.

        `bytes_read`, from the file, is None on a GPU: its threads read where pages are mapped, uncounted.
        """
        now = self.experts.counters()
        counts = {name: value - (since or {}).get(name, 0) for name, value in now.items()}
        parts = shares(counts)
        hit_rate = None if parts is None else parts["primary"] + parts["peer"]
        return {"bytes_read": None, **counts, "shares": parts, "hit_rate": hit_rate}

    def after_step(self) -> None:
        """Writes what is due; see `TierFiles.after_step`."""
        self.files.after_step()

    def close(self) -> None:
        """Writes what is left and stops the workers.

        Raises:
            StrataError: if something could not be written; all is closed then, too.
        """
        try:
            self.files.close()
        finally:
            self.experts.close()


def _host_settings(
    pack: Pack, settings: TierSettings, plan: TierPlan, steps: StepSizes, adapt: AdaptSettings
) -> HostSettings:
    """How the host takes part in what the card does not hold: where RAM is short, as little as can be."""
    threads, share = host_threads(settings.pool_workers), settings.pcie_frac
    if share == 1.0 or not _fits_twice(plan):
        share = 1.0
        threads = threads if plan.placement.count(Tier.FILE) else 0
    return HostSettings(
        window_rows=steps.window_rows,
        num_active=pack.config.num_experts_active,
        width=pack.config.hidden,
        threads=threads,
        stream_share=share,
        timeout_ms=TIMEOUT_MS,
        adapt=adapt,
    )


def _fits_twice(plan: TierPlan) -> bool:
    """Whether RAM holds the experts off the card as panels and as the file's rows."""
    host = next(need for need in plan.needs if need.name == "host")
    away = plan.placement.total_bytes(Tier.HOST)
    return host.have_bytes is None or host.need_bytes + away <= host.have_bytes


def _on_device(settings: TierSettings, plan: TierPlan) -> TierPlan:
    """The plan with what a user of a GPU should know."""
    away = plan.placement.total_bytes(Tier.HOST)
    notes = list(plan.notes)
    if in_file := plan.placement.count(Tier.FILE):
        notes.append(
            f"experts: {in_file} ({shown(plan.placement.total_bytes(Tier.FILE))}) stay in the file: in "
            "windows the host's threads compute them, and every "
            f"{'chunk' if plan.ring_slots else 'tile'} of a prompt reads them all; more RAM or more "
            "device memory makes that faster"
        )
    if away and settings.pcie_frac != 1.0:
        notes.append(
            f"host: {shown(away)} of experts are off the card, in RAM twice: as panels that the GPU "
            "reads, and as the file's rows for the host's threads"
            if _fits_twice(plan)
            else f"host: RAM has no room for {shown(away)} of experts twice (panels, and the file's "
            "rows), so the GPU reads all misses over its link"
        )
    return dataclasses.replace(plan, notes=tuple(notes))


def _machine(backend: Backend, number: int | str | None, peer: PeerDevice | None) -> Machine:
    if not backend.is_device:
        return Machine(platform="cpu", host=host_memory())
    free = device_memory(backend).free_bytes
    if backend.name == "cuda":
        # XLA took its share when it started; the plan counts it with what it is for.
        free += (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 0)
    count, peer_free = backend.library.device_count(), None
    if isinstance(number, int) and number < count:
        peer_free = device_memory(backend, number).free_bytes
    return Machine(
        platform="cuda",
        host=host_memory(),
        primary_free_bytes=free,
        peer_free_bytes=peer_free,
        peer_is_reached=peer is not None and peer.is_reached,
        num_devices=count,
        runtime_bytes=CUDA_RUNTIME_BYTES if backend.name == "cuda" else 0,
    )
