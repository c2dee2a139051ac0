import dataclasses
import inspect

import jax
import numpy as np
import pytest

from strata_jax.ops.case_inputs import make_call
from strata_jax.ops.cases import CASES
from strata_jax.ops.roles import Role
from strata_jax.ops.sets import OpSet, native_ops, plain_ops

FIELDS = [field.name for field in dataclasses.fields(OpSet)]


def test_has_an_op_for_every_table_of_cases():
    assert sorted(FIELDS, key=FIELDS.index) == FIELDS
    assert set(FIELDS) == set(CASES)


@pytest.mark.parametrize("op", FIELDS)
def test_asks_for_the_same_operands_on_both_sides(op):
    call = make_call(op, CASES[op][0])
    matrices = {(role, 0): matrix.values() for role, matrix in call.matrices.items()}
    for ops in (native_ops(0), plain_ops(matrices)):
        inspect.signature(getattr(ops, op)).bind(*call.operands, **call.attributes)


@pytest.mark.parametrize("op", [op for op in FIELDS if op != "ngram_rows"])
def test_gives_results_of_the_same_shapes_on_both_sides(op):
    call = make_call(op, CASES[op][0])
    matrices = {(role, 0): matrix.values() for role, matrix in call.matrices.items()}

    def shapes(ops):
        run = getattr(ops, op)
        result = jax.eval_shape(lambda *operands: run(*operands, **call.attributes), *call.operands)
        return [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(result)]

    assert shapes(native_ops(0)) == shapes(plain_ops(matrices))


def test_compiles_the_same_program_whatever_the_store_holds():
    call = make_call("quant_matmul", CASES["quant_matmul"][0])

    def text(slot):
        run = native_ops(slot).quant_matmul
        lowered = jax.jit(lambda *x: run(*x, **call.attributes)).lower(*call.operands)
        return lowered.as_text()

    assert text(3) == text(3)
    assert text(3) != text(4)  # the slot is all a program knows of its weights
    assert str(call.matrices[Role.ATTN_QKV].data.ctypes.data) not in text(3)


def test_compiles_the_n_gram_twin_too():
    call = make_call("ngram_rows", CASES["ngram_rows"][1])
    table = call.matrices[Role.NGRAM_TABLE].values()
    ops = plain_ops({(Role.NGRAM_TABLE, 0): table})

    compiled = jax.jit(lambda *x: ops.ngram_rows(*x, **call.attributes))(*call.operands)

    np.testing.assert_array_equal(compiled, ops.ngram_rows(*call.operands, **call.attributes))
