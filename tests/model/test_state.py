"""The decode state: sizes, the start, and that its recurrent part is all a resume needs."""

import dataclasses

import jax
import numpy as np
import pytest

from strata_jax.model.state import DecodeState, empty_state, num_cells
from tests.stepper import same_bits, same_state, with_nan_after


@pytest.mark.parametrize("context", [1, 63, 64, 512, 8192, 16500])
def test_cells_hold_the_context_and_a_padded_tile(context):
    cells = num_cells(context, 256)

    assert context + 256 <= cells < context + 256 + 128
    assert cells % 128 == 0


def test_an_empty_state_follows_the_sizes(tiny_pack):
    config = tiny_pack.config
    state = empty_state(config, 640, "fp16", 7)

    (cells,) = state.cells
    assert cells.keys.shape == cells.values.shape == (640, config.num_kv_heads, config.head_dim)
    assert cells.keys.dtype == cells.values.dtype == np.float16
    assert cells.scales.shape == (1, config.num_kv_heads, 2)
    assert cells.index_raw.shape == (640, config.index_dim)
    groups, width, lanes = cells.index_keys.shape
    assert (width, lanes) == (config.index_dim, 16)
    assert groups * lanes * config.index_ratio >= 640
    assert len(state.recurrent.linear) == config.layer_kinds.count("linear")
    assert state.recurrent.ngram is not None
    assert state.recurrent.ngram.tokens.tolist() == [config.ngram.eos_id] * 9
    assert all(not np.asarray(leaf).any() for leaf in jax.tree.leaves(state.recurrent.linear))


def test_codes_of_8_bits_have_a_scale_for_64_values(tiny_pack):
    wide = dataclasses.replace(tiny_pack.config, head_dim=256)

    (cells,) = empty_state(wide, 640, "int8", 7).cells

    assert cells.keys.dtype == cells.values.dtype == np.int8
    assert cells.scales.shape == (640, wide.num_kv_heads, 8)


def test_without_an_indexer_no_keys_are_kept_for_it(tiny_pack):
    dense = dataclasses.replace(tiny_pack.config, index_budget=0)

    (cells,) = empty_state(dense, 640, "fp16", 7).cells

    assert cells.index_raw.shape[0] == 1
    assert cells.index_keys.shape[0] == 1


def test_without_an_ngram_layer_it_has_no_state(tiny_pack):
    plain = dataclasses.replace(tiny_pack.config, ngram=None)

    assert empty_state(plain, 128, "fp16", 7).recurrent.ngram is None


def test_a_saved_recurrent_part_resumes_over_cells_that_went_on(native, ids):
    _, saved = native.read(ids[:64], steps=64, form="tile")
    _, gone_on = native.read(ids[100:200], steps=10, start=(saved, 64))

    resumed = DecodeState(cells=gone_on.cells, recurrent=saved.recurrent)
    logits, state = native.read(ids[64:128], steps=8, start=(native.place(resumed), 64))

    expected, expected_state = native.read(ids[64:128], steps=8, start=(saved, 64))
    assert same_bits(logits, expected)
    assert same_state(state, expected_state, 128, 4)


def test_cells_before_the_end_of_a_prefix_are_all_its_positional_state(native, ids):
    _, saved = native.read(ids[:64], steps=64, form="tile")
    cut = native.place(with_nan_after(saved, 64, 4))

    logits, _ = native.read(ids[64:80], steps=8, start=(cut, 64))

    assert same_bits(logits, native.read(ids[64:80], steps=8, start=(saved, 64))[0])
