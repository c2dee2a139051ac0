import dataclasses

import numpy as np
import pytest

from strata_jax.ops.case_inputs import make_call
from strata_jax.ops.cases import CASES
from tests.ops_maker import (
    OP_ERRORS,
    assert_close,
    assert_same_bits,
    changed,
    native,
    run_plain,
    small_cases,
)
from tests.ops_rules import Rules

KEYS, VALUES, BLOCKS, SCALES = 2, 3, 4, 5


def make(rows=8, position=1001, seed=0, kv="f32"):
    case = dataclasses.replace(CASES["qsa_attend"][0], rows=rows, position=position, kv=kv)
    return make_call("qsa_attend", case, seed=seed)


def dense(call):
    """Attention to every cell so far."""
    blocks = np.full((len(call.operands[0]), 1), -1, np.int32)
    return changed(dataclasses.replace(call, attributes={"ratio": 0}), _4=blocks)


class TestRules(Rules):
    op = "qsa_attend"


class TestHalfRules(TestRules):
    kv = "fp16"


class TestInt8Rules(TestRules):
    kv = "int8"


@pytest.mark.parametrize("kv", ["fp16", "int8", "f32"])
@pytest.mark.parametrize("case", small_cases("qsa_attend"), ids=lambda case: case.name)
def test_equals_its_twin(case, kv):
    call = make_call("qsa_attend", dataclasses.replace(case, kv=kv), seed=1)

    assert_close("qsa_attend", native(call), run_plain(call))


@pytest.mark.parametrize("position", [0, 1, 30, 31, 32, 100])
def test_equals_its_twin_below_and_above_the_budget(position):
    call = make(rows=8, position=position)

    assert_close("qsa_attend", native(call), run_plain(call))


@pytest.mark.parametrize("position", [0, 1, 15, 16, 200])
def test_equals_its_twin_where_attention_is_dense(position):
    call = dense(make(rows=8, position=position))

    assert_close("qsa_attend", native(call), run_plain(call))


def test_equals_dense_attention_where_every_block_is_chosen():
    call = make(rows=8, position=200)  # fewer cells than the budget

    assert_same_bits(native(call), native(dense(call)))


def test_computes_a_known_row():
    # Two cells with equal scores: the mean of their values, halved by the gate's sigmoid(0).
    call = make(rows=1, position=1)
    zero = [np.zeros_like(call.operands[place]) for place in range(4)]
    zero[VALUES][:2] = [[[1.0] * 64] * 2, [[3.0] * 64] * 2]

    (got,) = native(changed(call, _0=zero[0], _1=zero[1], _2=zero[2], _3=zero[3]))

    np.testing.assert_allclose(got, np.full((1, 512), 1.0), rtol=1e-6)


@pytest.mark.parametrize("fill", [np.nan, np.inf, -np.inf])
def test_does_not_read_cells_that_no_row_attends_to(fill):
    call = make()
    listed = np.unique(call.operands[BLOCKS][:, :, None] * 4 + np.arange(4))
    used = np.union1d(listed, np.arange(1000, 1009))
    new = {}
    for place in (KEYS, VALUES):
        cells = np.full_like(call.operands[place], fill)
        cells[used] = call.operands[place][used]
        new[f"_{place}"] = cells

    assert_same_bits(native(changed(call, **new)), native(call))


def test_does_not_read_cells_of_rows_behind_it():
    call = dense(make())
    keys = call.operands[KEYS].copy()
    keys[1004:] = np.nan  # row 3 and those behind it stand there

    (got,) = native(changed(call, _2=keys))

    assert np.isnan(got).any(axis=1).tolist() == [False] * 3 + [True] * 5
    np.testing.assert_array_equal(got[:3], native(call)[0][:3])


def test_stays_finite_at_large_scores():
    call = make()
    call = changed(call, _0=call.operands[0] * np.float32(1e4))

    got = native(call)

    assert np.isfinite(got[0]).all()
    np.testing.assert_allclose(got[0], run_plain(call)[0], rtol=0, atol=1e-3)


def test_shows_a_nan_of_a_cell_it_attends_to():
    call = make()
    block = call.operands[BLOCKS][0, 3]
    values = call.operands[VALUES].copy()
    values[block * 4 + 1, 0, 5] = np.nan

    (got,) = native(changed(call, _3=values))

    heads = np.isnan(got[0].reshape(8, 64))
    assert np.argwhere(heads).tolist() == [[head, 5] for head in range(4)]  # of that key head


@pytest.mark.parametrize("kv", ["fp16", "int8"])
def test_equals_attention_over_the_widened_cells(kv):
    call = make(kv=kv)
    keys, values, scales = (call.operands[place] for place in (KEYS, VALUES, SCALES))
    if kv == "int8":
        keys, values = keys * scales[..., :1], values * scales[..., 1:]
    wide = changed(
        call, _2=keys.astype(np.float32), _3=values.astype(np.float32), _5=make().operands[SCALES]
    )

    assert_same_bits(native(call), native(wide))


@pytest.mark.parametrize("kv", ["fp16", "int8"])
def test_does_not_read_rounded_cells_that_no_row_attends_to(kv):
    call = make(kv=kv)
    listed = np.unique(call.operands[BLOCKS][:, :, None] * 4 + np.arange(4))
    used = np.union1d(listed, np.arange(1000, 1009))
    new = {}
    for place in (KEYS, VALUES) if kv == "fp16" else (SCALES,):
        cells = np.full_like(call.operands[place], np.nan)
        cells[used] = call.operands[place][used]
        new[f"_{place}"] = cells

    assert_same_bits(native(changed(call, **new)), native(call))


class TestErrors:
    call = make()

    @pytest.mark.parametrize(
        "block", [251, 10_000, 2**31 - 1, -2, -(2**31)]
    )  # row 2 at 1003 ends block 250
    def test_name_a_block_that_is_not_complete_and_its_place(self, block):
        blocks = self.call.operands[BLOCKS].copy()
        blocks[2, 7] = block

        with pytest.raises(
            OP_ERRORS, match=rf"qsa_attend: blocks\[2, 7\] is {block}, not a complete block"
        ):
            native(changed(self.call, _4=blocks))

    def test_name_a_row_without_a_cell(self):
        # Row 2 at position 1003 has no unfinished block of its own.
        blocks = np.full_like(self.call.operands[BLOCKS], -1)

        with pytest.raises(OP_ERRORS, match="qsa_attend: row 2 attends to no cell"):
            native(changed(self.call, _4=blocks))

    @pytest.mark.parametrize("position", [-1, -(2**31), 1017, 2**31 - 1])
    def test_name_rows_outside_the_cache(self, position):
        with pytest.raises(
            OP_ERRORS, match=f"qsa_attend: 8 rows at position {position}, the cache has 1024"
        ):
            native(changed(self.call, pos=np.int32(position)))

    @pytest.mark.parametrize(
        ("place", "shape"),
        [
            (0, (8, 8, 48)),
            (0, (8, 7, 64)),
            (1, (8, 1023)),
            (1, (7, 1280)),
            (KEYS, (1024, 2, 48)),
            (KEYS, (1024, 0, 64)),
            (KEYS, (1024, 3, 64)),
            (VALUES, (1023, 2, 64)),
            (VALUES, (1024, 1, 64)),
        ],
    )
    def test_name_shapes_that_do_not_belong_together(self, place, shape):
        with pytest.raises(OP_ERRORS, match="qsa_attend: shapes o"):
            native(changed(self.call, **{f"_{place}": np.zeros(shape, np.float32)}))

    def test_name_blocks_of_another_number_of_rows(self):
        with pytest.raises(OP_ERRORS, match="qsa_attend: shapes o"):
            native(changed(self.call, _4=self.call.operands[BLOCKS][:7]))

    def test_name_a_ratio_below_zero(self):
        with pytest.raises(OP_ERRORS, match="qsa_attend: shapes o"):
            native(dataclasses.replace(self.call, attributes={"ratio": -4}))
