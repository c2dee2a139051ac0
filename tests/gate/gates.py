"""Gates against a fake process: facts of a made-up model, jobs and commands."""

import json
import sys
from pathlib import Path
from typing import Any

from strata_jax.gate.comparison import Comparison, Side
from strata_jax.gate.facts import ModelFacts
from strata_jax.gate.judge import Job
from strata_jax.gate.prompts import Prompt
from strata_jax.gate.tier_flags import HOST

HASH = "0123456789abcdef"
FACTS = ModelFacts(
    path="/models/fake.gguf",
    file_bytes=1000,
    hash=HASH,
    layers=8,
    experts=16,
    vocab_size=4096,
    index_budget=2048,
    context_length=4096,
    has_ngram_table=True,
)
PROMPTS = (
    Prompt(name="first", ids=(5, 6, 7), flags={"temperature": "0"}),
    Prompt(name="second", ids=(8, 9), flags={"temperature": "1", "seed": "3"}),
)
_SCRIPT = Path(__file__).with_name("fake_worker.py")


def command(model_hash: str = HASH, **scenario: Any) -> tuple[str, ...]:
    """Starts the fake process with some faults; see there."""
    return (sys.executable, "-S", str(_SCRIPT), json.dumps({"model_hash": model_hash, **scenario}))


def job(timeout_s: float = 20, common: dict[str, str] | None = None, **scenario: Any) -> Job:
    """Two prompts of 4 tokens on the fake process."""
    return Job(
        facts=FACTS,
        prompts=PROMPTS,
        max_tokens=4,
        common=common or {},
        timeout_s=timeout_s,
        command=command(**scenario),
    )


def threads_comparison(*counts: int) -> Comparison:
    """Sides that differ in --threads."""
    return Comparison(
        name="threads",
        contract="T",
        varied=frozenset({"threads"}),
        sides=tuple(
            Side(name=f"{count} threads", flags={"threads": str(count)}, claims=(HOST,))
            for count in counts
        ),
    )
