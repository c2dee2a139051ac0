import pytest

from strata_jax.gate.comparison import Claim, Comparison, Side, differing_flags


def test_flags_differ_by_value_or_by_being_there():
    flags = [{"a": "1", "b": "1"}, {"a": "1", "b": "2", "c": "3"}]

    assert differing_flags(flags) == {"b", "c"}
    assert differing_flags(flags[:1]) == set()


def test_a_claim_is_a_sum_of_counters():
    claim = Claim(("entries_stream", "entries_host"))

    assert claim.text == "entries_stream + entries_host > 0"
    assert (claim.holds(1), claim.holds(0)) == (True, False)
    assert Claim(("entries_host",), "== 0").holds(0)


@pytest.mark.parametrize(
    "sides",
    [
        (Side(name="a", flags={}, claims=()),),
        (Side(name="a", flags={}, claims=()), Side(name="a", flags={}, claims=())),
        (Side(name="a", flags={}, claims=()), Side(name="b", flags={"x": "1"}, claims=())),
    ],
)
def test_a_comparison_of_anything_else_is_a_mistake(sides: tuple[Side, ...]):
    with pytest.raises(AssertionError):
        Comparison(name="c", contract="T", varied=frozenset(), sides=sides)
