import dataclasses

import pytest

from strata_jax.errors import UsageError
from strata_jax.gate.prompts import make_prompts
from tests.gate.gates import FACTS


def _sized(**sizes: int):
    return dataclasses.replace(FACTS, **sizes)


def test_ids_are_in_the_vocabulary_and_clear_of_its_end():
    for vocab_size in (2, 64, 1024, 248320):
        prompts = make_prompts(_sized(vocab_size=vocab_size), 256, 64, None)

        ids = [token for prompt in prompts for token in prompt.ids]
        assert min(ids) >= 0
        assert max(ids) < max(1, vocab_size * 3 // 4)


@pytest.mark.parametrize("budget", [0, 64, 256, 2048])
def test_one_prompt_is_longer_than_the_indexers_budget(budget: int):
    prompts = make_prompts(FACTS, budget, 64, None)

    assert max(len(prompt.ids) for prompt in prompts) > budget


def test_every_prompt_leaves_rows_for_windows_of_8():
    for prompt in make_prompts(FACTS, 256, 64, None):
        assert len(prompt.ids) % 64 >= 16


def test_one_answer_is_drawn_and_one_may_end_early():
    prompts = make_prompts(FACTS, 256, 64, None)

    assert [prompt.flags.get("seed") for prompt in prompts] == [None, None, None, "7"]
    assert [prompt.flags["temperature"] for prompt in prompts] == ["0", "0", "0", "0.9"]
    assert ["ignore_eos" in prompt.flags for prompt in prompts] == [False, True, True, True]


def test_gives_the_same_prompts_every_time():
    assert make_prompts(FACTS, 256, 64, None) == make_prompts(FACTS, 256, 64, None)
    assert len({prompt.ids for prompt in make_prompts(FACTS, 256, 64, None)}) == 4


@pytest.mark.parametrize(
    ("max_tokens", "max_context", "expected"),
    [(64, 400, "a context of 400"), (4000, None, "a context of 4096"), (8000, 9000, None)],
)
def test_refuses_a_context_that_is_too_short(
    max_tokens: int, max_context: int | None, expected: str | None
):
    if expected is None:
        assert make_prompts(FACTS, 256, max_tokens, max_context)
        return
    with pytest.raises(UsageError, match=expected):
        make_prompts(FACTS, 256, max_tokens, max_context)
