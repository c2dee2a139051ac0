import dataclasses

import numpy as np
import pytest

from strata_jax.ops.case_inputs import make_call
from strata_jax.ops.cases import CASES, EMBEDDED
from tests.ops_maker import (
    OP_ERRORS,
    assert_close,
    assert_same_bits,
    changed,
    native,
    run_plain,
    small_cases,
)
from tests.ops_rules import InPlaceRules, Rules

KEYS, VALUES, RAW, INDEX_KEYS = 6, 7, 8, 9
CELLS = 128


def make(rows=8, position=0, seed=0, kv="f32"):
    case = dataclasses.replace(CASES["qsa_append"][0], rows=rows, position=position, kv=kv)
    return make_call("qsa_append", case, seed=seed)


def blocks_of(index_keys):
    """Pooled keys by block, [M, IC]."""
    return np.swapaxes(index_keys, 1, 2).reshape(-1, index_keys.shape[1])


def without_indexer(call):
    operands = list(call.operands)
    operands[0] = np.ascontiguousarray(operands[0][:, : 2 * (8 + 2) * 64])
    operands[RAW] = np.zeros((1, 64), np.float32)
    operands[INDEX_KEYS] = np.zeros((1, 64, 16), np.float32)
    attributes = {**call.attributes, "index_heads": 0, "ratio": 0}
    return dataclasses.replace(call, operands=tuple(operands), attributes=attributes)


class TestRules(Rules, InPlaceRules):
    op = "qsa_append"


class TestHalfRules(TestRules):
    kv = "fp16"


class TestInt8Rules(TestRules):
    kv = "int8"


@pytest.mark.parametrize("kv", ["fp16", "int8", "f32"])
@pytest.mark.parametrize("case", small_cases("qsa_append"), ids=lambda case: case.name)
def test_equals_its_twin(case, kv):
    call = make_call("qsa_append", dataclasses.replace(case, kv=kv), seed=1)

    assert_close("qsa_append", native(call), run_plain(call))


@pytest.mark.parametrize("position", [0, 1, 3, 4, 57, 62])
@pytest.mark.parametrize("live", [0, 1, 3, 5, 8])
def test_equals_its_twin_at_every_place_in_a_block(position, live):
    call = changed(make(), pos=np.int32(position), live=np.int32(live))

    assert_close("qsa_append", native(call), run_plain(call))


@pytest.mark.parametrize(("position", "live"), [(5, 3), (0, 8), (7, 1), (126, 2)])
def test_writes_its_own_cells_only(position, live):
    call = changed(make(), pos=np.int32(position), live=np.int32(live))

    results = native(call)

    others = [cell for cell in range(CELLS) if not position <= cell < position + live]
    for operand, result in ((KEYS, 2), (VALUES, 3), (RAW, 4)):
        before, after = call.operands[operand], results[result]
        assert_same_bits((after[others],), (before[others],))
        assert (after[position : position + live] != before[position : position + live]).any()
    done = range(position // 4, (position + live) // 4)
    same = (blocks_of(results[5]) == blocks_of(call.operands[INDEX_KEYS])).all(axis=1)
    assert np.flatnonzero(~same).tolist() == list(done)


def test_pools_a_block_from_the_cells_before_the_window_too():
    call = changed(make(), pos=np.int32(6), live=np.int32(2))
    raw = call.operands[RAW].copy()
    raw[4:6] += 1

    before, after = blocks_of(native(call)[5]), blocks_of(native(changed(call, _8=raw))[5])

    assert np.flatnonzero((before != after).any(axis=1)).tolist() == [1]


def test_puts_keys_at_position_zero_without_rotation():
    call = changed(make(), live=np.int32(1))

    _, _, keys, values, raw, *_ = native(call)

    proj = call.operands[0][0]
    k = proj[1024:1152].reshape(2, 64)
    norm = np.sqrt((k.astype(np.float64) ** 2).mean(axis=1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(keys[0], k / norm * call.operands[2], rtol=1e-5)
    np.testing.assert_array_equal(values[0], proj[1152:1280].reshape(2, 64))
    np.testing.assert_array_equal(raw[0], proj[-64:])


@pytest.mark.parametrize("position", [0, 5, 120])
def test_keeps_to_keys_and_values_without_an_indexer(position):
    call = changed(without_indexer(make()), pos=np.int32(position), live=np.int32(8))
    full = native(changed(make(), pos=np.int32(position), live=np.int32(8)))

    q, index_q, keys, values, raw, index_keys, _ = native(call)

    assert_same_bits((q, keys, values), (full[0], full[2], full[3]))
    assert index_q.shape == (8, 0, 64)
    assert not raw.any()
    assert not index_keys.any()


def test_rounds_halves_to_nearest_even_whatever_their_size():
    call = make(rows=1, kv="fp16")
    values = np.zeros((2, 64), np.float32)
    values[0, :6] = 1e-8, 3e-8, 2**-25, 3 * 2**-25, 6.1e-5, 6.0975e-5
    values[0, 6:12] = 1 + 2**-11, 1 + 3 * 2**-11, -65519, 65520, np.inf, np.nan
    proj = call.operands[0].copy()
    proj[0, 1152:1280] = values.ravel()

    got = native(changed(call, _0=proj))[3][0]

    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(got, values.astype(np.float16))


def test_quantises_groups_by_contract_t():
    call = make(rows=1, kv="int8")
    values = np.random.default_rng(3).standard_normal((2, 64)).astype(np.float32)
    values[1] = 1e-31
    proj = call.operands[0].copy()
    proj[0, 1152:1280] = values.ravel()
    _, _, _, codes, _, _, scales = native(changed(call, _0=proj))
    proj[0, 1152 + 70] = np.inf
    _, _, _, _, _, _, broken = native(changed(call, _0=proj))

    largest = np.abs(values[0]).max()
    expected = np.rint(values[0] * (np.float32(127) / largest))
    np.testing.assert_array_equal(codes[0], [expected, np.zeros(64)])
    np.testing.assert_array_equal(
        scales[0, :, 1], [largest * np.float32(float.fromhex("0x1.020408p-7")), 0]
    )
    assert np.isnan(broken[0]).tolist() == [[False, False], [False, True]]


@pytest.mark.parametrize("kv", ["fp16", "int8"])
def test_names_caches_whose_types_differ(kv):
    call, other = make(), make(kv=kv)
    for place in (KEYS, VALUES):
        with pytest.raises(OP_ERRORS, match="qsa_append: shapes or types of keys, values"):
            native(changed(call, **{f"_{place}": other.operands[place]}))


def test_names_scales_that_do_not_belong_to_the_cells():
    with pytest.raises(OP_ERRORS, match="qsa_append: shapes or types of keys, values"):
        native(changed(make(kv="int8"), _10=np.zeros((CELLS, 2, 1), np.float32)))


def test_rotates_far_positions_like_its_twin():
    # The angle of the fastest pair is the position itself: sin and cos must reduce it well.
    config = dataclasses.replace(EMBEDDED, num_kv_heads=1, head_dim=16, index_dim=16)
    case = dataclasses.replace(CASES["qsa_append"][0], config=config, rows=4, position=250_000)
    call = make_call("qsa_append", case)

    assert_close("qsa_append", native(call), run_plain(call))


@pytest.mark.parametrize("kv", ["f32", "int8"])
def test_rotates_by_the_position_and_not_by_the_cell(kv):
    # 64 cells were dropped: all that was in cell 64 + p is in cell p now, bit for bit.
    whole = changed(make(kv=kv), pos=np.int32(70), live=np.int32(8))
    dropped = {KEYS: 64, VALUES: 64, RAW: 64, INDEX_KEYS: 1}  # 16 blocks of 4 cells
    if kv == "int8":
        dropped[10] = 64
    shifted = {f"_{i}": np.roll(whole.operands[i], -n, axis=0) for i, n in dropped.items()}
    late = changed(whole, **shifted, _11=np.int32(64), pos=np.int32(6))

    before, after = native(whole), native(late)

    assert_same_bits(after[:2], before[:2])
    for place, cells in ((2, 64), (3, 64), (4, 64), (5, 1)):
        assert_same_bits((after[place][:cells],), (np.roll(before[place], -cells, axis=0)[:cells],))


@pytest.mark.parametrize("origin", [4, 4096])
def test_equals_its_twin_in_a_cache_that_begins_later(origin):
    call = changed(make(), _11=np.int32(origin), pos=np.int32(57), live=np.int32(8))

    assert_close("qsa_append", native(call), run_plain(call))


class TestErrors:
    call = make()

    @pytest.mark.parametrize(
        ("position", "live"),
        [(-1, 1), (CELLS - 7, 8), (2**31 - 1, 8), (-(2**31), 0), (CELLS + 1, 0)],
    )
    def test_name_rows_outside_the_cache(self, position, live):
        with pytest.raises(
            OP_ERRORS, match=f"qsa_append: {live} rows at position {position}, the cache has 128"
        ):
            native(changed(self.call, pos=np.int32(position), live=np.int32(live)))

    @pytest.mark.parametrize(
        ("place", "shape"),
        [
            (0, (8, 1599)),
            (1, (48,)),
            (2, (65,)),
            (3, (48,)),
            (4, (63,)),
            (5, (40,)),
            (KEYS, (CELLS, 2, 48)),
            (KEYS, (CELLS, 4, 64)),
            (VALUES, (CELLS - 1, 2, 64)),
            (VALUES, (CELLS, 1, 64)),
            (RAW, (CELLS - 1, 64)),
            (RAW, (CELLS, 32)),
            (INDEX_KEYS, (1, 64, 16)),
            (INDEX_KEYS, (3, 32, 16)),
            (INDEX_KEYS, (3, 64, 8)),
        ],
    )
    def test_name_shapes_that_do_not_belong_together(self, place, shape):
        with pytest.raises(OP_ERRORS, match="qsa_append: shapes o"):
            native(changed(self.call, **{f"_{place}": np.zeros(shape, np.float32)}))

    @pytest.mark.parametrize("ratio", [0, -4])
    def test_name_a_ratio_that_is_none(self, ratio):
        attributes = {**self.call.attributes, "ratio": ratio}

        with pytest.raises(OP_ERRORS, match="qsa_append: shapes of proj"):
            native(dataclasses.replace(self.call, attributes=attributes))
