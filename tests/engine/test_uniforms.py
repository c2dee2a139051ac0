"""The numbers that decide draws."""

import numpy as np
import pytest

from strata_jax.engine.uniforms import Uniforms, uniforms


def test_seeds_and_positions_give_different_draws():
    draws = {draw for seed in range(30) for draw in uniforms(seed, 0, 30)}

    assert len(draws) == 900
    assert all(0 <= draw < 1 for draw in draws)
    assert 0.45 < sum(draws) / 900 < 0.55


def philox(counter, key):
    """Philox 4x64 with 10 rounds; source: Salmon et al. 2011, table 2 and figure 4."""
    x, k = [counter, 0, 0, 0], [key, 0]
    mask = 2**64 - 1
    for _ in range(10):
        first, second = x[0] * 0xD2E7470EE14C6C93, x[2] * 0xCA5A826395121157
        x = [
            (second >> 64) ^ x[1] ^ k[0],
            second & mask,
            (first >> 64) ^ x[3] ^ k[1],
            first & mask,
        ]
        k = [(k[0] + 0x9E3779B97F4A7C15) & mask, (k[1] + 0xBB67AE8584CAA73B) & mask]
    return x


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (1, 7), (2**64 - 1, 8191)])
def test_a_draw_is_the_first_word_of_philox_behind_the_position(seed, position):
    assert philox(0, 0)[0] == 0x16554D9ECA36314C  # the authors' known answer

    found = uniforms(seed, position, 3).tolist()

    assert found == [(philox(position + 1 + n, seed)[0] >> 11) / 2**53 for n in range(3)]


@pytest.mark.parametrize("seed", [0, 5, 2**63 + 12345])
def test_numbers_are_those_of_numpys_generator(seed):
    def word(position):
        return int(np.random.Philox(key=seed, counter=position).random_raw())

    expected = [(word(position) >> 11) / 2**53 for position in range(100)]

    assert uniforms(seed, 0, 100).tolist() == expected


def test_positions_may_be_asked_for_in_any_order():
    found, known = Uniforms(3), uniforms(3, 0, 300)

    for position in (0, 1, 70, 63, 64, 299, 5):
        assert found.at(position) == known[position]
