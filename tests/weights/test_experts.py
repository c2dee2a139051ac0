"""Expert tiers: the same bits wherever an expert lies, honest counts, swaps that never tear a slot."""

import contextlib
import pathlib
import threading

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_jax.errors import StrataError
from strata_jax.ops.sets import native_ops
from strata_jax.weights.experts import AdaptSettings, ExpertTiers, shares
from strata_jax.weights.matrices import fill_store
from strata_jax.weights.pack import open_pack
from strata_jax.weights.placement import Placement, Tier, slot_bytes

EMBEDDED = pathlib.Path(__file__).parents[2] / "strata_jax/models/strata-small/model-IQ3_S.gguf"
LAYERS, EXPERTS, ACTIVE, WIDTH = 8, 16, 4, 256
FROZEN = AdaptSettings(every=1, swaps=0, peer_swaps=0, decay=0.7)
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
        sum(pack.tensor(f"blk.{layer}.ffn_{name}_exps.weight").nbytes for name in names) // EXPERTS
        for layer in range(LAYERS)
    ]
    sizes = np.repeat(np.asarray(layer_bytes, np.int64)[:, None], EXPERTS, axis=1)
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
def opened(pack, store, tiers, adapt=FROZEN, *, stream_share=0.0, host_threads=0):
    experts = ExpertTiers.open(
        store,
        placement_of(pack, tiers),
        adapt,
        ram_is_short=False,
        peer_threads=1,
        host_threads=host_threads,
        stream_share=stream_share,
        report=lambda line: None,
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

    # JAX maps the error by the path a call takes: the first compiles, later ones are dispatched.
    with pytest.raises((ValueError, RuntimeError), match=f"expert_ffn: tiers {slot} are closed"):
        rows_of(store, slot, routed(1))


def test_shares_of_nothing_are_unknown():
    names = ("primary", "peer", "stream", "host", "file")

    assert shares({f"entries_{name}": 0 for name in names}) is None
