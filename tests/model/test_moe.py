"""The feed-forward half: routing and the weighted sum, against loops in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from strata_jax.model.moe import moe_block
from strata_jax.ops import expert_ffn
from strata_jax.ops.roles import Role
from strata_jax.ops.sets import native_ops, plain_ops
from strata_jax.weights.matrices import fill_store
from tests.plain import dequantized_matrices, plain_ops_of, split_table
from tests.stepper import same_bits

LAYER = 2


@pytest.fixture(scope="module")
def matrices(tiny_pack):
    return dequantized_matrices(tiny_pack)


@pytest.fixture(scope="module")
def x(tiny_pack):
    return np.random.default_rng(4).standard_normal((12, tiny_pack.config.hidden), np.float32)


def run(ops, config, x, live=None):
    def block(x, live):
        return moe_block(ops, config, x, live, layer=LAYER)

    return np.asarray(jax.jit(block)(x, np.int32(len(x) if live is None else live)))


def by_loops(matrices, active, x):
    """model.md, section 6, a row and an expert at a time, in float64."""
    m = {
        role: matrices[role, LAYER].astype(np.float64) for role in Role if (role, LAYER) in matrices
    }

    def silu(v):
        return v / (1 + np.exp(-v))

    def ffn(row, gate, up, down):
        return down @ (silu(gate @ row) * (up @ row))

    out = []
    for row in x.astype(np.float64):
        logits = m[Role.FFN_ROUTER] @ row
        p = np.exp(logits - logits.max())
        p /= p.sum()
        chosen = sorted(range(len(p)), key=lambda e: (-p[e], e))[:active]
        y = (
            1
            / (1 + np.exp(-(m[Role.FFN_SHARED_ROUTER] @ row)))[0]
            * ffn(
                row,
                *(
                    m[role]
                    for role in (Role.FFN_GATE_SHARED, Role.FFN_UP_SHARED, Role.FFN_DOWN_SHARED)
                ),
            )
        )
        for e in chosen:
            experts = (Role.FFN_GATE_EXPS, Role.FFN_UP_EXPS, Role.FFN_DOWN_EXPS)
            y = y + p[e] / sum(p[c] for c in chosen) * ffn(row, *(m[role][e] for role in experts))
        out.append(y)
    return np.array(out)


def test_the_plain_block_equals_loops_over_rows_and_experts(tiny_pack, matrices, x):
    config = tiny_pack.config

    y = run(plain_ops_of(tiny_pack), config, x)

    np.testing.assert_allclose(y, by_loops(matrices, config.num_experts_active, x), atol=2e-5)


def test_the_native_block_equals_loops_over_rows_and_experts(tiny_pack, matrices, x):
    store = fill_store(tiny_pack)
    config = tiny_pack.config

    y = run(native_ops(store.slot), config, x)

    np.testing.assert_allclose(y, by_loops(matrices, config.num_experts_active, x), atol=2e-5)
    store.close()


def test_equal_experts_are_chosen_by_the_lower_id(tiny_pack, matrices, x):
    flat = dict(matrices)
    flat[Role.FFN_ROUTER, LAYER] = np.zeros_like(matrices[Role.FFN_ROUTER, LAYER])
    operands, table = split_table(flat)
    config = tiny_pack.config

    y = run(plain_ops({**operands, **table}), config, x)

    np.testing.assert_allclose(y, by_loops(flat, config.num_experts_active, x), atol=2e-5)


def test_a_row_does_not_depend_on_the_others(blocky_pack):
    store = fill_store(blocky_pack)
    ops, config = native_ops(store.slot), blocky_pack.config
    x = np.random.default_rng(5).standard_normal((12, config.hidden), np.float32)

    y = run(ops, config, x)

    order = np.random.default_rng(6).permutation(12)
    assert same_bits(run(ops, config, x[order]), y[order])
    assert same_bits(run(ops, config, x, live=5)[:5], y[:5])
    assert all(same_bits(run(ops, config, x[i : i + 1])[0], y[i]) for i in range(0, 12, 5))
    store.close()


@pytest.mark.parametrize("part", ["routed", "shared"])
def test_quantised_experts_stay_near_their_dequantised_matrices(blocky_pack, part):
    store, config = fill_store(blocky_pack), blocky_pack.config
    rng = np.random.default_rng(8)
    x = rng.standard_normal((64, config.hidden), np.float32)
    ids = np.argsort(rng.random((64, config.num_experts)))[:, : config.num_experts_active]
    weights = np.full(ids.shape, 0.5 if part == "routed" else 0.0, np.float32)
    shared = np.full(64, 1.0 if part == "shared" else 0.0, np.float32)
    rows = (x, ids.astype(np.int32), weights, shared, np.int32(64))
    args = tuple(map(jnp.asarray, rows))

    y = np.asarray(native_ops(store.slot).expert_ffn(*args, layer=LAYER))

    dequantised = dequantized_matrices(blocky_pack)
    stacks = [jnp.asarray(dequantised[role, LAYER]) for role in expert_ffn.ROLES]
    exact = np.asarray(expert_ffn.expert_ffn_ref(*args, matrices=stacks))
    # 0.012 of int8 activations; gate and up swapped give 0.67 (shared) and 0.87 (routed).
    assert np.linalg.norm(y - exact) < 0.03 * np.linalg.norm(exact)
    store.close()
