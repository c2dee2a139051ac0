"""Expert tiers: the same bits wherever an expert lies, honest counts, swaps that never tear a slot."""

import contextlib
import dataclasses
import pathlib
import subprocess
import sys
import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_jax.errors import StrataError
from strata_jax.ops.sets import native_ops
from strata_jax.weights.experts import TIMEOUT_MS, AdaptSettings, ExpertTiers, shares
from strata_jax.weights.matrices import fill_store
from strata_jax.weights.pack import open_pack
from strata_jax.weights.placement import Placement, Tier, slot_bytes
from tests.gguf_maker import BLOCKY, make_model
from tests.stalls import FOR_GOOD_MS

EMBEDDED = pathlib.Path(__file__).parents[2] / "strata_jax/models/strata-small/model-IQ3_S.gguf"
LAYERS, EXPERTS, ACTIVE, WIDTH = 8, 16, 4, 256
FROZEN = AdaptSettings(every=1, swaps=0, peer_swaps=0, decay=0.7)
FAILED = (ValueError, RuntimeError)
"""What JAX makes of a handler's error, by the path a call takes."""
HECTIC = AdaptSettings(every=1, swaps=8, peer_swaps=8, decay=0.7)


@pytest.fixture(scope="module")
def pack():
    with open_pack(EMBEDDED) as pack:
        yield pack


@pytest.fixture(scope="module")
def store(pack):
    store = fill_store(pack)
    yield store
    store.close()


def placement_of(pack, tiers: np.ndarray) -> Placement:
    """Slots side by side in the order of the experts."""
    names = ("gate", "up", "down")
    layer_bytes = [
        sum(pack.tensor(f"blk.{layer}.ffn_{name}_exps.weight").nbytes for name in names)
        for layer in range(len(tiers))
    ]
    num_experts = tiers.shape[1]
    sizes = np.repeat(
        np.asarray(layer_bytes, np.int64)[:, None] // num_experts, num_experts, axis=1
    )
    slots = np.full(tiers.shape, -1, np.int64)
    totals = {}
    for tier in (Tier.PRIMARY, Tier.PEER):
        inside = tiers == tier
        ends = np.cumsum(slot_bytes(sizes[inside]))
        slots[inside] = ends - slot_bytes(sizes[inside])
        totals[tier] = int(ends[-1]) if len(ends) else 0
    return Placement(
        expert_bytes=sizes,
        tiers=tiers.astype(np.uint8),
        slots=slots,
        locked=np.zeros(tiers.shape, bool),
        primary_bytes=totals[Tier.PRIMARY],
        peer_bytes=totals[Tier.PEER],
        notes=(),
    )


@contextlib.contextmanager
def opened(
    pack, store, tiers, adapt=FROZEN, *, stream_share=0.0, host_threads=0, timeout_ms=TIMEOUT_MS
):
    experts = ExpertTiers.open(
        store,
        placement_of(pack, tiers),
        adapt,
        ram_is_short=False,
        peer_threads=1,
        host_threads=host_threads,
        stream_share=stream_share,
        report=lambda line: None,
        timeout_ms=timeout_ms,
    )
    try:
        yield experts
    finally:
        experts.close()


def rows_of(store, slot, ids, layer=0, seed=0):
    """expert_ffn of random rows through the tiers of `slot`."""
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.standard_normal((len(ids), WIDTH), dtype=np.float32))
    weights = jnp.asarray(rng.random(ids.shape, dtype=np.float32))
    shared = jnp.ones(len(ids), jnp.float32)
    ops = native_ops(store.slot, tiers=slot)
    y = ops.expert_ffn(x, jnp.asarray(ids), weights, shared, jnp.int32(len(ids)), layer=layer)
    return np.array(y)


def routed(num_rows, seed=0):
    rng = np.random.default_rng(seed)
    rows = [rng.permutation(EXPERTS)[:ACTIVE] for _ in range(num_rows)]
    return np.stack(rows).astype(np.int32)


@settings(max_examples=25, deadline=None)
@given(
    tiers=st.lists(st.integers(0, 3), min_size=EXPERTS, max_size=EXPERTS),
    num_rows=st.integers(1, 9),
    stream_share=st.sampled_from([0.0, 0.5, 1.0]),
    host_threads=st.sampled_from([0, 1, 2]),
    seed=st.integers(0, 99),
)
def test_gives_the_same_bits_in_every_tier(
    pack, store, tiers, num_rows, stream_share, host_threads, seed
):
    everywhere = np.tile(np.asarray(tiers, np.uint8), (LAYERS, 1))
    ids = routed(num_rows, seed)

    with opened(
        pack, store, everywhere, stream_share=stream_share, host_threads=host_threads
    ) as experts:
        y = rows_of(store, experts.slot, ids, layer=seed % LAYERS)
        counters = experts.counters()

    assert np.array_equal(y, rows_of(store, -1, ids, layer=seed % LAYERS))
    names = ("primary", "peer", "stream", "host", "file")
    assert sum(counters[f"entries_{name}"] for name in names) == ids.size
    misses = len({e for e in ids.ravel().tolist() if tiers[e] == Tier.HOST})
    assert (counters["entries_stream"] > 0) == (int(misses * stream_share) > 0)
    parts = shares(counters)
    assert parts is not None
    assert sum(parts.values()) == pytest.approx(1.0)


def test_swaps_follow_use_and_every_slot_stays_true_to_the_file(pack, store):
    tiers = np.zeros((LAYERS, EXPERTS), np.uint8)
    tiers[:, :3], tiers[:, 3:6] = Tier.PRIMARY, Tier.PEER

    with opened(pack, store, tiers, HECTIC) as experts:
        for step in range(60):
            ids = routed(2, seed=step)
            layer = step % LAYERS
            experts.before_window()
            y = rows_of(store, experts.slot, ids, layer, seed=step)
            experts.after_window()
            assert np.array_equal(y, rows_of(store, -1, ids, layer, seed=step))
        counters = experts.counters()

        assert experts.audit() == []
        assert counters["swaps_primary"] > 0
        assert counters["swaps_peer"] > 0
        assert (experts.tiers() == Tier.PRIMARY).sum() == 3 * LAYERS
        assert (experts.tiers() == Tier.PEER).sum() == 3 * LAYERS


def test_the_same_use_gives_the_same_swaps(pack, store):
    tiers = np.zeros((LAYERS, EXPERTS), np.uint8)
    tiers[:, :4] = Tier.PRIMARY

    def run():
        with opened(pack, store, tiers, HECTIC) as experts:
            for step in range(20):
                experts.before_window()
                rows_of(store, experts.slot, routed(3, seed=step), step % LAYERS)
                experts.after_window()
            experts.before_window()
            return experts.tiers(), experts.counters()["swaps_primary"]

    first, second = run(), run()

    assert np.array_equal(first[0], second[0])
    assert first[1] == second[1] > 0


def test_a_reader_never_sees_a_slot_that_is_written(pack, store):
    """Steps and adaptive rounds at once, which the engine never does: results stay right."""
    tiers = np.zeros((LAYERS, EXPERTS), np.uint8)
    tiers[:, :3] = Tier.PRIMARY
    stop = threading.Event()

    with opened(pack, store, tiers, HECTIC) as experts:

        def churn():
            while not stop.is_set():
                experts.after_window()

        thread = threading.Thread(target=churn)
        thread.start()
        try:
            for step in range(100):
                ids = routed(2, seed=step)
                y = rows_of(store, experts.slot, ids, step % 2, seed=step)
                assert np.array_equal(y, rows_of(store, -1, ids, step % 2, seed=step))
        finally:
            stop.set()
            thread.join()
        assert experts.audit() == []


def test_a_resident_is_kept_against_a_scan(pack, store):
    """Report 56: one pass over all experts must not throw out the hot ones."""
    tiers = np.zeros((LAYERS, EXPERTS), np.uint8)
    tiers[:, :ACTIVE] = Tier.PRIMARY
    hot = np.arange(ACTIVE, dtype=np.int32)[None]
    adapt = AdaptSettings(every=4, swaps=96, peer_swaps=0, decay=0.7)

    with opened(pack, store, tiers, adapt) as experts:
        for step in range(40):
            scan = (np.arange(ACTIVE) + step * ACTIVE) % EXPERTS
            ids = scan[None].astype(np.int32) if 20 <= step < 24 else hot
            experts.before_window()
            rows_of(store, experts.slot, ids)
            experts.after_window()
        experts.before_window()

        assert (experts.tiers()[0, :ACTIVE] == Tier.PRIMARY).all()


def test_routing_is_recorded_in_order(pack, store):
    with opened(pack, store, np.zeros((LAYERS, EXPERTS), np.uint8)) as experts:
        experts.record_routing(True)
        first, second = routed(2, seed=1), routed(1, seed=2)
        rows_of(store, experts.slot, first, layer=3)
        rows_of(store, experts.slot, second, layer=0)

        records = experts.take_routing()

        assert [layer for layer, _ in records] == [3, 0]
        assert np.array_equal(records[0][1], first)
        assert np.array_equal(records[1][1], second)
        assert experts.take_routing() == []


def test_a_slot_outside_its_arena_is_refused(pack, store):
    tiers = np.zeros((LAYERS, EXPERTS), np.uint8)
    tiers[0, :2] = Tier.PRIMARY
    good = placement_of(pack, tiers)

    for slots, problem in ((good.slots + 256, "its slot at byte"), (good.slots * 0, "shares its")):
        bad = Placement(**{**vars(good), "slots": slots})
        with pytest.raises(ValueError, match=problem):
            ExpertTiers.open(
                store,
                bad,
                FROZEN,
                ram_is_short=False,
                peer_threads=1,
                host_threads=0,
                stream_share=0.0,
                report=lambda line: None,
            )


def test_an_arena_that_memory_does_not_hold_is_an_error(pack, store):
    good = placement_of(pack, np.zeros((LAYERS, EXPERTS), np.uint8))
    huge = Placement(**{**vars(good), "primary_bytes": 1 << 60})

    with pytest.raises(StrataError, match="no memory for arenas"):
        ExpertTiers.open(
            store,
            huge,
            FROZEN,
            ram_is_short=False,
            peer_threads=1,
            host_threads=0,
            stream_share=0.0,
            report=lambda line: None,
        )


def test_closed_tiers_are_named_by_the_op(pack, store):
    with opened(pack, store, np.zeros((LAYERS, EXPERTS), np.uint8)) as experts:
        slot = experts.slot

    with pytest.raises(FAILED, match=f"expert_ffn: tiers {slot} are closed"):
        rows_of(store, slot, routed(1))


def test_shares_of_nothing_are_unknown():
    names = ("primary", "peer", "stream", "host", "file")

    assert shares({f"entries_{name}": 0 for name in names}) is None


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """Many small experts in a layer; those of layer 0 are float32, all others IQ3_S."""
    types = {"*_exps*": 21, "blk.0.ffn_*_exps*": 0}
    path = tmp_path_factory.mktemp("wide") / "model.gguf"
    sizes = dataclasses.replace(BLOCKY, experts=40, experts_active=8)
    with open_pack(make_model(path, sizes, types=types).path) as pack:
        store = fill_store(pack)
        yield pack, store
        store.close()


def opened_wide(wide, tier, **options):
    pack, store = wide
    layers = pack.config.num_layers
    tiers = np.full((layers, 40), tier, np.uint8)
    return opened(pack, store, tiers, **options)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("share", [0.5, 0.9, 1.0])
def test_streams_the_share_that_was_asked_for_however_large(wide, layer, share):
    store = wide[1]
    ids = np.arange(40, dtype=np.int32).reshape(5, 8)

    with opened_wide(wide, Tier.HOST, stream_share=share) as experts:
        y = rows_of(store, experts.slot, ids, layer)
        counters = experts.counters()

    assert np.array_equal(y, rows_of(store, -1, ids, layer))
    assert counters["entries_stream"] == 40 * share
    assert counters["entries_host"] == 40 - 40 * share


@pytest.mark.parametrize("tier", [Tier.PEER, Tier.HOST])
def test_gives_float_experts_the_same_bits_beside_the_caller(wide, tier):
    store = wide[1]
    ids = np.arange(40, dtype=np.int32).reshape(5, 8)

    with opened_wide(wide, tier, host_threads=2) as experts:
        for seed in range(3):
            y = rows_of(store, experts.slot, ids, 0, seed)
            assert np.array_equal(y, rows_of(store, -1, ids, 0, seed))


@pytest.mark.parametrize(
    ("tier", "name", "advice"),
    [
        (Tier.PEER, "the peer's worker", "--peer_device=-1"),
        (Tier.HOST, "the host's workers", "--pool_workers=0"),
    ],
)
def test_a_stopped_worker_ends_the_call_and_every_later_one(pack, store, tier, name, advice):
    tiers = np.full((LAYERS, EXPERTS), tier, np.uint8)

    with opened(pack, store, tiers, host_threads=1, timeout_ms=1000) as experts:
        rows_of(store, experts.slot, routed(2))
        experts.stall(tier, FOR_GOOD_MS)
        with pytest.raises(FAILED, match=f"{name} gave no sign of life for 1000 ms.*{advice}"):
            rows_of(store, experts.slot, routed(2))
        with pytest.raises(FAILED, match=f"expert_ffn: refused: {name} gave no sign"):
            rows_of(store, experts.slot, routed(2))
        with pytest.raises(StrataError, match=f"^expert tiers: {name} gave no sign of life"):
            experts.before_window()
        assert experts.audit() == []
        experts.stall(tier, 0)
    assert experts.counters()["entries_host"] + experts.counters()["entries_peer"] > 0


@pytest.mark.parametrize("tier", [Tier.PEER, Tier.HOST])
def test_a_late_worker_changes_nothing(pack, store, tier):
    tiers = np.full((LAYERS, EXPERTS), tier, np.uint8)
    ids = routed(2)

    with opened(pack, store, tiers, host_threads=1, timeout_ms=20_000) as experts:
        experts.stall(tier, 60)
        y = rows_of(store, experts.slot, ids)
        waited = experts.counters()["waits_us"]

    assert np.array_equal(y, rows_of(store, -1, ids))
    assert waited > 20_000


def test_a_round_never_writes_what_a_lost_worker_may_read(pack, store):
    """The peer's job is stuck with its slots in hand: the round beside it gives way and ends."""
    tiers = np.zeros((LAYERS, EXPERTS), np.uint8)
    tiers[:, :4] = Tier.PEER
    away = np.arange(4, 8, dtype=np.int32)[None]
    both = np.asarray([[0, 1, 4, 5]], np.int32)

    with opened(pack, store, tiers, HECTIC, timeout_ms=1000) as experts:
        for _ in range(4):
            rows_of(store, experts.slot, away)
        experts.stall(Tier.PEER, FOR_GOOD_MS)

        def lose():
            with pytest.raises(FAILED, match="the peer's worker gave no sign of life"):
                rows_of(store, slot, both)

        call = threading.Thread(target=lose)
        slot, before = experts.slot, experts.counters()["entries_peer"]
        call.start()
        while experts.counters()["entries_peer"] == before:
            time.sleep(0.001)
        experts.after_window()
        call.join()

        assert experts.audit() == []
        assert (experts.tiers() == tiers).all()
        assert experts.counters()["swaps_peer"] == 0
        experts.stall(Tier.PEER, 0)


@pytest.mark.parametrize("tier", [Tier.PRIMARY, Tier.PEER, Tier.HOST])
def test_a_tier_without_workers_cannot_be_stalled(pack, store, tier):
    with (
        opened(pack, store, np.zeros((LAYERS, EXPERTS), np.uint8)) as experts,
        pytest.raises(ValueError, match=f"tier {int(tier)} has no worker"),
    ):
        experts.stall(tier, 1)


def test_closed_tiers_keep_their_counters_and_nothing_else(pack, store):
    with opened(pack, store, np.zeros((LAYERS, EXPERTS), np.uint8)) as experts:
        rows_of(store, experts.slot, routed(2))

    assert experts.counters()["entries_host"] == 2 * ACTIVE
    with pytest.raises(ValueError, match="the tiers are closed"):
        experts.tiers()
    experts.close()


STUCK = """
import time
import numpy as np
from strata_jax.weights.matrices import fill_store
from strata_jax.weights.pack import open_pack
from strata_jax.weights.placement import Tier
from tests.weights.test_experts import EMBEDDED, EXPERTS, LAYERS, opened, routed, rows_of

def lose(experts, store, milliseconds):
    experts.stall(Tier.HOST, milliseconds)
    try:
        rows_of(store, experts.slot, routed(2))
    except (ValueError, RuntimeError):
        return
    raise AssertionError("it waited")

everywhere = np.zeros((LAYERS, EXPERTS), np.uint8)
with open_pack(EMBEDDED) as pack:
    store = fill_store(pack)
    with opened(pack, store, everywhere, host_threads=1, timeout_ms=50) as experts:
        lose(experts, store, 2000)
    store.close()
time.sleep(2.2)  # the worker comes back to a model that is gone
pack = open_pack(EMBEDDED)
store = fill_store(pack)
context = opened(pack, store, everywhere, host_threads=1, timeout_ms=50)
lose(context.__enter__(), store, 3600_000)
print("exits", flush=True)
"""


def test_a_stuck_worker_keeps_nothing_from_closing_or_exiting():
    done = subprocess.run(
        [sys.executable, "-c", STUCK],
        cwd=pathlib.Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert (done.returncode, done.stdout) == (0, "exits\n"), done.stderr
