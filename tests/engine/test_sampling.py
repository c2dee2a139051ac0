"""From logits to ids: against a slow reference, and what may decide a draw."""

import collections
import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_jax.engine.request import SamplingSettings
from strata_jax.engine.sampling import Sampler, candidates
from strata_jax.errors import StrataError, UsageError

VOCAB = 50


def pick(logits, position=0, prompt=(), **chosen):
    logits = np.asarray(logits, np.float32)
    return Sampler(SamplingSettings(**chosen), tuple(prompt), len(logits)).pick(logits, position)


def random_logits(seed=0, size=VOCAB):
    return np.random.default_rng(seed).normal(0, 3, size).astype(np.float32)


def slow_candidates(logits, s):
    """What may be drawn, id by id in plain Python: {id: probability}."""
    ranked = sorted(range(len(logits)), key=lambda i: (-float(logits[i]), i))
    kept = ranked[: s.top_k] if s.top_k else ranked
    top = float(logits[ranked[0]])
    weights = {i: math.exp(float(logits[i]) - top) for i in kept}
    total, reached, nucleus = sum(weights.values()), 0.0, []
    for i in kept:
        if s.top_p < 1 and nucleus and reached >= s.top_p * total:
            break
        nucleus.append(i)
        reached += weights[i]
    kept = [i for i in nucleus if weights[i] >= s.min_p]
    tempered = {i: math.exp((float(logits[i]) - top) / s.temperature) for i in kept}
    return {i: w / sum(tempered.values()) for i, w in tempered.items()}


def fast_candidates(logits, s):
    ids, weights = candidates(logits, s)
    return dict(zip(ids.tolist(), (weights / weights.sum()).tolist(), strict=True))


@settings(deadline=None, max_examples=300)
@given(
    st.lists(st.integers(-40, 40), min_size=1, max_size=30),
    st.sampled_from([0, 1, 2, 5, 100]),
    st.sampled_from([0.0, 0.103, 0.513, 0.917, 1.0]),
    st.sampled_from([0.0, 0.05, 0.3, 1.0]),
    st.sampled_from([0.1, 1.0, 3.0]),
)
def test_filters_equal_a_slow_reference(quarters, top_k, top_p, min_p, temperature):
    logits = (np.array(quarters) / 4 + 0.01 * np.arange(len(quarters))).astype(np.float32)
    s = SamplingSettings(top_k=top_k, top_p=top_p, min_p=min_p, temperature=temperature)

    found, expected = fast_candidates(logits, s), slow_candidates(logits, s)

    assert list(found) == sorted(expected)
    assert found == pytest.approx(expected)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(-3, 3), min_size=2, max_size=20), st.integers(1, 25))
def test_of_equal_logits_at_the_border_the_lowest_ids_stay(values, top_k):
    logits = np.array(values, np.float32)
    s = SamplingSettings(top_k=top_k)

    assert fast_candidates(logits, s) == pytest.approx(slow_candidates(logits, s))


@pytest.mark.parametrize("greedy", [{"temperature": 0}, {"top_k": 1}, {"temperature": 1e-6}])
@pytest.mark.parametrize("seed", range(20))
def test_greedy_is_the_lowest_id_of_equal_maxima_for_every_seed(greedy, seed):
    logits = random_logits()
    logits[[11, 30, 49]] = logits.max() + 1

    assert pick(logits, position=seed, seed=seed, **greedy) == 11


@settings(deadline=None, max_examples=200)
@given(st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=40), st.integers(0, 2**64 - 1))
def test_greedy_is_argmax_whatever_else_is_set(values, seed):
    s = {"temperature": 0.0, "seed": seed, "top_k": 3, "top_p": 0.2, "min_p": 0.5}

    assert pick(values, **s) == int(np.argmax(np.array(values, np.float32)))


@settings(deadline=None, max_examples=200)
@given(
    st.integers(0, 2**32),
    st.integers(0, 2**64 - 1),
    st.integers(0, 10**6),
    st.sampled_from([{}, {"top_k": 7}, {"top_p": 0.7}, {"min_p": 0.1}, {"temperature": 0.3}]),
)
def test_a_draw_is_a_candidate_and_belongs_to_seed_and_position(data, seed, position, chosen):
    logits = random_logits(data)
    sampler = Sampler(SamplingSettings(seed=seed, **chosen), (), VOCAB)
    sampler.pick(random_logits(data + 1), position + 1)  # an earlier draw leaves nothing behind

    token = sampler.pick(logits, position)

    assert token == pick(logits, position, seed=seed, **chosen)
    assert token in fast_candidates(logits, SamplingSettings(**chosen))


def test_draws_follow_the_distribution():
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))

    counts = collections.Counter(pick(logits, position, seed=3) for position in range(4000))

    shares = [counts[i] / 4000 for i in range(4)]
    np.testing.assert_allclose(shares, [0.5, 0.3, 0.15, 0.05], atol=0.03)


@pytest.mark.parametrize(("top_k", "count"), [(0, VOCAB), (100, VOCAB), (100_000, VOCAB), (7, 7)])
def test_top_k_of_none_or_more_than_there_are_keeps_all(top_k, count):
    assert len(fast_candidates(random_logits(), SamplingSettings(top_k=top_k))) == count


def test_a_large_vocabulary_with_top_p_equals_the_slow_reference():
    logits = random_logits(size=20_000)
    s = SamplingSettings(top_p=0.8)

    assert fast_candidates(logits, s) == pytest.approx(slow_candidates(logits, s))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("chosen", [{"temperature": 0}, {}, {"presence_penalty": 1.0}])
def test_logits_that_are_not_finite_are_an_error(value, chosen):
    logits = random_logits()
    logits[9] = value

    with pytest.raises(StrataError, match="position 41 are not finite"):
        pick(logits, 41, **chosen)


def test_opposite_infinities_are_an_error_too():
    with pytest.raises(StrataError):
        pick([float("inf"), float("-inf"), 0.0], temperature=0)


def test_huge_finite_logits_are_no_error():
    assert pick([3e38, 3e38, -3e38]) in (0, 1)


def slow_penalties(logits, prompt, answer, s):
    counts = collections.Counter(answer)
    out = []
    for i, x in enumerate(logits.tolist()):
        if i in prompt or i in counts:
            x = x / s.repetition_penalty if x > 0 else x * s.repetition_penalty
        x -= s.presence_penalty * (counts[i] > 0) + s.frequency_penalty * counts[i]
        out.append(x)
    return out


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.integers(0, 9), max_size=6),
    st.floats(0.5, 2),
    st.floats(-1, 1),
    st.floats(-1, 1),
    st.integers(0, 1000),
)
def test_penalties_equal_a_slow_reference(prompt, repetition, presence, frequency, data):
    s = SamplingSettings(
        temperature=0,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
    )
    sampler, answer = Sampler(s, tuple(prompt), 10), []

    for position in range(8):
        logits = random_logits(data + position, 10)
        expected = slow_penalties(logits, prompt, answer, s)
        token = sampler.pick(logits, position)
        assert expected[token] >= max(expected) - 1e-5
        answer.append(token)


def test_a_penalty_leaves_the_callers_logits_alone():
    logits = random_logits()
    before = logits.copy()

    pick(logits, prompt=range(50), repetition_penalty=1.5, frequency_penalty=1.0)

    assert np.array_equal(logits, before)


def test_a_bias_is_added_after_the_penalties():
    logits = [1.0, 4.0, 3.0]

    assert pick(logits, temperature=0.0, logit_bias=((2, 1.5),)) == 2
    assert (
        pick(logits, prompt=(1,), temperature=0.0, repetition_penalty=2.0, logit_bias=((1, 1.1),))
        == 1
    )
    assert pick(logits, temperature=0.0, logit_bias=((1, -100.0),)) == 2


@pytest.mark.parametrize("chosen", [{"temperature": 0.0}, {"temperature": 100.0}, {"top_k": 5}])
def test_ids_that_have_no_token_never_win(chosen):
    made = SamplingSettings(**chosen)
    logits = np.asarray([0.0, 1.0, 0.5, 50.0, 50.0], np.float32)

    for seed in range(20):
        sampler = Sampler(dataclasses.replace(made, seed=seed), (4,), 3)
        assert sampler.pick(logits, 7) < 3


def test_refuses_a_bias_of_an_id_that_has_no_token():
    with pytest.raises(UsageError, match="logit_bias: id 3, expected ids from 0 to 2"):
        Sampler(SamplingSettings(logit_bias=((3, 1.0),)), (), 3)
