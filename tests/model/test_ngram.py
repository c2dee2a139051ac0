"""The n-gram embedding: which tokens a row hashes, at the borders of text, window and tile."""

import json
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_jax.config import NgramConfig
from strata_jax.model.ngram import contexts
from strata_jax.ops.ngram_rows import ngram_row_ids_ref
from tests.stepper import same_bits, same_state

SLOW_START = settings(deadline=None, max_examples=50)  # every length is traced once
GOLDEN = pathlib.Path(__file__).parent.parent / "golden" / "ngram.json"
EOS = 9


def config(**changes) -> NgramConfig:
    settings = {
        "layer": 1,
        "ngram_size": 3,
        "heads_per_ngram": 8,
        "conv_kernel": 4,
        "eos_id": EOS,
        "image_id": 8,
        "row_width": 4,
        "num_rows": 128,
        "multipliers": (1, 3, 5),
        "head_offsets": (0,),
        "head_sizes": (7,),
    }
    return NgramConfig(**{**settings, **changes})


def by_segments(history, count, size=3):
    """The contexts of the last `count` ids, by cutting the text behind every EOS."""
    rows = []
    for at in range(len(history) - count, len(history)):
        start = max((i + 1 for i in range(at) if history[i] == EOS), default=0)
        segment = history[start : at + 1][::-1][:size]
        rows.append(segment + [EOS] * (size - len(segment)))
    return rows


def read(before, ids):
    return np.asarray(
        contexts(config(), jnp.asarray(before, jnp.int32), jnp.asarray(ids, jnp.int32))
    ).tolist()


@SLOW_START
@given(st.lists(st.integers(5, EOS), min_size=1, max_size=12))
def test_a_row_sees_its_segment_and_end_of_text_before_it(ids):
    assert read([EOS, EOS], ids) == by_segments(ids, len(ids))


@SLOW_START
@given(st.lists(st.integers(5, EOS), min_size=2, max_size=12), st.data())
def test_a_border_inside_an_ngram_changes_nothing(ids, data):
    cut = data.draw(st.integers(1, len(ids) - 1))
    before = [EOS, EOS, *ids[:cut]][-2:]

    assert read([EOS, EOS], ids[:cut]) + read(before, ids[cut:]) == read([EOS, EOS], ids)


@SLOW_START
@given(st.lists(st.integers(0, EOS), min_size=2, max_size=2))
def test_nothing_before_an_end_of_text_matters(before):
    assert read(before, [EOS, 1, 2, 3])[1:] == [[1, EOS, EOS], [2, 1, EOS], [3, 2, 1]]


def test_an_end_of_text_sees_its_own_segment():
    assert read([EOS, 4], [5, EOS, 6]) == [[5, 4, EOS], [EOS, 5, 4], [6, EOS, EOS]]


def test_prompts_of_one_and_two_ids_are_padded_with_end_of_text():
    assert read([EOS, EOS], [1]) == [[1, EOS, EOS]]
    assert read([EOS, EOS], [1, 2]) == [[1, EOS, EOS], [2, 1, EOS]]


@pytest.mark.parametrize("length", [1, 2, 3])
def test_short_prompts_equal_the_beginning_of_longer_ones(native, ids, length):
    logits, _ = native.read(ids[:length], steps=8)

    assert same_bits(logits, native.read(ids[:8], steps=8)[0][:length])


@pytest.mark.parametrize("cut", [4, 5, 6, 7])  # an end of text stands at 5
def test_a_step_may_end_inside_an_ngram(native, ids, cut):
    logits, state = native.read(ids[:16], steps=[cut, 16 - cut], width=16)

    expected, expected_state = native.read(ids[:16], steps=16)
    assert same_bits(logits, expected)
    assert same_state(state, expected_state, 16, 4)


def test_the_state_keeps_the_last_two_ids(tiny, ids):
    _, state = tiny.read(ids[:77], steps=8)
    assert np.asarray(state.recurrent.ngram.tokens)[:2].tolist() == ids[75:77].tolist()

    _, state = tiny.read(ids[:1], steps=8)
    eos = tiny.config.ngram.eos_id
    assert np.asarray(state.recurrent.ngram.tokens)[:2].tolist() == [eos, ids[0]]


def test_released_constants_give_the_rows_on_record():
    golden = json.loads(GOLDEN.read_text())
    released = config(
        multipliers=tuple(golden["multipliers"]),
        head_sizes=tuple(golden["head_sizes"]),
        head_offsets=tuple(golden["head_offsets"]),
    )

    rows = ngram_row_ids_ref(np.array(golden["tokens"]), released)

    assert rows.tolist() == golden["rows"]


def test_released_tables_are_the_primes_from_the_base_on():
    sizes = json.loads(GOLDEN.read_text())["head_sizes"]

    def prime(n):
        return all(n % d for d in range(2, int(n**0.5) + 1))

    assert [n for n in range(sizes[0], sizes[-1] + 1) if n % 2 and prime(n)] == sizes
    assert not any(prime(n) for n in range(20_000_000, sizes[0]))
