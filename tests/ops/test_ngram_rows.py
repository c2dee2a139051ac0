import ctypes
import dataclasses
import itertools
import mmap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from strata_jax.config import NgramConfig
from strata_jax.model.ngram import contexts
from strata_jax.ops.case_inputs import Call, make_call
from strata_jax.ops.cases import EMBEDDED
from strata_jax.ops.ngram_rows import ngram_row_ids_ref, ngram_rows
from strata_jax.ops.roles import Role
from strata_jax.ops.unpack_layouts_ref import LAYOUTS
from strata_jax.ops.unpack_ref import dequantize_ref
from tests.ops_maker import (
    OP_ERRORS,
    assert_close,
    assert_same_bits,
    changed,
    guarded_store,
    mapped_table,
    native,
    run_native,
    run_plain,
    small_cases,
)
from tests.ops_rules import RowRules
from tests.ops_weights import any_bytes, matrix_of, name_of

F16, Q8_0 = 1, 8
EOS = 248044
TRIPLES = [(9707, 11, 1879), (248319, 248319, 248319), (0, EOS, EOS)]
"""Newest token first."""

# fmt: off
SIZES = [20000003, 20000023, 20000033, 20000047, 20000059, 20000063, 20000069, 20000077,
         20000081, 20000093, 20000107, 20000147, 20000153, 20000159, 20000161, 20000171]
# fmt: on
MULTIPLIERS = (23703573157769, 20109073645365, 8052911324071)
# fmt: off
GOLDEN = [
    [12573561, 22186868, 57166196, 78330577, 96651019, 102794661, 132044717, 144442489,
     171565308, 192371272, 210176075, 227935203, 258749314, 269602416, 286562254, 311426201],
    [3035822, 30922970, 45995374, 64361017, 92705579, 115727959, 130487234, 157254389, 171350132,
     183732882, 212505503, 229174638, 257427880, 265877325, 282070880, 303365432],
    [768795, 32189829, 51641306, 71063218, 85886852, 104959504, 134316676, 154856127, 173280301,
     194832882, 202840854, 222492280, 256138797, 271010889, 296240796, 304432235],
]
# fmt: on


def released_config(row_width):
    """The hash of the released model: docs, model.md, section 7."""
    return NgramConfig(
        layer=1,
        ngram_size=3,
        heads_per_ngram=8,
        conv_kernel=4,
        eos_id=EOS,
        image_id=248056,
        row_width=row_width,
        num_rows=sum(SIZES),
        multipliers=MULTIPLIERS,
        head_offsets=tuple(itertools.accumulate([0, *SIZES[:-1]])),
        head_sizes=tuple(SIZES),
    )


def small_config(row_width, sizes=(5, 7, 11, 13)):
    return NgramConfig(
        layer=1,
        ngram_size=3,
        heads_per_ngram=2,
        conv_kernel=4,
        eos_id=1,
        image_id=1,
        row_width=row_width,
        num_rows=sum(sizes),
        multipliers=MULTIPLIERS,
        head_offsets=tuple(itertools.accumulate([0, *sizes[:-1]])),
        head_sizes=sizes,
    )


def call_of(table, tokens, ngram):
    return Call(
        op="ngram_rows",
        operands=(
            np.asarray(tokens, np.int32),
            np.zeros((len(tokens), 1, 1), np.float32),
            np.int32(len(tokens)),
        ),
        attributes={"ngram": ngram},
        matrices={Role.NGRAM_TABLE: table},
        macs=0,
        num_bytes=0,
    )


class TestRules(RowRules):
    op = "ngram_rows"


class TestHash:
    """Report 9: products of the tokens with odd multipliers, joined by xor, modulo primes in a row."""

    def test_has_the_primes_above_the_base(self):
        sieve = np.ones(200, bool)  # of 20,000,000 ... 20,000,199
        for factor in range(2, 4473):  # up to their square root
            sieve[-20_000_000 % factor :: factor] = False

        assert (np.flatnonzero(sieve)[:16] + 20_000_000).tolist() == SIZES

    def test_has_golden_rows(self):
        # Python's own integers, by the text of model.md: h2 = t0 m0 ^ t1 m1, h3 = h2 ^ t2 m2.
        expected = []
        for t0, t1, t2 in TRIPLES:
            h2 = t0 * 23703573157769 ^ t1 * 20109073645365
            h3 = h2 ^ t2 * 8052911324071
            start = 0
            row = []
            for head, size in enumerate(SIZES):
                row.append((h2 if head < 8 else h3) % size + start)
                start += size
            expected.append(row)

        got = ngram_row_ids_ref(np.array(TRIPLES), released_config(1))

        assert got.tolist() == expected
        assert got.tolist() == GOLDEN

    def test_is_the_native_ops_in_a_table_of_320_million_rows(self):
        # One half a row: 640 MB of address space, of which only the rows read take memory.
        num_rows = sum(SIZES)
        with mmap.mmap(-1, 2 * num_rows, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as table:
            rows = np.array(GOLDEN)
            view = np.frombuffer(table, np.float16)
            view[rows.ravel()] = np.arange(1, rows.size + 1)
            address = ctypes.addressof(ctypes.c_char.from_buffer(table))
            table_of_one = mapped_table(F16, num_rows, 1, address)
            ngram = released_config(1)

            got = jax.jit(
                lambda t: ngram_rows(
                    t, jnp.zeros((3, 1, 1)), jnp.int32(3), table=table_of_one.slot, ngram=ngram
                )
            )(np.array(TRIPLES, np.int32))

            np.testing.assert_array_equal(got, np.arange(1, 49, dtype=np.float32).reshape(3, 16))
            table_of_one.close()
            del view


class TestSegments:
    """Report 10: an EOS, and the start, hide what lies before them."""

    ngram = small_config(32)

    def row_ids(self, before, ids):
        tokens = contexts(self.ngram, jnp.array(before), jnp.array(ids))
        return ngram_row_ids_ref(np.asarray(tokens), self.ngram).tolist()

    def test_forget_what_came_before_an_eos(self):
        ends = [self.row_ids([7, 8], [*front, 1, 4, 5, 6])[-3:] for front in ([2], [3], [9])]

        assert ends[0] == ends[1] == ends[2] == self.row_ids([1, 1], [4, 5, 6])

    def test_show_an_eos_its_own_predecessors(self):
        assert self.row_ids([1, 1], [4, 5, 1])[-1] != self.row_ids([1, 1], [4, 6, 1])[-1]

    def test_pad_prompts_of_one_and_two_tokens(self):
        assert self.row_ids([1, 1], [4]) == self.row_ids([1, 1], [4, 5])[:1]
        assert self.row_ids([1, 1], [4, 5]) == self.row_ids([1, 1], [4, 5, 6])[:2]

    @pytest.mark.parametrize("border", range(1, 7))
    def test_do_not_see_a_border_of_windows(self, border):
        ids = [4, 5, 1, 6, 7, 8, 1]
        history = [1, 1, *ids]

        first = self.row_ids([1, 1], ids[:border])
        second = self.row_ids(history[border : border + 2], ids[border:])

        assert first + second == self.row_ids([1, 1], ids)


@pytest.mark.parametrize("type_id", LAYOUTS, ids=name_of)
def test_gives_the_files_values_for_any_bytes(type_id):
    rng = np.random.default_rng(type_id)
    width = max(32, LAYOUTS[type_id].block_values)
    ngram = small_config(width)
    raw = any_bytes(type_id, 36, width, rng)
    tokens = rng.integers(0, EOS, (6, 3), np.int32)
    values = dequantize_ref(type_id, raw, 36, width)[ngram_row_ids_ref(tokens, ngram)]

    got = native(call_of(matrix_of(type_id, 36, width, rng, raw), tokens, ngram))

    assert_same_bits(got, (values.reshape(6, -1),))


@pytest.mark.parametrize("case", small_cases("ngram_rows"), ids=lambda case: case.name)
def test_equals_its_twin(case):
    call = make_call("ngram_rows", case, seed=3)

    assert_close("ngram_rows", native(call), run_plain(call))


def test_hashes_the_largest_products_that_files_may_have():
    # Files whose products leave 63 bits are refused when they are opened.
    multipliers = tuple((2**63 - 1) // 4095 | 1 for _ in range(3))
    assert EMBEDDED.ngram is not None
    ngram = dataclasses.replace(EMBEDDED.ngram, multipliers=multipliers)
    call = make_call("ngram_rows", small_cases("ngram_rows")[1])
    call = dataclasses.replace(call, attributes={"ngram": ngram})
    call = changed(call, _0=np.array([[4094, 4093, 4094], [0, 0, 4094]] * 2, np.int32))

    assert_close("ngram_rows", native(call), run_plain(call))


class TestErrors:
    table = matrix_of(Q8_0, 36, 32, np.random.default_rng(0))
    call = call_of(table, [[1, 2, 3], [4, 5, 6]], small_config(32))

    def with_config(self, **changes):
        ngram = dataclasses.replace(small_config(32), **changes)
        return dataclasses.replace(self.call, attributes={"ngram": ngram})

    def test_name_a_closed_table(self):
        with guarded_store(self.call.matrices) as store:
            slot = store.table
        with pytest.raises(OP_ERRORS, match=f"ngram_rows: table {slot} is closed"):
            run_native(self.call, -1, slot)

    def test_name_a_table_of_other_rows(self):
        message = r"ngram_rows: table \d+ has rows of 32 values, expected 4 of them to make 256"
        with pytest.raises(OP_ERRORS, match=message):
            native(self.with_config(row_width=64))

    @pytest.mark.parametrize(
        ("change", "head"),
        [
            ({"head_offsets": (0, 5, 12, 24)}, 3),
            ({"head_offsets": (0, -1, 12, 23)}, 1),
            ({"head_offsets": (0, 5, 2**63 - 1, 23)}, 2),
            ({"head_sizes": (5, 7, 0, 13)}, 2),
            ({"head_sizes": (-5, 7, 11, 13)}, 0),
            ({"head_sizes": (5, 7, 11, 2**63 - 1)}, 3),
        ],
    )
    def test_name_a_head_that_reaches_past_the_table(self, change, head):
        message = f"ngram_rows: head {head} reaches past the table's 36 rows"
        with pytest.raises(OP_ERRORS, match=message):
            native(self.with_config(**change))

    @pytest.mark.parametrize("value", [-1, -(2**31)])
    def test_name_a_token_that_is_no_id_and_its_place(self, value):
        tokens = np.array([[1, 2, 3], [4, value, 6]], np.int32)

        with pytest.raises(OP_ERRORS, match=rf"ngram_rows: tokens\[1, 1\] is {value}, expected 0"):
            native(changed(self.call, _0=tokens))

    @pytest.mark.parametrize(
        "change", [{"multipliers": (3, 5)}, {"multipliers": (3,)}, {"head_offsets": (0, 5, 12)}]
    )
    def test_name_settings_that_do_not_belong_together(self, change):
        with pytest.raises(OP_ERRORS, match="ngram_rows: multipliers, offsets, sizes and tokens"):
            native(self.with_config(**change))
