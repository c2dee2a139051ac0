import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from strata_jax.errors import UsageError
from strata_jax.weights.budget import (
    GIB,
    MIB,
    HostMemory,
    StepSizes,
    peer_workspace_bytes,
    swap_spare_bytes,
)
from strata_jax.weights.matrices import matrices_of
from strata_jax.weights.pack import Pack, open_pack
from strata_jax.weights.panels import expert_slot_bytes
from strata_jax.weights.placement import Tier
from strata_jax.weights.plan import Plan, expert_bytes_by_layer, make_plan
from strata_jax.weights.profile import Profile, routed_model
from strata_jax.weights.tier_needs import TierPlan
from tests.weights.tier_plans import (
    ALL,
    EXPERTS,
    HOST,
    LAYERS,
    advised,
    fixed_bytes,
    make_pack_file,
    need_of,
    planner,
    problem_of,
)


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pack]:
    with open_pack(make_pack_file(tmp_path_factory.mktemp("model"))) as pack:
        yield pack


@pytest.fixture(scope="module")
def planned(pack: Pack) -> Callable[..., TierPlan]:
    return planner(pack)


@pytest.fixture(scope="module")
def plan(pack: Pack) -> Plan:
    return make_plan(pack, None)


def _counts(tiers: TierPlan) -> dict[str, int]:
    return {tier.name: tiers.placement.count(tier) for tier in Tier if tiers.placement.count(tier)}


def test_sizes_experts_by_layer(pack: Pack, planned):
    sizes = expert_bytes_by_layer(pack)

    assert len(sizes) == LAYERS + 1
    assert sizes[0] == 3 * 256 * 256 * 4
    assert sizes[1] == 3 * 256 * 256 // 256 * 110
    assert planned().placement.expert_bytes[:, 0].tolist() == list(sizes[:LAYERS])


def test_the_cpu_reads_experts_where_they_lie(planned):
    tiers = planned()

    tiers.check()
    assert [need.name for need in tiers.needs] == ["host"]
    assert _counts(tiers) == {"HOST": ALL}
    assert (tiers.cache_is_on, tiers.placement.locked_bytes) == (False, 0)
    assert tiers.notes[0].startswith("expert cache: off on the CPU, experts are read where they")


def test_a_count_is_kept(planned):
    tiers = planned(expert_cache=2 * LAYERS)

    assert _counts(tiers) == {"PRIMARY": 2 * LAYERS, "HOST": ALL - 2 * LAYERS}
    assert need_of(tiers, "primary").have_bytes is None
    assert need_of(tiers, "host").parts["primary arena"] == tiers.placement.primary_bytes > 0
    assert tiers.placement.locked_bytes == tiers.placement.total_bytes(Tier.HOST)


def test_auto_leaves_the_reserve(planned):
    fixed = fixed_bytes(planned(device_memory_mib=1000))
    memory = fixed // MIB + 14

    tiers = planned(device_memory_mib=memory, vram_reserve_mib=12)

    need = need_of(tiers, "primary")
    assert need.parts["reserve"] == 12 * MIB
    assert 0 < tiers.placement.count(Tier.PRIMARY) < ALL
    assert need.need_bytes <= memory * MIB
    assert (
        need_of(planned(device_memory_mib=memory), "primary").parts["reserve"] == memory * MIB // 8
    )


def test_fails_before_loading_and_names_the_least(planned):
    message = problem_of(planned(device_memory_mib=1))

    assert message.startswith("plan: primary needs ")
    assert "at most 1 MiB expected (--device_memory_mib=1)" in message
    least = int(advised(message, "device_memory_mib"))
    planned(device_memory_mib=least).check()
    assert not planned(device_memory_mib=least - 2).fits


def test_names_the_count_that_would_fit(planned):
    memory = fixed_bytes(planned(device_memory_mib=1000)) // MIB + 2

    message = problem_of(planned(device_memory_mib=memory, expert_cache=ALL))

    count = int(advised(message, "expert_cache"))
    assert 0 < count < ALL
    planned(device_memory_mib=memory, expert_cache=count).check()
    assert not planned(device_memory_mib=memory, expert_cache=count + 1).fits
    enough = int(advised(message, "device_memory_mib"))
    planned(device_memory_mib=enough, expert_cache=ALL).check()


def test_names_the_context_that_would_fit(planned):
    memory = fixed_bytes(planned(device_memory_mib=1000)) // MIB + 8

    message = problem_of(planned(device_memory_mib=memory, context=1 << 18))

    context = int(advised(message, "max_context"))
    assert 512 < context < 1 << 18
    planned(device_memory_mib=memory, context=context).check()


def test_names_both_where_neither_flag_alone_would_do(planned):
    memory = fixed_bytes(planned(device_memory_mib=1000)) // MIB + 2

    message = problem_of(planned(device_memory_mib=memory, context=1 << 18, expert_cache=ALL))

    assert " with --expert_cache=0 or --device_memory_mib=" in message
    context = int(advised(message, "max_context"))
    planned(device_memory_mib=memory, context=context, expert_cache=0).check()
    assert not planned(device_memory_mib=memory, context=context, expert_cache=ALL).fits


def test_names_the_reserve_that_would_fit(planned):
    memory = fixed_bytes(planned(device_memory_mib=1000)) // MIB + 8

    message = problem_of(planned(device_memory_mib=memory, vram_reserve_mib=memory - 1))

    reserve = int(advised(message, "vram_reserve_mib"))
    planned(device_memory_mib=memory, vram_reserve_mib=reserve).check()


def test_a_longer_context_costs_experts_not_the_answer(planned):
    memory = fixed_bytes(planned(device_memory_mib=1000)) // MIB + 7

    short = planned(device_memory_mib=memory)
    long = planned(device_memory_mib=memory, context=2048)

    assert short.fits
    assert long.fits
    assert long.placement.count(Tier.PRIMARY) < short.placement.count(Tier.PRIMARY)


@pytest.mark.parametrize("missing", [0, 1])
def test_a_byte_less_on_a_gpu_is_an_expert_less(planned, missing: int):
    """Reports 32 and 43: the workspace comes first, whatever is free."""
    still = {"platform": "cuda", "vram_reserve_mib": 0, "adapt_swaps": 0}
    full = planned(free=(GIB, None), **still)
    assert full.placement.count(Tier.PRIMARY) == ALL
    memory = fixed_bytes(full) + full.placement.primary_bytes - missing

    tiers = planned(free=(memory, None), **still)

    tiers.check()
    assert tiers.placement.count(Tier.PRIMARY) == ALL - missing


@pytest.mark.parametrize("missing", [0, 1])
def test_a_byte_less_on_the_peer_is_an_expert_less(pack: Pack, planned, missing: int):
    workspace = peer_workspace_bytes(pack.config, StepSizes())
    settings = {"expert_cache": ALL - 3, "peer_device": 1, "peer_reserve_mib": 0}
    sizes = planned(platform="cuda", free=(GIB, GIB), **settings).placement.peer_bytes

    tiers = planned(platform="cuda", free=(GIB, workspace + sizes - missing), **settings)

    tiers.check()
    assert tiers.placement.count(Tier.PEER) == 3 - missing


def test_a_peer_too_small_for_its_workspace_is_refused(planned):
    message = problem_of(planned(expert_cache=4, peer_device=1, peer_memory_mib=1))

    assert "peer needs" in message
    assert "(--peer_memory_mib=1)" in message
    assert "--peer_device=-1" in message
    least = int(advised(message, "peer_memory_mib"))
    planned(expert_cache=4, peer_device=1, peer_memory_mib=least).check()


def test_a_loopback_peer_takes_what_the_primary_leaves_of_its_device(planned):
    tiers = planned(platform="cuda", free=(GIB, None), expert_cache=4, peer_device="loopback")

    tiers.check()
    primary, peer = need_of(tiers, "primary"), need_of(tiers, "peer")
    assert _counts(tiers) == {"PRIMARY": 4, "PEER": ALL - 4}
    assert peer.have_bytes == GIB - primary.need_bytes
    assert primary.parts["peer rows"] > 0


def test_a_loopback_peer_takes_what_the_primary_leaves(planned):
    settings = {"platform": "cuda", "peer_device": "loopback", "vram_reserve_mib": 0}
    fixed = fixed_bytes(planned(free=(GIB, None), adapt_swaps=0, **settings))
    more, less = (planned(free=(fixed + n, None), **settings) for n in (16 * MIB, 10_000))

    more.check()  # without room for swaps, as little is left
    assert need_of(more, "peer").parts["staging"] == 0
    assert "--peer_device=-1" in problem_of(less)


def test_a_loopback_peer_is_bounded_by_a_flag_too(planned):
    settings = {"expert_cache": 4, "peer_device": "loopback", "peer_memory_mib": 64}

    tiers = planned(platform="cuda", free=(GIB, None), **settings)

    assert need_of(tiers, "peer").have_bytes == 64 * MIB


def test_an_emulated_peer_takes_the_rest(planned):
    tiers = planned(expert_cache=4, peer_device=1)

    tiers.check()
    assert _counts(tiers) == {"PRIMARY": 4, "PEER": ALL - 4}
    assert any(note.startswith("peer: emulated in ") for note in tiers.notes)


def test_an_emulated_peer_of_no_given_size_keeps_its_reserve(planned):
    """Report 96: a reserve that somebody asked for is kept wherever the memory comes from."""
    have = need_of(planned(expert_cache=4, peer_device=1), "peer").have_bytes
    assert have is not None
    reserve = have // MIB - 3

    tiers = planned(expert_cache=4, peer_device=1, peer_reserve_mib=reserve)

    tiers.check()
    need = need_of(tiers, "peer")
    assert need.parts["reserve"] == reserve * MIB
    assert 0 < tiers.placement.count(Tier.PEER) < ALL - 4
    assert "--peer_reserve_mib=" in problem_of(
        planned(expert_cache=4, peer_device=1, peer_reserve_mib=have // MIB + 1)
    )


def test_an_emulated_peer_fits_into_free_ram(planned):
    settings = {"expert_cache": 4, "peer_device": 1}
    needed = need_of(planned(**settings), "host").need_bytes
    free = needed + HOST.total_bytes // 32 - MIB  # 2 GiB are left to others
    host = HostMemory(total_bytes=64 * GIB, available_bytes=free, lockable_bytes=None)

    tiers = planned(host=host, **settings)

    tiers.check()
    assert 0 < tiers.placement.count(Tier.PEER) < ALL - 4
    assert need_of(tiers, "host").need_bytes <= free
    assert need_of(tiers, "peer").bound_by == "free RAM"


def test_peer_slots_are_a_bound(planned):
    tiers = planned(expert_cache=4, peer_device=1, peer_slots=5, peer_memory_mib=500)

    assert _counts(tiers) == {"PRIMARY": 4, "PEER": 5, "HOST": ALL - 9}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [({"peer_device": 1}, "needs the primary's cache"), ({"peer_device": 2}, "no such device")],
)
def test_refuses_a_peer_that_is_not_there(planned, settings: dict, expected: str):
    with pytest.raises(UsageError, match=expected):
        planned(**settings)


def test_a_budget_above_free_ram_is_clamped_with_a_line(planned):
    """Report 29."""
    tiers = planned(resident_budget_gib=100000)

    tiers.check()
    assert _counts(tiers) == {"HOST": ALL}
    (line,) = [note for note in tiers.notes if note.startswith("--resident_budget_gib=100000: ")]
    assert "of RAM are free, that much is used" in line


def test_a_ram_limit_above_all_ram_is_clamped_with_a_line(planned):
    tiers = planned(expert_cache=4, host_ram_limit_gib=100000.0)

    tiers.check()
    assert any(note.startswith("--host_ram_limit_gib=100000: this mach") for note in tiers.notes)


def test_a_resident_budget_leaves_the_rest_in_the_file(planned):
    tiers = planned(resident_budget_gib=1 / 1024)

    assert 0 < tiers.placement.total_bytes(Tier.HOST) <= MIB
    assert tiers.placement.count(Tier.FILE) == ALL - tiers.placement.count(Tier.HOST)
    assert planned(resident_budget_gib=0).placement.count(Tier.FILE) == ALL


def test_short_ram_means_the_file_tier_with_a_line(planned):
    need = need_of(planned(), "host")
    free = need.need_bytes - need.parts["experts"] // 2
    host = HostMemory(total_bytes=free, available_bytes=free, lockable_bytes=None)

    tiers = planned(host=host)

    tiers.check()
    assert tiers.placement.count(Tier.FILE) > 0
    assert any("lowest ranked are read from the file" in note for note in tiers.notes)


def test_an_explicit_context_is_kept_with_a_line(planned):
    """Report 30: RAM that others use may be given up, the choice is the user's."""
    host = HostMemory(total_bytes=64 * GIB, available_bytes=100 * MIB, lockable_bytes=None)

    tiers = planned(host=host, context=262144)

    tiers.check()
    (line,) = [note for note in tiers.notes if "kept as asked" in note]
    assert line.startswith("host: ")


def test_more_than_all_ram_is_refused_with_what_fits(planned):
    host = HostMemory(total_bytes=200 * MIB, available_bytes=200 * MIB, lockable_bytes=None)

    message = problem_of(planned(host=host, context=1 << 22))

    assert "host needs " in message
    assert "(all RAM)" in message
    planned(host=host, context=int(advised(message, "max_context"))).check()


@pytest.mark.parametrize(
    ("settings", "flag"),
    [({}, "expert_cache"), ({"peer_device": 1, "peer_memory_mib": 100}, "peer_slots")],
)
def test_names_the_arena_that_fits_into_ram(planned, settings: dict, flag: str):
    count = ALL if flag == "expert_cache" else 4
    need = need_of(planned(expert_cache=count, **settings), "host")
    most = need.need_bytes - need.parts["experts"] - MIB
    host = HostMemory(total_bytes=most, available_bytes=most, lockable_bytes=None)

    message = problem_of(planned(host=host, expert_cache=count, **settings))

    fits = {**settings, "expert_cache": count, flag: int(advised(message, flag))}
    planned(host=host, **fits).check()


def test_a_ram_limit_bounds_what_is_locked(planned):
    unbounded = planned(expert_cache=4).placement
    host_bytes = unbounded.total_bytes(Tier.HOST)

    limit = unbounded.primary_bytes + host_bytes // 2
    tiers = planned(expert_cache=4, host_ram_limit_gib=limit / GIB)

    tiers.check()
    locked = need_of(tiers, "locked")
    assert 0 < tiers.placement.locked_bytes < host_bytes
    assert locked.need_bytes <= (locked.have_bytes or 0)
    assert any("% to be page-locked; the rest may be paged out" in note for note in tiers.notes)


def test_locks_no_more_than_the_system_allows(planned):
    host = HostMemory(total_bytes=64 * GIB, available_bytes=32 * GIB, lockable_bytes=MIB)

    assert 0 < planned(host=host, expert_cache=4).placement.locked_bytes <= MIB
    assert (
        planned(host=host, platform="cuda", free=(GIB, None), expert_cache=4).placement.locked_bytes
        > MIB
    )


def test_leaves_the_lock_of_the_table_its_room(pack: Pack, plan: Plan, planned):
    """The system counts whole pages: those at the ends of each matrix come on top."""
    table = {tier.name: tier.bytes for tier in plan.tiers}["ngram"]
    lockable = table + MIB
    host = HostMemory(total_bytes=64 * GIB, available_bytes=32 * GIB, lockable_bytes=lockable)

    tiers = planned(host=host, expert_cache=4, ple_io="ram")

    count = int(tiers.placement.locked.sum())
    pages = 2 * 4096 * (3 * count + 1)
    assert count > 0
    assert tiers.placement.locked_bytes + pages + table <= lockable


def test_a_locked_table_counts(pack: Pack, plan: Plan, planned):
    table = {tier.name: tier.bytes for tier in plan.tiers}["ngram"]

    assert need_of(planned(ple_io="ram"), "host").parts["n-gram table"] == table
    message = problem_of(planned(ple_io="ram", host_ram_limit_gib=0))

    assert "locked needs" in message
    assert "--ple_io=direct would fit" in message
    least = advised(message, "host_ram_limit_gib")
    planned(ple_io="ram", host_ram_limit_gib=least).check()


def test_copies_of_streamed_experts_count_on_the_primary_and_in_ram(pack: Pack, planned):
    largest = max(expert_bytes_by_layer(pack))
    without = planned(expert_cache=4, host_ram_limit_gib=1)

    tiers = planned(expert_cache=4, host_ram_limit_gib=1, pcie_frac=0.01)

    for name in ("primary", "locked", "host"):
        added = need_of(tiers, name).need_bytes - need_of(without, name).need_bytes
        assert added == EXPERTS * largest, name
    assert need_of(planned(pcie_frac=1.0), "host").parts["staging"] == largest  # the cache is off


def test_room_for_swaps_on_a_gpu_comes_before_experts(pack: Pack, planned):
    matrices = list(matrices_of(pack))
    slots = [expert_slot_bytes(matrices, layer) for layer in range(pack.config.num_layers)]
    spare = swap_spare_bytes(slots)
    frozen = {"platform": "cuda", "vram_reserve_mib": 0, "adapt_swaps": 0}
    fixed = fixed_bytes(planned(free=(GIB, None), **frozen))
    memory = fixed + 5 * spare
    still = planned(free=(memory, None), **frozen)

    moving = planned(platform="cuda", free=(memory, None), vram_reserve_mib=0)

    moving.check()
    assert need_of(moving, "primary").parts["staging"] == spare
    assert moving.primary_moves
    assert need_of(still, "primary").parts["staging"] == 0
    assert not still.primary_moves
    assert need_of(moving, "primary").need_bytes <= memory


def test_a_gpu_with_little_room_keeps_experts_where_they_are_and_says_so(planned):
    frozen = {"platform": "cuda", "vram_reserve_mib": 0, "adapt_swaps": 0}
    fixed = fixed_bytes(planned(free=(GIB, None), **frozen))

    tiers = planned(platform="cuda", free=(fixed + 2_000_000, None), vram_reserve_mib=0)

    tiers.check()
    assert not tiers.primary_moves
    assert any("experts do not move there" in note for note in tiers.notes)


def test_arenas_are_copies_and_count(planned):
    message = problem_of(planned(expert_cache=ALL, host_ram_limit_gib=0))

    least = advised(message, "host_ram_limit_gib")
    planned(expert_cache=ALL, host_ram_limit_gib=least).check()


def test_follows_a_profile(pack: Pack, planned):
    profile = Profile(model=routed_model(pack), ranked=((2, 3), (1, 1), (0, 0)))

    two = planned(expert_cache=2, profile=profile, expert_profile=Path("p"))
    auto = planned(device_memory_mib=2000, profile=profile, expert_profile=Path("p"))
    filled = planned(
        device_memory_mib=2000,
        profile=profile,
        expert_profile=Path("p"),
        expert_cache_fill_all=True,
    )

    assert [two.placement.tiers[pair] for pair in profile.ranked] == [
        Tier.PRIMARY,
        Tier.PRIMARY,
        Tier.HOST,
    ]
    assert auto.placement.count(Tier.PRIMARY) == 3
    assert any("--expert_cache_fill_all goes on behind them" in note for note in auto.notes)
    assert filled.placement.count(Tier.PRIMARY) == ALL


def test_a_flag_above_what_is_free_is_clamped_with_a_line(planned):
    tiers = planned(platform="cuda", free=(GIB, None), device_memory_mib=4096)

    assert need_of(tiers, "primary").have_bytes == GIB
    assert "--device_memory_mib=4096: 1.0 GiB are free, that much is used" in tiers.notes


def test_is_json_and_a_table(planned):
    tiers = planned(expert_cache=4, peer_device=1, peer_slots=2, resident_budget_gib=0.001)

    loaded = json.loads(json.dumps(tiers.to_json(), allow_nan=False))
    assert loaded["fits"] is True
    assert [need["name"] for need in loaded["needs"]] == ["primary", "peer", "host"]
    placed = loaded["placement"]
    assert sum(tier["experts"] for tier in placed.values()) == ALL
    assert placed["primary"]["experts_by_layer"] == [1] * 4
    assert loaded["arena_bytes"]["primary"] == tiers.placement.primary_bytes
    lines = tiers.table().splitlines()
    assert [line.split()[0] for line in lines[:7]] == ["primary", "peer", "host", *["experts"] * 4]
    assert all(note in lines for note in tiers.notes)


def test_a_table_shows_what_does_not_fit(planned):
    assert "DOES NOT FIT" in planned(device_memory_mib=1).table()
