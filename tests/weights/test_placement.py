import dataclasses
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_jax.weights.placement import (
    ALIGNMENT,
    ArenaBudget,
    Placement,
    PlacementRequest,
    Tier,
    place,
    round_order,
    slot_bytes,
)


def _uniform(layers: int = 4, experts: int = 8, size: int = 1000) -> np.ndarray:
    return np.full((layers, experts), size, np.int64)


def _held(placement: Placement, tier: Tier) -> set[tuple[int, int]]:
    return {(int(layer), int(expert)) for layer, expert in np.argwhere(placement.tiers == tier)}


def _unbounded(count: int) -> ArenaBudget:
    return ArenaBudget(memory_bytes=None, exactly=count)


@st.composite
def requests(draw) -> PlacementRequest:
    layers, experts = draw(st.integers(1, 5)), draw(st.integers(1, 9))
    by_layer = draw(st.lists(st.integers(1, 3000), min_size=layers, max_size=layers))
    pairs = [(layer, expert) for layer in range(layers) for expert in range(experts)]
    ranking = draw(
        st.none()
        | st.permutations(pairs).flatmap(
            lambda order: st.integers(0, len(order)).map(lambda count: order[:count])
        )
    )
    count = st.none() | st.integers(0, layers * experts + 3)
    memory = st.integers(0, 2 * sum(by_layer) * experts + 1000)
    reserved = st.integers(0, 5000)
    primary = st.builds(
        ArenaBudget, memory_bytes=st.none() | memory, reserved_bytes=reserved, exactly=count
    )
    peer = st.builds(
        ArenaBudget, memory_bytes=st.none() | memory, reserved_bytes=reserved, at_most=count
    )
    return PlacementRequest(
        expert_bytes=np.repeat(np.asarray(by_layer, np.int64)[:, None], experts, axis=1),
        ranking=ranking,
        primary=draw(st.none() | primary),
        peer=draw(st.none() | peer),
        fill_all=draw(st.booleans()),
        resident_bytes=draw(st.none() | memory),
        lock_bytes=draw(memory),
    )


@settings(max_examples=200, deadline=None)
@given(requests())
def test_gives_every_expert_one_tier_and_a_slot_of_its_own(request: PlacementRequest):
    placement = place(request)

    assert np.isin(placement.tiers, list(Tier)).all()
    assert sum(placement.count(tier) for tier in Tier) == request.expert_bytes.size
    assert sum(placement.total_bytes(tier) for tier in Tier) == request.expert_bytes.sum()
    for tier, arena in (
        (Tier.PRIMARY, placement.primary_bytes),
        (Tier.PEER, placement.peer_bytes),
    ):
        held = placement.tiers == tier
        begins = placement.slots[held]
        sizes = slot_bytes(request.expert_bytes[held])
        order = np.argsort(begins)
        assert (begins % ALIGNMENT == 0).all()
        assert (begins >= 0).all()
        assert (begins[order][1:] >= (begins + sizes)[order][:-1]).all()
        assert arena == sizes.sum()
        assert arena == 0 or (begins + sizes).max() == arena
    on_device = np.isin(placement.tiers, [Tier.PRIMARY, Tier.PEER])
    assert (placement.slots[~on_device] == -1).all()


@settings(max_examples=200, deadline=None)
@given(requests())
def test_leaves_what_is_reserved(request: PlacementRequest):
    placement = place(request)

    for budget, arena in (
        (request.primary, placement.primary_bytes),
        (request.peer, placement.peer_bytes),
    ):
        if budget is None:
            assert arena == 0
        elif budget.exactly is None and budget.memory_bytes is not None:
            assert arena == 0 or arena + budget.reserved_bytes <= budget.memory_bytes


@settings(max_examples=100, deadline=None)
@given(requests())
def test_keeps_counts(request: PlacementRequest):
    placement = place(request)

    if request.primary is not None and request.primary.exactly is not None:
        wanted = min(request.primary.exactly, request.expert_bytes.size)
        assert placement.count(Tier.PRIMARY) == wanted
    if request.peer is not None and request.peer.at_most is not None:
        assert placement.count(Tier.PEER) <= request.peer.at_most


@settings(max_examples=100, deadline=None)
@given(requests())
def test_keeps_the_hottest_in_ram_and_locks_the_hottest(request: PlacementRequest):
    placement = place(request)

    host_bytes, file_bytes = placement.total_bytes(Tier.HOST), placement.total_bytes(Tier.FILE)
    if request.resident_bytes is None:
        assert file_bytes == 0
    else:
        assert host_bytes <= request.resident_bytes
    assert (placement.tiers[placement.locked] == Tier.HOST).all()
    assert placement.locked_bytes <= request.lock_bytes
    E = request.expert_bytes.shape[1]
    ranked = [layer * E + expert for layer, expert in request.ranking or ()]
    rest = [i for i in round_order(*request.expert_bytes.shape).tolist() if i not in set(ranked)]
    in_host_order = [
        (int(placement.tiers.flat[i]), bool(placement.locked.flat[i]))
        for i in (*ranked, *rest)
        if placement.tiers.flat[i] in (Tier.HOST, Tier.FILE)
    ]
    names = ["locked" if locked else Tier(tier).name for tier, locked in in_host_order]
    assert names == sorted(names, key=["locked", "HOST", "FILE"].index)


@settings(max_examples=50, deadline=None)
@given(requests())
def test_is_a_function_of_the_request(request: PlacementRequest):
    first, second = place(request), place(dataclasses.replace(request))

    for field in dataclasses.fields(Placement):
        a, b = getattr(first, field.name), getattr(second, field.name)
        assert np.array_equal(a, b), field.name


@pytest.mark.parametrize("missing", [0, 1])
def test_a_byte_less_on_the_peer_is_a_slot_less(missing: int):
    workspace, slots = 12345, 5
    peer = ArenaBudget(
        memory_bytes=slots * 1024 + workspace - missing, reserved_bytes=workspace, at_most=slots
    )

    placement = place(PlacementRequest(expert_bytes=_uniform(), peer=peer))

    assert placement.count(Tier.PEER) == slots - missing
    assert placement.peer_bytes + workspace <= slots * 1024 + workspace - missing
    told = ("peer: 4 of the 5 experts asked for fit",) if missing else ()
    assert placement.notes == told


def test_holds_nothing_without_room():
    budget = ArenaBudget(memory_bytes=1023 + 500, reserved_bytes=500)

    placement = place(PlacementRequest(expert_bytes=_uniform(), primary=budget, peer=budget))

    assert placement.count(Tier.HOST) == 32
    assert (placement.primary_bytes, placement.peer_bytes) == (0, 0)


@pytest.mark.parametrize("memory", [0, 499, 500])
def test_a_workspace_that_does_not_fit_leaves_no_slot(memory: int):
    budget = ArenaBudget(memory_bytes=memory, reserved_bytes=500)

    assert place(PlacementRequest(expert_bytes=_uniform(), primary=budget)).primary_bytes == 0


def test_counts_experts_over_all_layers_in_rounds():
    placement = place(PlacementRequest(expert_bytes=_uniform(), primary=_unbounded(12)))

    assert (placement.tiers == Tier.PRIMARY).sum(axis=1).tolist() == [3, 3, 3, 3]
    assert (placement.tiers[:, :3] == Tier.PRIMARY).all()


def test_the_peer_holds_by_layer_what_the_primary_does_not():
    peer = ArenaBudget(memory_bytes=None, at_most=10)

    placement = place(PlacementRequest(expert_bytes=_uniform(), primary=_unbounded(12), peer=peer))

    by_layer = {(0, expert) for expert in range(3, 8)} | {(1, expert) for expert in range(3, 8)}
    assert _held(placement, Tier.PEER) == by_layer


def test_follows_the_ranking():
    ranking = [(3, 7), (0, 1), (2, 2), (1, 0)]
    peer = ArenaBudget(memory_bytes=None, at_most=1)

    placement = place(
        PlacementRequest(expert_bytes=_uniform(), ranking=ranking, primary=_unbounded(2), peer=peer)
    )

    assert _held(placement, Tier.PRIMARY) == {(3, 7), (0, 1)}
    assert _held(placement, Tier.PEER) == {(2, 2)}
    assert placement.slots[3, 7] == 0
    assert placement.slots[0, 1] == 1024
    assert placement.slots[2, 2] == 0


def test_a_count_goes_on_behind_the_ranked():
    placement = place(
        PlacementRequest(expert_bytes=_uniform(), ranking=[(3, 7)], primary=_unbounded(3))
    )

    assert _held(placement, Tier.PRIMARY) == {(3, 7), (0, 0), (1, 0)}


def test_auto_stops_behind_the_ranked_unless_told_to_fill():
    budget = ArenaBudget(memory_bytes=10 * 1024)
    request = PlacementRequest(
        expert_bytes=_uniform(), ranking=[(3, 7), (0, 0)], primary=budget, peer=budget
    )

    ranked = place(request)
    filled = place(dataclasses.replace(request, fill_all=True))

    assert _held(ranked, Tier.PRIMARY) == {(3, 7), (0, 0)}
    assert ranked.count(Tier.PEER) == 0
    assert "primary: all 2 experts that the profile ranks" in ranked.notes[0]
    assert "--expert_cache_fill_all" in ranked.notes[0]
    assert (filled.count(Tier.PRIMARY), filled.count(Tier.PEER)) == (10, 10)
    assert filled.notes == ()


def test_more_than_there_are_is_all_with_a_line():
    placement = place(PlacementRequest(expert_bytes=_uniform(), primary=_unbounded(100)))

    assert placement.count(Tier.PRIMARY) == 32
    assert placement.notes == ("primary: 100 experts asked for, the model has 32: it holds all",)


def test_zero_is_off():
    placement = place(PlacementRequest(expert_bytes=_uniform(), primary=_unbounded(0)))

    assert (placement.count(Tier.HOST), placement.primary_bytes, placement.notes) == (32, 0, ())


def test_sizes_slots_by_layer():
    expert_bytes = np.repeat(np.asarray([[1], [256], [257]], np.int64), 2, axis=1)

    placement = place(PlacementRequest(expert_bytes=expert_bytes, primary=_unbounded(6)))

    assert placement.primary_bytes == 2 * (256 + 256 + 512)
    assert placement.total_bytes(Tier.PRIMARY) == 2 * (1 + 256 + 257)


def test_passes_over_what_is_too_large():
    expert_bytes = np.asarray([[512], [2048], [256]], np.int64)

    placement = place(
        PlacementRequest(expert_bytes=expert_bytes, primary=ArenaBudget(memory_bytes=512 + 2047))
    )

    assert _held(placement, Tier.PRIMARY) == {(0, 0), (2, 0)}


def test_the_coldest_go_to_the_file():
    placement = place(
        PlacementRequest(
            expert_bytes=_uniform(2, 2), ranking=[(1, 1)], resident_bytes=2999, lock_bytes=1000
        )
    )

    assert _held(placement, Tier.HOST) == {(1, 1), (0, 0)}
    assert _held(placement, Tier.FILE) == {(1, 0), (0, 1)}
    assert placement.locked.tolist() == [[False, False], [False, True]]


def test_arrays_are_read_only():
    placement = place(PlacementRequest(expert_bytes=_uniform()))

    for array in (placement.tiers, placement.slots, placement.locked, placement.expert_bytes):
        assert not array.flags.writeable


@pytest.mark.parametrize(
    "ranking", [[(4, 0)], [(0, 8)], [(-1, 0)], [(0, 0), (0, 0)]], ids=["layer", "id", "-1", "twice"]
)
def test_a_ranking_that_was_not_checked_is_a_broken_promise(ranking: list[tuple[int, int]]):
    with pytest.raises(AssertionError, match="profile"):
        place(PlacementRequest(expert_bytes=_uniform(), ranking=ranking))


def test_places_the_released_model_at_once():
    rng = np.random.default_rng(0)
    expert_bytes = np.repeat(rng.integers(1_300_000, 2_500_000, 48)[:, None], 512, axis=1)
    order = rng.permutation(48 * 512).tolist()
    budget = ArenaBudget(memory_bytes=16 << 30, reserved_bytes=4 << 30)
    request = PlacementRequest(
        expert_bytes=expert_bytes,
        ranking=[(i // 512, i % 512) for i in order],
        primary=budget,
        peer=budget,
        resident_bytes=8 << 30,
        lock_bytes=4 << 30,
    )

    begin = time.perf_counter()
    placement = place(request)
    took_s = time.perf_counter() - begin

    assert took_s < 0.5
    assert all(placement.count(tier) > 1000 for tier in Tier)
