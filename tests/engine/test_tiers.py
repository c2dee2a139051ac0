"""Tiers in an engine: the same ids at every residency, a learned profile, routing records."""

import functools

import numpy as np

from strata_jax.config import TierSettings
from strata_jax.engine.engine import Engine, EngineOptions
from strata_jax.weights.profile import Profile, routed_model
from strata_jax.weights.routing import RoutingReader, count_routing


def run(pack, request, tiers=None, **options):
    engine = Engine.open(pack, EngineOptions(tiers=tiers or TierSettings(), **options))
    try:
        generation = engine.start(request)
        ids = list(generation)
        return ids, generation.tier_counters, engine.audit()
    finally:
        engine.close()


def test_ids_are_the_same_at_every_residency_while_experts_move(embedded_pack, request_of):
    request = request_of(range(5, 80), max_tokens=12)
    hectic = functools.partial(TierSettings, adapt_every=1, adapt_swaps=8)
    expected, _, _ = run(embedded_pack, request)

    for tiers in (
        TierSettings(expert_cache=128),
        hectic(expert_cache=24),
        hectic(expert_cache=24, peer_device=1, peer_slots=24),
        hectic(expert_cache=32, pcie_frac=0.5, resident_budget_gib=0.002),
    ):
        ids, counters, faults = run(embedded_pack, request, tiers)

        assert ids == expected
        assert faults == []
        assert sum(counters["shares"].values()) == 1.0


def test_a_window_of_fewer_live_rows_gives_the_same_ids(embedded_pack, request_of):
    request = request_of(range(5, 60), max_tokens=6)
    expected, _, _ = run(embedded_pack, request)

    for spec in (1, 3, 8):
        assert run(embedded_pack, request, spec=spec)[0] == expected


def test_what_was_learned_is_saved_at_the_end(embedded_pack, request_of, tmp_path):
    path = tmp_path / "learned.json"
    tiers = TierSettings(expert_cache=24, adapt_every=1, adapt_swaps=8, expert_profile_save=path)

    run(embedded_pack, request_of(range(5, 40), max_tokens=16), tiers)

    profile = Profile.load(path)
    profile.check_model(routed_model(embedded_pack), path)
    assert len(profile.ranked) >= 24
    again = TierSettings(expert_cache=24, expert_profile=path)
    _, counters, _ = run(embedded_pack, request_of(range(5, 40), max_tokens=4), again)
    assert counters["hit_rate"] > 0


def test_routed_ids_are_written(embedded_pack, request_of, tmp_path):
    path = tmp_path / "routing.jsonl"

    run(embedded_pack, request_of(range(5, 12), max_tokens=3), routing_out=path)

    counts = count_routing(RoutingReader(path))
    config = embedded_pack.config
    steps = 7 + 2  # the last id drawn is not read
    assert counts.sum() == steps * config.num_layers * config.num_experts_active
    assert np.all(counts.sum(axis=1) == steps * config.num_experts_active)
