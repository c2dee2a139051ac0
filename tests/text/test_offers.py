"""What a template lets one choose, read off its source."""

import pytest

from strata_jax.text.offers import Offers
from strata_jax.text.template import parse_template
from tests.text.templates import EMBEDDED, PLAIN, QWEN


def offers(source):
    return Offers.of(parse_template(source))


def test_finds_thinking_on_and_off_in_the_embedded_template():
    found = offers(EMBEDDED)

    assert (found.thinking, found.effort, found.efforts) == ("enable_thinking", None, ())
    assert found.describe() == "it offers thinking on or off"


def test_finds_nothing_in_a_template_without_choices():
    assert offers(PLAIN).describe() == "it offers neither"


def test_finds_efforts_behind_another_name():
    found = offers(QWEN)

    assert found.thinking == "enable_thinking"
    assert found.efforts == ("xhigh", "medium", "low")
    assert found.describe() == "it offers thinking on or off and effort xhigh, medium, low"
    assert "preserve_thinking" in found.variables


@pytest.mark.parametrize(
    ("source", "efforts"),
    [
        (
            "{% if reasoning_effort == 'low' %}a{% elif reasoning_effort == 'high' %}b{% endif %}",
            ("low", "high"),
        ),
        (
            "{% set e = reasoning_effort if reasoning_effort else 'x' %}{% if e == 'low' %}a{% endif %}",
            ("low",),
        ),
        ("{% set e = (reasoning_effort or 'x')|lower %}{% if e != 'low' %}a{% endif %}", ("low",)),
        ("{{ 'a' if reasoning_effort == 'low' else 'b' }}", ("low",)),
        (
            "{% if reasoning_effort == 'none' %}a{% else %}{{ 'Effort: ' ~ reasoning_effort }}{% endif %}",
            (),
        ),
        ("{{ reasoning_effort|default('medium') }}", ()),
        (
            "{% if reasoning_effort not in ['a', 'b'] %}{{ raise_exception(reasoning_effort) }}{% endif %}{{ reasoning_effort }}",
            ("a", "b"),
        ),
        ("{% if reasoning_effort is defined %}a{% endif %}", ()),
    ],
)
def test_lists_the_efforts_a_template_compares_with(source, efforts):
    found = offers(source)

    assert found.effort == "reasoning_effort"
    assert found.efforts == efforts


def test_does_not_take_a_variable_the_template_sets_itself():
    assert offers("{% set enable_thinking = true %}{{ enable_thinking }}").thinking is None


def test_takes_a_variable_the_template_reads_before_it_sets_it():
    source = "{% set enable_thinking = enable_thinking|default(true) %}{{ enable_thinking }}"

    assert offers(source).thinking == "enable_thinking"


def test_does_not_take_the_functions_of_the_sandbox():
    assert offers("{{ range(3) }}{{ raise_exception('x') }}{{ name }}").variables == {"name"}


def test_knows_the_other_name_of_the_switch():
    assert offers("{% if thinking %}<think>{% endif %}").thinking == "thinking"
