"""The attention block: which cells a row attends to, around the indexer's budget and past it."""

import dataclasses

import numpy as np
import pytest

from strata_jax.weights.pack import open_pack
from tests.gguf_maker import TINY, make_model
from tests.gguf_writer import patch
from tests.stepper import Stepper, same_bits, same_state, with_nan_cells

RATIO = TINY.index_ratio
BUDGET = TINY.index_budget
BLOCKS = BUDGET // RATIO


@pytest.mark.parametrize("length", [31, 32, 33, 36, 40])
def test_prompts_around_the_budget_have_one_answer_in_ten_runs(tiny, ids, length):
    def answer():
        logits, state = tiny.read(ids[:length], steps=64, form="tile")
        found = [logits[-1]]
        for position in range(length, length + 6):
            logits, state = tiny.step(state, [found[-1].argmax()], position, width=8)
            found.append(logits[0])
        return found, state

    first = answer()
    assert all(same_bits(answer(), first) for _ in range(9))


def test_selected_blocks_are_ascending_complete_and_within_the_budget(tiny, ids):
    tiny.read(ids[:192], steps=[64] * 3, form="tile")  # the last tile's rows are 128..191

    (blocks,) = tiny.selected
    assert blocks.shape == (64, BLOCKS)
    for row, chosen in enumerate(blocks):
        complete = (128 + row + 1) // RATIO
        assert (np.diff(chosen) > 0).all()
        assert chosen.min() >= 0
        assert chosen.max() < complete


def test_tiles_and_windows_select_the_same_blocks(tiny, ids):
    _, start = tiny.read(ids[:128], steps=64, form="tile")
    tiny.step(start, ids[128:192], 128, form="tile")
    by_tile = tiny.selected

    state, by_window = start, []
    for at in range(128, 192, 8):
        _, state = tiny.step(state, ids[at : at + 8], at)
        by_window.append(tiny.selected[0])

    assert np.array_equal(np.concatenate(by_window), by_tile[0])


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_equal_scores_select_the_lowest_blocks(tmp_path, ids, zero):
    made = make_model(tmp_path / "zeroed.gguf", TINY)
    for name in ("q_proj", "k_proj"):
        shape = (TINY.hidden, TINY.index_dim * (TINY.index_heads if name == "q_proj" else 1))
        values = np.zeros(shape, np.float32)
        values[shape[0] // 2 :] = zero  # half of the products are +0, half may be -0
        at = made.layouts[0].tensors[f"blk.3.indexer.{name}.weight"]
        patch(made.path, at, values.tobytes())

    with open_pack(made.path) as pack:
        stepper = Stepper(pack, kv="f32")
        _, state = stepper.read(ids[:64], steps=64, form="tile")
        prefill = stepper.selected[0]
        _, state = stepper.step(state, ids[64:65], 64, width=8)
        decode = stepper.selected[0]

    assert np.array_equal(prefill[BUDGET + RATIO - 1 :], [np.arange(BLOCKS)] * (64 - 35))
    assert np.array_equal(decode, [np.arange(BLOCKS)])


@pytest.mark.parametrize("depth", [100, 300, 500])
def test_a_row_reads_its_budget_and_tail_and_no_other_cell(tiny, ids, depth):
    _, state = tiny.read(np.resize(ids, depth), steps=64, form="tile")
    logits, _ = tiny.step(state, ids[:1], depth, width=8)
    listed = tiny.selected[0][0]
    assert len(listed) == BLOCKS
    cells = np.setdiff1d(np.arange(depth), (listed[:, None] * RATIO + np.arange(RATIO)).ravel())
    assert len(cells) == depth - BUDGET  # the row's own cell, written by the step, is its tail

    spoiled = with_nan_cells(state, cells, np.arange(0))
    again, _ = tiny.step(tiny.place(spoiled), ids[:1], depth, width=8)

    assert same_bits(again, logits)


def test_another_budget_equals_a_file_with_that_budget(tmp_path, tiny, tiny_pack, ids):
    made = make_model(tmp_path / "wide.gguf", dataclasses.replace(TINY, index_budget=64))
    wide = dataclasses.replace(tiny_pack.config, index_budget=64)

    logits, state = Stepper(tiny_pack, config=wide, kv="f32").read(ids[:100], steps=8)

    with open_pack(made.path) as pack:
        expected, expected_state = Stepper(pack, kv="f32").read(ids[:100], steps=8)
    narrow, _ = tiny.read(ids[:100], steps=8)
    assert same_bits(logits, expected)
    assert same_state(state, expected_state, 100, RATIO)
    assert same_bits(logits[: BUDGET + RATIO - 1], narrow[: BUDGET + RATIO - 1])
    assert np.abs(logits[70:] - narrow[70:]).max() > 1e-3


def test_a_budget_past_the_cache_is_dense_attention(tmp_path, tiny_pack, ids):
    ratios = {"qwen4exp.attention.compress_ratios": ("i32[]", [0] * 5)}
    made = make_model(tmp_path / "dense.gguf", TINY, pairs=ratios)
    endless = dataclasses.replace(tiny_pack.config, index_budget=1 << 20)

    stepper = Stepper(tiny_pack, config=endless, kv="f32")
    logits, _ = stepper.read(ids[:130], steps=8)

    assert stepper.selected[0].shape[1] == stepper.cells // RATIO
    with open_pack(made.path) as pack:
        expected, _ = Stepper(pack, kv="f32").read(ids[:130], steps=8)
    assert same_bits(logits, expected)
