"""Draws on a device: the ids that the host's sampler draws from the same logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_jax.engine import device_sampling
from strata_jax.engine.device_sampling import MOST_CHOSEN, DeviceSampling
from strata_jax.engine.programs import Numbers
from strata_jax.engine.request import SamplingSettings
from strata_jax.engine.sampling import Sampler

VOCAB = 3000
"""Two dozen groups, the last one ragged."""


def both(chosen: SamplingSettings, logits: np.ndarray, prompt: tuple[int, ...], start: int = 5):
    """The ids of both samplers for rows of logits [n, V], one position after the other."""
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    host = Sampler(chosen, prompt, logits.shape[1])
    device = DeviceSampling(chosen, Sampler(chosen, prompt, logits.shape[1]), sharding, sharding)
    expected = [host.pick(row, start + i) for i, row in enumerate(logits)]
    found = [int(device.draw(row[None], start + i)[0]) for i, row in enumerate(logits)]
    return found, expected


def random_logits(seed: int, rows: int = 8, size: int = VOCAB) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 4, (rows, size)).astype(np.float32)


@pytest.mark.parametrize(
    "chosen",
    [
        SamplingSettings(),
        SamplingSettings(top_k=20, top_p=0.95, temperature=0.7),
        SamplingSettings(top_k=MOST_CHOSEN),
        SamplingSettings(top_k=MOST_CHOSEN + 1, top_p=0.9),
        SamplingSettings(top_k=2**63, top_p=0.5, min_p=0.02),
        SamplingSettings(top_k=1, repetition_penalty=3.0),
        SamplingSettings(temperature=0.0, presence_penalty=2.0, frequency_penalty=0.5),
        SamplingSettings(top_k=5, repetition_penalty=1.3, frequency_penalty=1.0, temperature=2.0),
        SamplingSettings(top_p=0.0),
        SamplingSettings(temperature=0.0, logit_bias=((7, 20.0), (9, -5.0))),
        SamplingSettings(top_k=8, repetition_penalty=1.3, logit_bias=((7, 9.0), (11, 12.0))),
    ],
)
def test_draws_what_the_host_draws(chosen: SamplingSettings):
    logits = np.concatenate([random_logits(0), np.repeat(random_logits(1, 1), 6, axis=0)])

    found, expected = both(chosen, logits, tuple(range(0, 40, 3)))

    assert found == expected


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(-40, 40), min_size=400, max_size=400),
    st.sampled_from([0, 2, 5, 64, 100]),
    st.sampled_from([0.0, 0.103, 0.513, 1.0]),
    st.sampled_from([0.0, 0.05]),
    st.integers(0, 2**64 - 1),
)
def test_of_equal_logits_the_lowest_ids_stay(quarters, top_k, top_p, min_p, seed):
    logits = (np.array(quarters, np.float32) / 4)[None]
    chosen = SamplingSettings(top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)

    found, expected = both(chosen, logits, ())

    assert found == expected


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_logit_that_is_not_finite_is_told(bad: float):
    logits = random_logits(2, 1)
    logits[0, 77] = bad
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    chosen = SamplingSettings(top_k=4)
    device = DeviceSampling(chosen, Sampler(chosen, (), VOCAB), sharding, sharding)

    assert int(device.draw(logits, 0)[0]) == -1


def test_other_settings_compile_nothing():
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    logits = random_logits(3, 1)

    def draw(**chosen):
        made = SamplingSettings(**chosen)
        DeviceSampling(made, Sampler(made, (), VOCAB), sharding, sharding).draw(logits, 0)

    draw(top_k=3)
    program = device_sampling._program(True, sharding, sharding)
    before = program._cache_size()  # pyright: ignore[reportAttributeAccessIssue]
    draw(top_k=7, temperature=0.3, top_p=0.5, seed=9, repetition_penalty=1.2)

    after = program._cache_size()  # pyright: ignore[reportAttributeAccessIssue]

    assert after == before


def window_of(ids, pos):
    """The operand of a window of 8 rows."""
    numbers = Numbers(pos=pos, live=len(ids), head_rows=len(ids), certain=1)
    return np.asarray([*ids, *[0] * (8 - len(ids)), *numbers], np.int32)


@pytest.mark.parametrize(("came_true", "lowest"), [(0, 5), (2, 2), (4, 4)])
@pytest.mark.parametrize(
    "chosen",
    [
        SamplingSettings(temperature=3.0),
        SamplingSettings(top_k=50, top_p=0.9, repetition_penalty=1.5, frequency_penalty=2.0),
        SamplingSettings(temperature=0.0, presence_penalty=3.0, frequency_penalty=1.0),
    ],
)
def test_draws_after_the_rows_of_a_window_as_one_by_one(
    chosen: SamplingSettings, came_true: int, lowest: int
):
    # The same logits again and again, so that penalties decide.
    logits = np.repeat(random_logits(4, 1), 12, axis=0) + random_logits(5, 12) / 8
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def begun():
        return DeviceSampling(chosen, Sampler(chosen, (1, 2), VOCAB), sharding, sharding)

    device = begun()
    expected = [int(device.draw(row[None], 5 + i)[0]) for i, row in enumerate(logits)]
    drafts = list(expected[:4])
    for place in range(came_true, 4):
        drafts[place] = (drafts[place] + 1) % VOCAB
    device = begun()

    found, _ = device.draw_rows(jnp.asarray(logits[:8]), window_of([3, *drafts], 4), lowest)

    assert np.asarray(found)[: came_true + 1].tolist() == expected[: came_true + 1]
    # What was rejected has left no trace.
    rest = range(came_true + 1, len(logits))
    assert [int(device.draw(logits[i][None], 5 + i)[0]) for i in rest] == expected[came_true + 1 :]


@pytest.mark.parametrize("chosen", [SamplingSettings(temperature=0.0), SamplingSettings(top_k=4)])
def test_ids_that_have_no_token_never_win(chosen: SamplingSettings):
    logits = random_logits(6, 4)
    logits[:, 2990:] = 90.0
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    device = DeviceSampling(chosen, Sampler(chosen, (2995,), 2990), sharding, sharding)

    one = [int(device.draw(row[None], i)[0]) for i, row in enumerate(logits)]
    window = jnp.asarray(np.repeat(logits, 2, axis=0))
    rows = np.asarray(device.draw_rows(window, window_of([1, 2], -1), 0)[0])

    assert max(one) < 2990
    assert rows.max() < 2990


@pytest.mark.parametrize("size", [63, 65, 3000, 8193, 20_000])
def test_finds_the_largest_logits_of_any_vocabulary(size):
    """Few values, so that many are equal."""
    logits = np.random.default_rng(size).integers(-60, 60, size).astype(np.float32)

    ids, scores = device_sampling._largest(jnp.asarray(logits))

    expected = np.argsort(-logits, kind="stable")[:MOST_CHOSEN]
    assert ids.tolist() == expected.tolist()
    assert scores.tolist() == logits[expected].tolist()
