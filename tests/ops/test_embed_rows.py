import dataclasses

import numpy as np
import pytest

from strata_jax.ops.case_inputs import Call, make_call
from strata_jax.ops.roles import Role
from strata_jax.ops.unpack_layouts_ref import LAYOUTS
from strata_jax.ops.unpack_ref import dequantize_ref
from tests.ops_maker import (
    OP_ERRORS,
    assert_close,
    assert_same_bits,
    changed,
    guarded_store,
    native,
    run_native,
    run_plain,
    small_cases,
)
from tests.ops_rules import RowRules
from tests.ops_weights import any_bytes, columns_of, matrix_of, name_of

F32, Q8_0 = 0, 8
ROWS = 20


def call_of(table, ids):
    return Call(
        op="embed_rows",
        operands=(np.asarray(ids, np.int32), np.int32(len(ids))),
        attributes={"width": table.cols},
        matrices={Role.TOKEN_EMBD: table},
        macs=0,
        num_bytes=0,
    )


class TestRules(RowRules):
    op = "embed_rows"


@pytest.mark.parametrize("type_id", LAYOUTS, ids=name_of)
def test_gives_the_files_values_for_any_bytes(type_id):
    rng = np.random.default_rng(type_id)
    for num_cols in columns_of(type_id):
        raw = any_bytes(type_id, ROWS, num_cols, rng)
        table = matrix_of(type_id, ROWS, num_cols, rng, raw)
        values = dequantize_ref(type_id, raw, ROWS, num_cols)
        ids = [19, 0, 7, 7, 19]

        assert_same_bits(native(call_of(table, ids)), (values[ids],))


def test_reads_rows_of_any_length_of_floats():
    rng = np.random.default_rng(0)
    table = matrix_of(F32, ROWS, 7, rng)

    (got,) = native(call_of(table, [3]))

    np.testing.assert_array_equal(got, table.values()[[3]])


@pytest.mark.parametrize("case", small_cases("embed_rows"), ids=lambda case: case.name)
def test_equals_its_twin(case):
    call = make_call("embed_rows", case, seed=3)

    assert_close("embed_rows", native(call), run_plain(call))


class TestErrors:
    call = call_of(matrix_of(Q8_0, ROWS, 64, np.random.default_rng(0)), [0, 1, 2])

    @pytest.mark.parametrize("value", [-1, ROWS, 2**31 - 1, -(2**31)])
    def test_name_an_id_outside_the_table_and_its_place(self, value):
        ids = np.array([0, value, 2], np.int32)

        with pytest.raises(OP_ERRORS, match=rf"embed_rows: ids\[1\] is {value}, outside \[0, 20\)"):
            native(changed(self.call, _0=ids))

    def test_name_a_closed_store(self):
        with guarded_store(self.call.matrices) as store:
            slot = store.slot
        with pytest.raises(OP_ERRORS, match=f"embed_rows: store {slot} is closed"):
            run_native(self.call, slot)

    def test_name_a_role_without_a_table(self):
        call = dataclasses.replace(self.call, matrices={})

        with pytest.raises(OP_ERRORS, match="embed_rows: role 0 has no table of 64 columns"):
            native(call)

    def test_name_another_width(self):
        call = dataclasses.replace(self.call, attributes={"width": 32})

        with pytest.raises(OP_ERRORS, match="embed_rows: role 0 has no table of 32 columns"):
            native(call)
