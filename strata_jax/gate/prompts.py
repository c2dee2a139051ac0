"""The requests of a gate: the same few prompts for every model, as ids, so that no text is needed."""

import dataclasses

from strata_jax.errors import UsageError
from strata_jax.gate.facts import ModelFacts

_GRAIN = 64
"""Tokens; a prompt's last n mod 64 are read by windows, the others by tiles. Source: numerics.md."""
_TAIL = 29
"""Tokens of a prompt's last, incomplete grain: windows of every width up to 8 are filled."""
_SAMPLED = {"temperature": "0.9", "top_p": "0.95", "seed": "7"}
_GREEDY = {"temperature": "0"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
    """One request of a gate."""

    name: str
    ids: tuple[int, ...]
    flags: dict[str, str]
    """How it is answered, as flags of `generate`."""


def make_prompts(
    facts: ModelFacts, index_budget: int, max_tokens: int, max_context: int | None
) -> tuple[Prompt, ...]:
    """Two short prompts, one past the indexer's budget, and one answered by drawing.

    Args:
        facts: the model that gets them.
        index_budget: tokens that sparse attention selects, the model's or what is asked for.
        max_tokens: longest answer.
        max_context: what --max_context says.

    Raises:
        UsageError: if the context does not hold the longest of them and its answer.
    """
    past_budget = -(-(index_budget + _TAIL) // _GRAIN) * _GRAIN + _TAIL
    # The engine's own choice where nothing is given: the smaller of the file's and 8192.
    context = max_context or min(facts.context_length, 8192)
    if past_budget + max_tokens > context:
        raise UsageError(
            f"gate: a prompt past the indexer's budget ({past_budget} tokens) and --max_tokens="
            f"{max_tokens} do not fit a context of {context}; lower the second or raise --max_context"
        )
    return (
        # One that may end before its length, so that reasons to end are compared too.
        Prompt(name="short", ids=_ids(facts, 21, 1), flags=_GREEDY),
        Prompt(name="longer", ids=_ids(facts, _GRAIN + _TAIL, 2), flags=_GREEDY | _endless()),
        Prompt(name="past-budget", ids=_ids(facts, past_budget, 3), flags=_GREEDY | _endless()),
        Prompt(name="sampled", ids=_ids(facts, 45, 4), flags=_SAMPLED | _endless()),
    )


def _endless() -> dict[str, str]:
    return {"ignore_eos": "true"}


def _ids(facts: ModelFacts, count: int, seed: int) -> tuple[int, ...]:
    """Ids spread over the vocabulary but for its end, where the special tokens are."""
    bound = max(1, facts.vocab_size * 3 // 4)
    ids = []
    state = seed
    for _ in range(count):
        # A linear congruential generator: the same everywhere, whatever libraries do.
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        ids.append((state >> 33) % bound)
    return tuple(ids)
