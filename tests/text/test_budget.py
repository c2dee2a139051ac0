"""What a template may use is counted, not estimated afterwards."""

import pytest

from strata_jax.text.budget import Budget, TemplateLimitError


def test_ends_when_the_time_is_used_up():
    now = [100.0]
    budget = Budget(lambda: now[0], seconds=2, max_bytes=10)

    budget.tick()
    now[0] = 102.1

    with pytest.raises(TemplateLimitError, match="it ran for more than 2 s"):
        budget.tick()


def test_ends_when_the_memory_is_used_up():
    budget = Budget(max_bytes=3 << 20)

    budget.pay(3 << 20)

    with pytest.raises(TemplateLimitError, match="it made more than 3 MiB of text"):
        budget.pay(1)


def test_counts_shared_parts_as_often_as_they_print():
    tower: list[object] = ["x"]
    for _ in range(60):
        tower = [tower, tower]

    with pytest.raises(TemplateLimitError):
        Budget(max_bytes=1 << 20).pay_to_print(tower)


@pytest.mark.parametrize("value", ["x" * 1000, ["x"] * 1000, ("x",) * 1000, {"x": "y" * 1000}])
def test_pays_for_printing_all_that_a_value_holds(value):
    with pytest.raises(TemplateLimitError):
        Budget(max_bytes=999).pay_to_print([value])


@pytest.mark.parametrize("value", ["x" * 1000, ["x"] * 1000, ("x",) * 1000])
def test_pays_for_values_just_made(value):
    with pytest.raises(TemplateLimitError):
        Budget(max_bytes=999).pay_for(value)
