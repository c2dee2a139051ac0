import dataclasses

import pytest

from strata_jax.config import DraftSettings
from strata_jax.ops.cases import EMBEDDED
from strata_jax.weights.budget import StepSizes
from strata_jax.weights.draft_needs import draft_kv, draft_sizes


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
