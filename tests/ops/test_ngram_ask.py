"""The question ahead of the rows: where the host reads the table for a device."""

import dataclasses
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from strata_jax.ops.case_inputs import make_call
from strata_jax.ops.cases import CASES
from strata_jax.ops.native import Backend
from strata_jax.ops.roles import Role
from strata_jax.ops.sets import native_ops, plain_ops
from tests.ops_device import host_read_table
from tests.ops_maker import OP_ERRORS, assert_same_bits, native, run_plain, small_cases

BACKENDS = [
    pytest.param(Backend("emulated"), id="emulated"),
    pytest.param(Backend("cuda"), id="cuda", marks=pytest.mark.gpu),
]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    chosen = request.param
    if chosen.name == "emulated" and not importlib.util.find_spec("strata_jax._native_emulated"):
        pytest.fail("this build has no emulated library: tools/test builds one (STRATA_EMULATE=ON)")
    return chosen


def step_of(backend: Backend, table: int, ngram):
    """A program that asks, then wants the rows."""
    ops = native_ops(-1, table=table, is_asked=True, backend=backend)

    @jax.jit
    def step(tokens, live):
        ids = ops.ngram_ask(tokens[:, 0], tokens, live, ngram=ngram)
        streams = jnp.zeros((len(tokens), 4, 8), jnp.float32) + ids[:, None, None]
        return ids, ops.ngram_rows(tokens, streams, live, ngram=ngram)

    return step


@pytest.fixture
def call():
    return make_call("ngram_rows", dataclasses.replace(CASES["ngram_rows"][0], rows=5), seed=4)


@pytest.mark.parametrize("case", small_cases("ngram_ask"), ids=lambda case: case.name)
def test_gives_the_ids_on_the_cpu(case):
    made = make_call("ngram_ask", case)

    assert_same_bits(native(made), run_plain(made))
    assert_same_bits(run_plain(made), (made.operands[0],))


@pytest.mark.parametrize("live", [0, 1, 3, 5])
@pytest.mark.parametrize("mode", ["direct", "mmap"])
def test_brings_the_rows_of_the_file(backend: Backend, call, tmp_path, mode: str, live: int):
    table = call.matrices[Role.NGRAM_TABLE]
    tokens, streams, _ = call.operands
    ngram = call.attributes["ngram"]
    expected = plain_ops({(Role.NGRAM_TABLE, 0): table.values()}).ngram_rows(
        tokens, streams, np.int32(live), ngram=ngram
    )
    with host_read_table(backend, table, tmp_path, mode, most_rows=5 * ngram.num_heads) as slot:
        step = step_of(backend, slot, ngram)
        # Letters and answers of both parities.
        steps = [step(tokens, np.int32(live)) for _ in range(3)]

    for ids, rows in steps:
        np.testing.assert_array_equal(ids, tokens[:, 0])
        assert_same_bits((np.asarray(rows),), (np.asarray(expected),))


def test_gives_each_step_its_own_rows(backend: Backend, call, tmp_path):
    table, ngram = call.matrices[Role.NGRAM_TABLE], call.attributes["ngram"]
    plain = plain_ops({(Role.NGRAM_TABLE, 0): table.values()}).ngram_rows
    with host_read_table(backend, table, tmp_path, "direct", most_rows=80) as slot:
        step = step_of(backend, slot, ngram)
        for seed in range(6):
            tokens = np.random.default_rng(seed).integers(0, 4000, (5, 3), np.int32)
            _, rows = step(tokens, np.int32(5))
            expected = plain(tokens, call.operands[1], np.int32(5), ngram=ngram)
            assert_same_bits((np.asarray(rows),), (np.asarray(expected),))


def test_names_a_letter_that_is_too_short(backend: Backend, call, tmp_path):
    ngram = call.attributes["ngram"]
    table = call.matrices[Role.NGRAM_TABLE]
    with host_read_table(backend, table, tmp_path, "mmap", most_rows=16) as slot:
        step = step_of(backend, slot, ngram)
        with pytest.raises(OP_ERRORS, match="ngram_ask: 5 rows of 16 heads, a letter has room for"):
            jax.block_until_ready(step(call.operands[0], np.int32(5)))
