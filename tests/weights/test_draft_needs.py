import dataclasses
import re

import pytest

from strata_jax.config import DraftSettings, Platform, TierSettings
from strata_jax.ops.cases import EMBEDDED
from strata_jax.weights.budget import MIB, StepSizes
from strata_jax.weights.draft_needs import draft_kv, draft_needs, draft_sizes
from strata_jax.weights.draft_vocab import format_draft_vocab
from strata_jax.weights.pack import open_pack
from strata_jax.weights.plan import make_plan
from strata_jax.weights.tier_plan import Machine, plan_tiers
from tests.gguf_maker import BLOCKY, TINY, make_model
from tests.weights.tier_plans import HOST, fixed_bytes, make_pack_file, problem_of


def sizes(window=4096, context=8192, tile_rows=256, ratio=4):
    config = dataclasses.replace(EMBEDDED, index_ratio=ratio)
    steps = StepSizes(tile_rows=tile_rows)
    return draft_sizes(config, DraftSettings(mtp_window=window), context, "fp16", steps)


def test_holds_the_whole_context_where_the_window_is_as_long():
    found = sizes(window=8192)

    assert found.step == 0
    assert found.num_cells >= 8192 + 256
    assert found.num_cells % 64 == 0


@pytest.mark.parametrize("tile_rows", [256, 2048])
@pytest.mark.parametrize("window", [64, 100, 4096])
@pytest.mark.parametrize("ratio", [1, 4, 6])
def test_keeps_the_window_whenever_it_drops_a_step(window, tile_rows, ratio):
    found = sizes(window=window, tile_rows=tile_rows, context=1 << 18, ratio=ratio)

    assert found.step % (16 * ratio) == 0
    rows = max(min(tile_rows, 512), 8 + 3)  # most that are written at once
    first_too_far = found.num_cells - rows + 1
    assert first_too_far - found.step >= window
    assert first_too_far > found.step


def test_is_not_larger_than_a_cache_of_the_whole_context_and_a_step():
    assert sizes(window=8191).num_cells <= sizes(window=8192).num_cells + 512


def test_rounds_the_cells_of_one_layer_to_halves_at_most():
    assert [draft_kv(kv) for kv in ("f32", "fp16", "int8")] == ["f32", "fp16", "fp16"]


@pytest.fixture
def pack(tmp_path):
    with open_pack(make_pack_file(tmp_path)) as opened:
        yield opened


def needs(pack, platform: Platform = "cpu", context=4096, **settings):
    steps = StepSizes(tile_rows=256)
    found = draft_needs(pack, DraftSettings(**settings), context, "fp16", steps, platform)
    assert found is not None
    return found


def test_counts_the_layers_weights_as_they_lie(pack):
    file_bytes = sum(
        pack.tensor(name).nbytes
        for name, spec in pack.specs.items()
        if spec.tier == "draft" and spec.use != "vector"
    )

    assert needs(pack).weight_bytes == file_bytes
    assert needs(pack, "cuda").weight_bytes >= file_bytes


def test_counts_rows_of_the_head_that_are_copied(pack, tmp_path):
    (tmp_path / "ids.txt").write_text(format_draft_vocab(range(100), "the first"))

    more = needs(pack, draft_vocab=tmp_path / "ids.txt").weight_bytes - needs(pack).weight_bytes

    assert more == 100 * BLOCKY.hidden * 4


def test_counts_the_cache_and_the_residuals(pack):
    row = BLOCKY.streams * BLOCKY.hidden * 4
    per_cell = 2 * BLOCKY.kv_heads * BLOCKY.head_dim * 2 + BLOCKY.index_dim * 5

    whole = needs(pack)

    # Of windows; on the CPU rows wait, too, for a tile that takes all of them.
    cells = (whole.xla_bytes - (4 * 8 + 2 * 256) * row) / per_cell
    assert 4096 + 256 <= cells <= 4096 + 256 + 64
    assert needs(pack, "cuda").xla_bytes == whole.xla_bytes - (2 * 256 - 8 * 8) * row
    assert needs(pack, context=1 << 18).xla_bytes == needs(pack, context=1 << 20).xla_bytes


def test_needs_nothing_without_a_draft_layer(tmp_path):
    path = make_model(tmp_path / "trunk.gguf", dataclasses.replace(TINY, drafts=0)).path
    with open_pack(path) as pack:
        assert draft_needs(pack, DraftSettings(), 4096, "fp16", StepSizes(), "cpu") is None


def test_needs_nothing_where_none_is_wanted(pack):
    assert draft_needs(pack, None, 4096, "fp16", StepSizes(), "cpu") is None


def test_a_plan_says_what_would_fit_between_trunk_and_drafter(pack):
    sizes = make_plan(pack, 4096)

    def plan(mib, draft):
        settings = TierSettings(device_memory_mib=mib, vram_reserve_mib=0)
        return plan_tiers(pack, sizes, settings, Machine(platform="cpu", host=HOST), draft=draft)

    trunk = fixed_bytes(plan(1000, None))
    both = fixed_bytes(plan(1000, needs(pack)))
    steps = StepSizes(tile_rows=256)
    assert both - trunk == needs(pack).weight_bytes + needs(pack).xla_bytes_of(steps)
    mib = -(-trunk // MIB)

    message = problem_of(plan(mib, needs(pack)))

    assert re.search(r"draft [0-9.]+ .*draft cache [0-9.]+ .*--mtp=off", message)
    assert plan(mib, None).fits
