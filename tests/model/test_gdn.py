"""The delta-net block: its two forms, its state, its native twin."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from strata_jax.engine.loader import load_params, primary_sharding
from strata_jax.model.gdn import linear_block
from strata_jax.model.params import LinearParams
from strata_jax.model.state import Drafts, LinearState
from strata_jax.ops.sets import native_ops
from strata_jax.weights.matrices import fill_store
from tests.plain import plain_ops_of
from tests.stepper import same_bits


@pytest.fixture(scope="module")
def block(tiny_pack):
    """Layer 0: (op set, form) -> a compiled block of (state, x, live)."""
    params = load_params(tiny_pack, primary_sharding("cpu")).layers[0].mixer
    assert isinstance(params, LinearParams)
    store = fill_store(tiny_pack)
    sets = {"plain": plain_ops_of(tiny_pack), "native": native_ops(store.slot)}

    def compiled(name, form="gdn_window"):
        ops = sets[name]

        def run(state, x, live):
            drafts = None if form == "gdn_chunk" else Drafts(kept=jnp.int32(0), certain=live)
            return linear_block(ops, tiny_pack.config, params, state, x, live, drafts, layer=0)

        return jax.jit(run)

    yield compiled
    store.close()


@pytest.fixture
def state(tiny_pack):
    config, rng = tiny_pack.config, np.random.default_rng(2)
    channels = (2 * config.gdn_key_heads + config.gdn_value_heads) * config.gdn_head_dim
    shape = (config.gdn_value_heads, config.gdn_head_dim, config.gdn_head_dim)
    return LinearState(
        conv=jnp.asarray(rng.standard_normal((config.conv_kernel - 1, channels), np.float32)),
        delta=jnp.asarray(0.1 * rng.standard_normal(shape, np.float32)),
        pending=jnp.zeros((7, channels + 2 * config.gdn_value_heads), jnp.float32),
    )


@pytest.fixture
def x(tiny_pack):
    return np.random.default_rng(3).standard_normal((64, tiny_pack.config.hidden), np.float32)


def assert_close(a, b):
    for left, right in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-4, atol=2e-5)


def test_the_chunk_form_equals_the_recurrence(block, state, x):
    by_row = block("plain")(state, x, np.int32(64))
    by_block = block("plain", "gdn_chunk")(state, x, np.int32(64))

    assert_close(by_block, by_row)


def test_the_chunk_form_leaves_the_state_alone_past_the_live_rows(block, state, x):
    spoiled = np.where(np.arange(64)[:, None] < 21, x, np.float32(100))

    y, new = block("plain", "gdn_chunk")(state, spoiled, np.int32(21))

    expected, expected_state = block("plain")(state, x[:21], np.int32(21))
    assert_close((y[:21], new), (expected, expected_state))


def test_the_native_block_equals_the_plain_one(block, state, x):
    assert_close(block("native")(state, x, np.int32(64)), block("plain")(state, x, np.int32(64)))


def test_the_state_carries_everything_from_one_window_to_the_next(block, state, x):
    run = block("native")
    whole, whole_state = run(state, x, np.int32(64))

    first, between = run(state, x[:7], np.int32(7))
    second, end = run(between, x[7:], np.int32(57))

    assert same_bits(np.concatenate([first, second]), whole)
    assert same_bits(end, whole_state)


def test_a_window_without_live_rows_changes_nothing(block, state, x):
    y, new = block("native")(state, x[:8], np.int32(0))

    assert same_bits(new, state)
    assert not np.asarray(y).any()
