import dataclasses

import numpy as np
import pytest

from strata_jax.ops.case_inputs import Call, make_call
from strata_jax.ops.cases import CASES
from tests.ops_maker import (
    KERNELS,
    OP_ERRORS,
    assert_close,
    changed,
    kernels,
    native,
    run_plain,
    small_cases,
    threads,
)
from tests.ops_rules import Rules

RATIO, NB = 4, 8
"""A budget of 32 cells."""


def call_of(scores, position, rows=1):
    """One head of two channels whose dot product with block b is scores[b]."""
    groups = -(-len(scores) // 16)
    keys = np.zeros((groups * 16, 2), np.float32)
    keys[: len(scores), 0] = scores
    keys[len(scores) :] = np.nan  # blocks nobody wrote
    index_keys = np.swapaxes(keys.reshape(groups, 16, 2), 1, 2).copy()
    index_q = np.zeros((rows, 1, 2), np.float32)
    index_q[:, :, 0] = 1
    return Call(
        op="qsa_select",
        operands=(index_q, index_keys, np.int32(position), np.int32(rows)),
        attributes={"ratio": RATIO, "num_blocks": NB},
        matrices={},
        macs=0,
        num_bytes=0,
    )


def chosen(scores, position=None, rows=1):
    """The blocks of each row, fill left out."""
    position = len(scores) * RATIO - rows if position is None else position
    (blocks,) = native(call_of(np.asarray(scores, np.float32), position, rows))
    return [[block for block in row if block >= 0] for row in blocks.tolist()]


class TestRules(Rules):
    op = "qsa_select"


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("case", small_cases("qsa_select"), ids=lambda case: case.name)
def test_equals_its_twin(case, seed):
    call = make_call("qsa_select", case, seed=seed)

    assert_close("qsa_select", native(call), run_plain(call))


class TestBudget:
    """Report 2: one canonical list for every prompt near the budget."""

    @pytest.mark.parametrize(
        ("tokens", "count"), [(1, 0), (3, 0), (4, 1), (31, 7), (32, 8), (33, 8), (36, 8), (40, 8)]
    )
    def test_bounds_the_blocks(self, tokens, count):
        scores = np.random.default_rng(tokens).random(10)

        (blocks,) = chosen(scores, position=tokens - 1)

        assert len(blocks) == count

    @pytest.mark.parametrize("tokens", [31, 32, 33, 35])
    def test_takes_all_complete_blocks_below_and_at_it(self, tokens):
        scores = np.arange(10)[::-1]

        assert chosen(scores, position=tokens - 1) == [list(range(tokens // 4))]

    @pytest.mark.parametrize("tokens", [31, 32, 33, 36, 40])
    def test_gives_one_answer_in_ten_runs_on_any_threads(self, tokens):
        scores = np.random.default_rng(0).random(10).astype(np.float32)
        call = call_of(scores, tokens - 8, rows=8)
        expected = native(call)[0].tolist()
        for count in (1, 2, 3, 5):
            with threads(count):
                assert all(native(call)[0].tolist() == expected for _ in range(10))

    def test_lists_the_chosen_in_ascending_order_and_fills_up(self):
        (blocks,) = native(call_of(np.array([3, 1, 9, 2, 8, 7, 5, 4, 6, 0], np.float32), 39))
        assert blocks.tolist() == [[0, 2, 3, 4, 5, 6, 7, 8]]
        (blocks,) = native(call_of(np.ones(10, np.float32), 10))
        assert blocks.tolist() == [[0, 1, -1, -1, -1, -1, -1, -1]]

    def test_does_not_see_blocks_that_are_not_complete(self):
        # The best block ends behind the row; blocks past the last complete one hold NaN.
        scores = [1, 1, 1, 1, 1, 1, 1, 1, 0, 99]

        assert chosen(scores, position=38) == [[0, 1, 2, 3, 4, 5, 6, 7]]
        assert chosen(scores, position=39) == [[0, 1, 2, 3, 4, 5, 6, 9]]

    @pytest.mark.parametrize("blocks", [15, 16, 17, 31, 32, 33])
    def test_counts_blocks_on_either_side_of_a_group(self, blocks):
        scores = np.arange(1, blocks + 1)

        assert chosen(scores) == [list(range(blocks - NB, blocks))]


class TestTies:
    """Report 4: equal scores go to the lower block, and a zero has no sign."""

    @pytest.mark.parametrize("score", [0.0, -0.0, 1.0, np.inf])
    def test_take_the_lowest_blocks_where_all_are_equal(self, score):
        assert chosen([score] * 40) == [list(range(NB))]

    @pytest.mark.parametrize("seed", range(4))
    def test_take_the_lowest_blocks_where_zeros_have_either_sign(self, seed):
        signs = np.random.default_rng(seed).choice([0.0, -0.0], 40)

        assert chosen(signs) == [list(range(NB))]

    @pytest.mark.parametrize("seed", range(4))
    def test_take_negative_scores_as_zero(self, seed):
        scores = -np.random.default_rng(seed).random(40)

        assert chosen(scores) == [list(range(NB))]

    def test_fill_up_behind_higher_scores(self):
        scores = np.zeros(40)
        scores[[39, 20, 5]] = [1, 2, 1]

        assert chosen(scores) == [[0, 1, 2, 3, 4, 5, 20, 39]]

    def test_are_cut_at_the_border(self):
        scores = np.full(40, 1.0)
        scores[30:36] = 2

        assert chosen(scores) == [[0, 1, *range(30, 36)]]

    def test_are_the_same_in_a_window_of_one_and_in_a_tile(self):
        scores = np.zeros(40)
        tile = chosen(scores, position=96, rows=64)

        for t in range(0, 64, 9):
            assert chosen(scores, position=96 + t) == [tile[t]]

    @pytest.mark.parametrize("name", KERNELS)
    def test_agree_with_the_twin(self, name):
        rng = np.random.default_rng(0)
        for _ in range(5):
            scores = rng.integers(-2, 3, 100).astype(np.float32)
            call = call_of(scores, 350, rows=50)
            with kernels(name):
                np.testing.assert_array_equal(native(call)[0], run_plain(call)[0])


def test_takes_a_nan_as_the_lowest_score():
    scores = np.ones(12)
    scores[3] = np.nan

    assert chosen(scores) == [[0, 1, 2, 4, 5, 6, 7, 8]]


class TestErrors:
    call = make_call("qsa_select", CASES["qsa_select"][2])

    @pytest.mark.parametrize("position", [-1, -(2**31), 20_000, 2**31 - 1])
    def test_name_rows_past_the_cache(self, position):
        with pytest.raises(OP_ERRORS, match=f"qsa_select: 8 rows at position {position} reach"):
            native(changed(self.call, pos=np.int32(position)))

    @pytest.mark.parametrize(
        ("place", "shape"), [(0, (8, 4, 32)), (1, (200, 32, 16)), (1, (200, 64, 8))]
    )
    def test_name_shapes_that_do_not_belong_together(self, place, shape):
        with pytest.raises(OP_ERRORS, match="qsa_select: shapes of index_q and index_keys"):
            native(changed(self.call, **{f"_{place}": np.zeros(shape, np.float32)}))

    def test_name_an_odd_width(self):
        call = changed(
            self.call, _0=np.zeros((8, 4, 3), np.float32), _1=np.zeros((200, 3, 16), np.float32)
        )

        with pytest.raises(OP_ERRORS, match="qsa_select: shapes of index_q and index_keys"):
            native(call)

    @pytest.mark.parametrize("change", [{"ratio": 0}, {"ratio": -4}])
    def test_name_a_ratio_that_is_none(self, change):
        call = dataclasses.replace(self.call, attributes={**self.call.attributes, **change})

        with pytest.raises(
            OP_ERRORS, match=r"qsa_select: 64 blocks of .* cells, expected at least 1 of 1"
        ):
            native(call)
