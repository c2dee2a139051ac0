"""Tiers in an engine: the same ids at every residency, a learned profile, routing records."""

import functools
import random
import subprocess
import sys
import time
from unittest.mock import Mock

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from strata_jax.cli.process import process_memory
from strata_jax.config import TierSettings
from strata_jax.engine import tiers as engine_tiers
from strata_jax.engine.engine import Engine, EngineOptions
from strata_jax.engine.runner import Runner, RunnerOptions
from strata_jax.errors import StrataError
from strata_jax.weights.experts import ExpertTiers
from strata_jax.weights.placement import Tier
from strata_jax.weights.profile import Profile, learned, routed_model
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


@pytest.mark.parametrize(
    ("spec", "windows"),
    [(1, {1: 52 + 3}), (3, {1: 1 + 3, 3: 17}), (None, {1: 3, 4: 1, 8: 6})],
)
def test_tells_how_many_rows_its_windows_had(tiny_pack, request_of, spec, windows):
    """52 ids behind a tile of 64, then one id a window for those that are drawn but for the last."""
    engine = Engine.open(tiny_pack, EngineOptions(spec=spec))
    generation = engine.start(request_of(range(5, 5 + 64 + 52), max_tokens=4))

    list(generation)

    assert generation.windows == windows
    engine.close()


def test_what_was_learned_is_saved_at_the_end(embedded_pack, request_of, tmp_path):
    path = tmp_path / "learned.json"
    tiers = TierSettings(expert_cache=24, adapt_every=1, adapt_swaps=8, expert_profile_save=path)

    run(embedded_pack, request_of(range(5, 40), max_tokens=16), tiers)

    profile = Profile.load(path)
    profile.check_model(routed_model(embedded_pack), path)
    assert len(profile.ranked) >= 24


def test_files_that_cannot_be_written_cost_neither_the_answer_nor_what_is_closed(
    embedded_pack, request_of, tmp_path
):
    """The profile that the run begins with is read once, and may go."""
    path = tmp_path / "learned.json"
    Profile(model=routed_model(embedded_pack), ranked=((0, 3), (1, 5))).save(path)
    tiers = TierSettings(
        expert_cache=24, expert_profile=path, expert_profile_save=tmp_path / "none" / "p"
    )
    engine = Engine.open(embedded_pack, EngineOptions(tiers=tiers))
    path.unlink()
    store = Mock(wraps=engine._runner._parts.store)
    engine._runner._parts.store = store
    generation = engine.start(request_of(range(5, 40), max_tokens=4))

    assert len(list(generation)) == 4
    assert generation.tier_counters["hit_rate"] > 0
    with pytest.raises(StrataError, match="--expert_profile_save="):
        engine.close()

    assert engine._runner._parts.table is None
    store.close.assert_called_once_with()


def test_routed_ids_are_written(embedded_pack, request_of, tmp_path):
    path = tmp_path / "routing.jsonl"

    run(embedded_pack, request_of(range(5, 12), max_tokens=3), routing_out=path)

    counts = count_routing(RoutingReader(path))
    config = embedded_pack.config
    steps = 7 + 2  # the last id drawn is not read
    assert counts.sum() == steps * config.num_layers * config.num_experts_active
    assert np.all(counts.sum(axis=1) == steps * config.num_experts_active)


def workers_of(engine: Engine) -> ExpertTiers:
    experts = engine._runner.tiers.experts
    assert isinstance(experts, ExpertTiers)
    return experts


@pytest.mark.parametrize("tier", [Tier.PEER, Tier.HOST])
def test_a_lost_worker_ends_the_request_and_later_ones_with_a_sentence(
    embedded_pack, request_of, monkeypatch, tier
):
    impatient = functools.partial(ExpertTiers.open, timeout_ms=1000)
    monkeypatch.setattr(engine_tiers.ExpertTiers, "open", impatient)
    tiers = TierSettings(expert_cache=24, peer_device=1, peer_slots=24, pool_workers=1)
    engine = Engine.open(embedded_pack, EngineOptions(tiers=tiers, max_context=512))
    try:
        ids = iter(engine.start(request_of(range(5, 20), max_tokens=50)))
        next(ids)
        workers_of(engine).stall(tier, 600_000)

        with pytest.raises(
            StrataError, match=r"^expert tiers: the .* gave no sign of life for 1000"
        ):
            list(ids)
        with pytest.raises(
            StrataError, match=r"^expert tiers: the .* gave no sign of life for 1000"
        ):
            list(engine.start(request_of(range(5, 20))))
        assert engine.audit() == []
        workers_of(engine).stall(tier, 0)
    finally:
        engine.close()


def test_a_late_worker_changes_no_id(embedded_pack, request_of):
    request = request_of(range(5, 20), max_tokens=8)
    expected, _, _ = run(embedded_pack, request)
    tiers = TierSettings(expert_cache=24, peer_device=1, peer_slots=24, pool_workers=1)
    engine = Engine.open(embedded_pack, EngineOptions(tiers=tiers, max_context=512))
    try:
        ids = []
        for token in engine.start(request):
            ids.append(token)
            for tier in (Tier.PEER, Tier.HOST):
                workers_of(engine).stall(tier, 30)
    finally:
        engine.close()

    assert ids == expected


def test_nothing_is_streamed_where_the_cache_is_off(embedded_pack, request_of):
    """The plan says that --pcie_frac has no effect then."""
    _, counters, _ = run(embedded_pack, request_of(range(5, 12)), TierSettings(pcie_frac=1.0))

    assert counters["shares"]["host"] == 1.0


@pytest.fixture
def no_compile_cache():
    """What comes out of the cache of compiled programs has another text."""

    def use(wanted: bool) -> None:
        jax.config.update("jax_enable_compilation_cache", wanted)
        compilation_cache.reset_cache()

    use(False)
    yield
    use(True)


def test_the_compiled_programs_are_the_same_at_every_residency(tiny_pack, no_compile_cache):
    """The optimised HLO, attributes of the calls included: where experts lie is no part of it."""
    total = tiny_pack.config.num_layers * tiny_pack.config.num_experts
    programs = []

    for tiers in (
        TierSettings(expert_cache=0),
        TierSettings(expert_cache=total // 2, resident_budget_gib=0.0, pool_workers=2),
        TierSettings(expert_cache=total, adapt_swaps=0),
        TierSettings(expert_cache=4, peer_device=1, peer_slots=4, adapt_every=1, pcie_frac=0.5),
    ):
        options = RunnerOptions(max_context=256, tiers=tiers)
        runner = Runner(tiny_pack, tiny_pack.config, options, lambda _: None)
        programs.append(
            (runner._programs.window.as_text(), runner._programs.tiles[runner.tile_rows].as_text())
        )
        runner.close()

    assert programs[0][0].count(" custom-call(") >= 4 * tiny_pack.config.num_layers
    assert [pair == programs[0] for pair in programs] == [True] * 4


def test_swapping_experts_compiles_nothing(tiny_pack, request_of):
    compiled = []

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(duration_secs)

    tiers = TierSettings(
        expert_cache=4, peer_device=1, peer_slots=4, adapt_every=1, adapt_swaps=8, pcie_frac=0.5
    )
    jax.monitoring.register_event_duration_secs_listener(listen)
    # A cache of a size that no other test has.
    engine = Engine.open(tiny_pack, EngineOptions(tiers=tiers, max_context=330))
    assert len(compiled) >= 2
    compiled.clear()

    generation = engine.start(request_of(range(5, 90), max_tokens=40))
    list(generation)

    jax.monitoring.unregister_event_duration_listener(listen)
    assert generation.tier_counters["swaps_primary"] > 0
    assert compiled == []
    engine.close()


@pytest.mark.parametrize(
    "tiers",
    [
        {},
        {"expert_cache": 24, "adapt_swaps": 0},
        {"expert_cache": 24, "adapt_every": 100},
        {"expert_cache": 24, "adapt_every": 1, "adapt_swaps": 8},
    ],
    ids=["off", "frozen", "rare", "hectic"],
)
def test_a_learned_profile_ranks_what_the_run_used(embedded_pack, request_of, tmp_path, tiers):
    """Report 59: residents first, then by use without decay, whether or not experts ever move."""
    saved, routing = tmp_path / "learned.json", tmp_path / "routing.jsonl"
    settings = TierSettings(**tiers, expert_profile_save=saved)
    engine = Engine.open(embedded_pack, EngineOptions(tiers=settings, routing_out=routing))
    list(engine.start(request_of(range(5, 80), max_tokens=6)))
    experts = engine._runner.tiers.experts
    experts.before_window()
    resident = experts.tiers() == Tier.PRIMARY

    engine.close()

    counts = count_routing(RoutingReader(routing))
    assert Profile.load(saved) == learned(routed_model(embedded_pack), resident, counts, ())


SAVING = """
import sys
from pathlib import Path
from strata_jax.config import TierSettings
from strata_jax.engine import tier_files
from strata_jax.engine.engine import Engine, EngineOptions
from strata_jax.engine.request import Request, SamplingSettings
from strata_jax.weights.pack import open_pack
tier_files.SAVE_EVERY_S = 0.0
with open_pack(Path(sys.argv[1])) as pack:
    settings = TierSettings(
        expert_cache=4, adapt_every=1, adapt_swaps=8, expert_profile_save=Path(sys.argv[2])
    )
    engine = Engine.open(pack, EngineOptions(tiers=settings, cache_dir=Path(sys.argv[3])))
    sampling = SamplingSettings(temperature=1.0)
    while True:
        request = Request(ids=tuple(range(5, 80)), settings=sampling, max_tokens=50)
        for _ in engine.start(request):
            print("saved", flush=True)
"""


def test_an_engine_that_is_killed_leaves_a_whole_profile(tiny_pack, tmp_path):
    """Report 59: killed with -9 at any moment while it adapts and saves after every window."""
    path = tmp_path / "learned.json"
    randomness = random.Random(0)
    for _ in range(3):
        arguments = [tiny_pack.file.paths[0], path, tmp_path]
        with subprocess.Popen(
            [sys.executable, "-c", SAVING, *map(str, arguments)], stdout=subprocess.PIPE
        ) as process:
            assert process.stdout is not None
            for _ in range(randomness.randrange(2, 40)):
                assert process.stdout.readline()
            time.sleep(randomness.uniform(0, 0.01))
            process.kill()

        profile = Profile.load(path)
        profile.check_model(routed_model(tiny_pack), path)
        assert len(profile.ranked) >= 4


def test_own_memory_stays_flat_while_experts_move(tiny_pack, request_of):
    """Report 36: 200 varied requests; mapped files are another matter."""
    tiers = TierSettings(
        expert_cache=4, peer_device=1, peer_slots=4, adapt_every=1, adapt_swaps=8, pcie_frac=0.5
    )
    engine = Engine.open(tiny_pack, EngineOptions(tiers=tiers, max_context=320))
    rng = np.random.default_rng(0)
    sizes = []
    for turn in range(260):
        ids = rng.integers(0, tiny_pack.config.vocab_size, rng.integers(1, 300)).tolist()
        list(engine.start(request_of(ids, max_tokens=3)))
        if turn >= 60:
            sizes.append(process_memory()["anonymous_bytes"])

    assert max(sizes) < 1.02 * sizes[0]
    assert engine.audit() == []
    engine.close()


DEVICES = """
import pathlib, sys
import jax
jax.config.update("jax_num_cpu_devices", 4)
import jax.numpy as jnp
import numpy as np
from strata_jax.config import TierSettings
from strata_jax.ops.sets import native_ops
from strata_jax.weights.budget import HostMemory
from strata_jax.weights.experts import AdaptSettings, ExpertTiers
from strata_jax.weights.matrices import fill_store
from strata_jax.weights.pack import open_pack
from strata_jax.weights.plan import make_plan
from strata_jax.weights.tier_plan import Machine, plan_tiers

with open_pack(pathlib.Path(sys.argv[1])) as pack:
    store = fill_store(pack)
    host = HostMemory(total_bytes=1 << 34, available_bytes=1 << 33, lockable_bytes=0)
    settings = TierSettings(expert_cache=32, peer_device=1, peer_slots=32)
    machine = Machine(platform="cpu", host=host)
    plan = plan_tiers(pack, make_plan(pack, 256), settings, machine)
    experts = ExpertTiers.open(
        store, plan.placement, AdaptSettings(every=1, swaps=8, peer_swaps=8, decay=0.7),
        ram_is_short=False, peer_threads=1, host_threads=1, stream_share=0.5,
        report=lambda line: None,
    )
    ops = native_ops(store.slot, tiers=experts.slot)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, pack.config.hidden), dtype=np.float32)
    ids = np.stack([rng.permutation(16)[:4] for _ in range(2)]).astype(np.int32)
    weights = np.full(ids.shape, 0.25, np.float32)
    call = jax.jit(lambda *args: ops.expert_ffn(*args, layer=1))
    answers = []
    for turn, order in enumerate([[2], [0], [2, 0], [3, 0, 2, 1], [1, 2]]):
        rows = []
        for number in order:  # all under way before the first is waited for
            operands = (x, ids, weights, np.ones(2, np.float32), np.int32(2))
            operands = [jax.device_put(each, jax.devices()[number]) for each in operands]
            rows.append(call(*operands))
        assert [next(iter(row.devices())).id for row in rows] == order
        answers += [np.array(row) for row in rows]
        experts.before_window()
        experts.after_window()
    assert all(np.array_equal(answer, answers[0]) for answer in answers)
    assert np.isfinite(answers[0]).all() and answers[0].any()
    assert experts.audit() == []
    experts.close()
    store.close()
"""


def test_calls_from_any_device_give_the_same_bits(embedded_pack):
    """Report 49: first on device 2, then on 0, then interleaved; no state belongs to a device."""
    done = subprocess.run(
        [sys.executable, "-c", DEVICES, str(embedded_pack.file.paths[0])],
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert done.returncode == 0, done.stderr
