import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from strata_jax.config import HiddenNorm
from strata_jax.model.draft import best_drafts, drop_oldest
from strata_jax.weights.draft_layer import find_draft_layer
from strata_jax.weights.pack import open_pack
from tests.drafter_steps import OpenDraft, before, residuals
from tests.gguf_maker import TINY, make_model
from tests.stepper import same_bits

SHARED = pathlib.Path(__file__).parents[3] / "shared"
READINGS: tuple[HiddenNorm, ...] = ("whole", "per_stream")
MAX_DIFFERENCE = 5e-5
IDS = np.random.default_rng(5).integers(0, 500, 100).astype(np.int32)


@pytest.fixture(scope="module")
def draft(tmp_path_factory):
    path = make_model(tmp_path_factory.mktemp("draft") / "tiny.gguf", TINY).path
    with open_pack(path) as pack:
        found = find_draft_layer(pack)
        assert found is not None
        yield found


@pytest.fixture(scope="module")
def residual(draft):
    return residuals(draft.trunk, IDS)


@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize("name", ["short", "eos", "long"])
@pytest.mark.parametrize("file", [None, "mtp-only-f32.gguf"])
def test_equals_the_independent_logits(file, name, reading):
    path = SHARED / f"golden/micro/mtp/{name}.npz"
    if not path.exists():
        pytest.skip(f"LOUD SKIP: {path} is not there: the draft layer's logits were not compared")
    golden = np.load(path)
    models = SHARED / "models/micro"

    with open_pack(models / "model-f32.gguf") as pack:
        draft = find_draft_layer(pack, file and models / file)
        assert draft is not None
        layer = OpenDraft(draft, reading=reading)
        logits = layer.logits(golden["ids"], residuals(pack, golden["ids"]))
        draft.close()

    assert np.abs(logits[golden["positions"]] - golden[reading]).max() < MAX_DIFFERENCE


@pytest.mark.parametrize("reading", READINGS)
def test_equals_its_twins(draft, residual, reading):
    native = OpenDraft(draft, reading=reading).logits(IDS, residual)
    plain = OpenDraft(draft, reading=reading, plain=True).logits(IDS, residual)

    assert np.abs(native - plain).max() < MAX_DIFFERENCE


def test_tells_the_readings_apart(draft, residual):
    whole, per_stream = (OpenDraft(draft, reading=r).logits(IDS, residual) for r in READINGS)

    assert np.abs(whole - per_stream).max() > 1e-3


def test_depends_on_every_stream_of_its_own(draft, residual):
    # A mean of the streams taken before the projection would be the same for both (reports.md, 74).
    turned = residual[:, ::-1].copy()

    ours, others = (OpenDraft(draft).logits(IDS, rows) for rows in (residual, turned))

    assert np.abs(ours - others).max() > 1e-3


@pytest.mark.parametrize("kv", ["f32", "fp16"])
@pytest.mark.parametrize("known", [1, 3, 4, 37, 99])
def test_writes_the_same_cells_without_the_rest_of_the_layer(draft, residual, known, kv):
    layer, hidden = OpenDraft(draft, kv=kv), before(residual)
    rest = len(IDS) - known
    zero, count = np.int32(0), np.int32(known)

    cells = layer.known(layer.empty(), IDS[:known], hidden[:known], zero, zero, count)
    after = layer.whole(cells, IDS[known:], hidden[known:], zero, count, np.int32(rest))

    expected = layer.whole(layer.empty(), IDS, hidden, zero, zero, np.int32(len(IDS)))
    # XLA's sums of the two norms depend on the number of rows: a draft's bits are promised to nobody.
    for ours, whole in zip(
        jax.tree.leaves((after[0], after[2])),
        jax.tree.leaves((expected[0][known:], expected[2])),
        strict=True,
    ):
        np.testing.assert_allclose(ours, whole, atol=1e-5 if kv == "f32" else 4e-3)


def test_writes_rows_of_drafts_over(draft, residual):
    layer, hidden = OpenDraft(draft), before(residual)
    zero, begin, count = np.int32(0), np.int32(41), np.int32(8)
    cells = layer.known(layer.empty(), IDS, hidden, zero, zero, begin)
    wrong = layer.whole(cells, IDS[:8], hidden[8:16], zero, begin, count)[2]

    rows = IDS[41:49], hidden[41:49], zero, begin, count
    again, expected = layer.whole(wrong, *rows), layer.whole(cells, *rows)

    assert same_bits(again, expected)


def test_gives_rows_past_the_live_ones_no_cells(draft, residual):
    layer, hidden = OpenDraft(draft), before(residual)
    zero, live = np.int32(0), np.int32(0)

    _, _, cells = layer.whole(layer.empty(), IDS[:8], hidden[:8], zero, zero, live)

    assert same_bits(cells, layer.empty())


@pytest.mark.parametrize("kv", ["f32", "fp16"])
def test_goes_on_in_a_cache_that_dropped_cells_it_does_not_select(draft, residual, kv):
    # 64 of 100 cells are dropped. What is left is the same cache as one that never had them.
    layer, hidden = OpenDraft(draft, kv=kv), before(residual)
    zero, late, rows = np.int32(0), np.int32(64), slice(92, 100)
    count = np.int32(8)
    cells = layer.known(layer.empty(), IDS[:92], hidden[:92], zero, zero, np.int32(92))
    never = layer.known(layer.empty(), IDS[64:92], hidden[64:92], late, zero, np.int32(28))

    dropped = jax.jit(lambda cells: drop_oldest(cells, 64, layer.config.index_ratio))(cells)
    ours = layer.whole(dropped, IDS[rows], hidden[rows], late, np.int32(28), count)
    expected = layer.whole(never, IDS[rows], hidden[rows], late, np.int32(28), count)

    for found, other in zip(ours[:2], expected[:2], strict=True):
        np.testing.assert_allclose(found, other, atol=1e-5 if kv == "f32" else 4e-3)


def test_names_the_lowest_of_equally_probable_ids():
    logits = jnp.asarray([[0.0, 3.0, 3.0, -1.0], [5.0, 5.0, 5.0, 5.0]])

    ids, probabilities = best_drafts(logits, None)
    named, _ = best_drafts(logits, jnp.asarray([7, 9, 11, 20]))

    assert (ids.tolist(), named.tolist()) == ([1, 0], [9, 7])
    np.testing.assert_allclose(
        probabilities, [float(jax.nn.softmax(logits[0])[1]), 0.25], rtol=1e-6
    )


def test_needs_no_indexer(tmp_path):
    pairs = {"qwen4exp.attention.compress_ratios": None}
    path = make_model(tmp_path / "dense.gguf", TINY, pairs=pairs, drop=["*indexer*"]).path

    with open_pack(path) as pack:
        draft = find_draft_layer(pack)
        assert draft is not None
        assert dataclasses.asdict(pack.config)["index_budget"] == 0
        rows = residuals(pack, IDS)
        native, plain = (OpenDraft(draft, plain=p).logits(IDS, rows) for p in (False, True))

    assert np.abs(native - plain).max() < MAX_DIFFERENCE
