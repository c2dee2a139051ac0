import dataclasses
from importlib import resources

import numpy as np
import pytest

from strata_jax.ops.case_inputs import make_call
from strata_jax.ops.case_matrices import matrix_shape, random_rows
from strata_jax.ops.cases import CASES, EMBEDDED, RELEASED
from strata_jax.ops.roles import EXPERT_ROLES, GLOBAL_TENSORS, LAYER_TENSORS, Role
from strata_jax.ops.unpack_layouts_ref import LAYOUTS
from strata_jax.ops.unpack_ref import dequantize_ref
from strata_jax.weights.pack import open_pack
from tests.gguf_content import multipliers
from tests.ops_weights import name_of


@pytest.fixture(scope="module")
def pack():
    model = resources.files("strata_jax") / "models" / "strata-small" / "model-IQ3_S.gguf"
    with resources.as_file(model) as path:
        opened = open_pack(path)
        yield opened
        opened.close()


def test_have_names_of_their_own():
    for op, cases in CASES.items():
        names = [case.name for case in cases]
        assert len(set(names)) == len(names) > 0, op


def test_are_those_of_the_embedded_model(pack):
    exact = dataclasses.replace(pack.config, eps=float(np.float32(EMBEDDED.eps)))

    assert dataclasses.replace(EMBEDDED, eps=exact.eps) == exact


def test_have_the_shapes_and_types_of_the_embedded_models_file(pack):
    case = CASES["expert_ffn"][0]
    for role in GLOBAL_TENSORS.keys() | LAYER_TENSORS.keys():  # the others are a draft layer's own
        name = GLOBAL_TENSORS.get(role) or next(
            f"blk.{layer}.{LAYER_TENSORS[role]}"
            for layer in range(8)
            if pack.has(f"blk.{layer}.{LAYER_TENSORS[role]}")
        )
        info = pack.tensor(name)
        cols, *rows = info.shape
        if role in EXPERT_ROLES:
            assert rows.pop() == EMBEDDED.num_experts
        if role in SHAPED:
            assert matrix_shape(EMBEDDED, role) == (rows[0] if rows else 1, cols), role
            assert case.type_of(role) == info.type, role


SHAPED = set(Role) - {
    Role.OUTPUT_HC_DOWN,
    Role.OUTPUT_HC_UP,
    Role.PLE_KEY,
    Role.PLE_VALUE,
    Role.HC_FFN_DOWN,
    Role.HC_FFN_INJECT,
    Role.HC_FFN_UP,
    Role.ATTN_OUTPUT,
}
"""Roles that a case may ask for."""


def test_have_the_released_models_hash():
    assert RELEASED.ngram is not None
    assert list(RELEASED.ngram.multipliers) == multipliers(RELEASED.vocab_size)
    assert RELEASED.ngram.num_heads * RELEASED.ngram.row_width == RELEASED.hidden


@pytest.mark.parametrize("op", CASES)
def test_make_the_same_operands_from_the_same_seed(op):
    case = CASES[op][0]
    one, two, other = (make_call(op, case, seed=seed) for seed in (5, 5, 6))

    for a, b in zip(one.operands, two.operands):
        np.testing.assert_array_equal(a, b)
    assert any(not np.array_equal(a, b) for a, b in zip(one.operands, other.operands))


@pytest.mark.parametrize("type_id", LAYOUTS, ids=name_of)
def test_make_matrices_of_sane_values(type_id):
    raw = random_rows(type_id, 64, 768, np.random.default_rng(0))

    values = dequantize_ref(type_id, raw, 64, 768)

    assert np.isfinite(values).all()
    assert 0.03 < np.sqrt(np.mean(values**2)) < 0.08
