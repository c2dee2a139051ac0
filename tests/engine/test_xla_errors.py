from types import SimpleNamespace

import pytest

from strata_jax.engine.xla_errors import in_a_sentence
from strata_jax.errors import CapacityError, StrataError
from strata_jax.weights.tier_needs import Need

PLAN = SimpleNamespace(
    needs=(
        Need(name="primary", parts={"cache": 3 << 30}, have_bytes=4 << 30, bound_by="free memory"),
        Need(name="host", parts={"rest": 1 << 20}, have_bytes=None, bound_by=""),
    ),
    xla_bytes=2 << 30,
)


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("Out of memory while trying to allocate 68719476736 bytes.", "64.0 GiB asked for"),
        ("Out of memory while trying to allocate 1.50GiB.\nmore", "1.50 GiB asked for"),
        ("Out of memory allocating 1048576 bytes.", "1.0 MiB asked for"),
        ("nothing is left", "more asked for"),
    ],
)
def test_memory_that_ended_is_a_sentence_with_numbers(text: str, asked: str):
    error = in_a_sentence(RuntimeError(f"RESOURCE_EXHAUSTED: {text}"), PLAN)  # type: ignore[arg-type]

    assert isinstance(error, CapacityError)
    assert str(error).startswith(
        f"XLA: {asked} and not to be had; the plan said primary 3.0 GiB of 4"
    )
    assert "host 1.0 MiB, of the primary 2.0 GiB for XLA; a smaller --max_context" in str(error)


def test_any_other_error_is_a_sentence_without_its_wrapping():
    wrapped = "INTERNAL: Error dispatching computation: Error dispatching computation: bad id\nmore"

    error = in_a_sentence(RuntimeError(wrapped), PLAN)  # type: ignore[arg-type]

    assert type(error) is StrataError
    assert str(error).startswith("XLA: a program failed (INTERNAL: bad id), none should")
