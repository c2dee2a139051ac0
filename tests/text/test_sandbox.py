"""Templates may do what transformers lets them do; what would hang or eat memory is stopped."""

import datetime
import time

import pytest

from strata_jax.errors import BadFileError
from strata_jax.text.budget import Budget
from strata_jax.text.template import compile_template, parse_template, run_template
from tests.text.templates import EMBEDDED, PLAIN, QWEN


def noon():
    return datetime.datetime(2026, 10, 8, 12, 0)


def run(source, seconds=0.3, max_bytes=64 << 20, **variables):
    budget = Budget(time.monotonic, seconds, max_bytes)
    return run_template(compile_template(parse_template(source)), variables, noon, budget)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),
        ("{{ {'ä<&>': [1, none, true]}|tojson }}", '{"ä<&>": [1, null, true]}'),
        ("{{ {'b': 1, 'a': 2}|tojson(indent=1) }}", '{\n "b": 1,\n "a": 2\n}'),
        ("{{ strftime_now('%d %b %Y') }}", "08 Oct 2026"),
        ("{% for c in 'abc' %}{% if c == 'b' %}{% break %}{% endif %}{{ c }}{% endfor %}", "a"),
        ("{% for c in 'abc' %}{% if c == 'b' %}{% continue %}{% endif %}{{ c }}{% endfor %}", "ac"),
        ("{{ 1 ~ 'a' ~ none ~ [2] ~ x }}", "1aNone[2]{}"),
        (
            "{{ 'a' + 'b' * 3 }} {{ 7 % 4 }} {{ 2 ** 10 }} {{ '%s-%02d' % ('x', 5) }}",
            "abbb 3 1024 x-05",
        ),
        ("{{ '{:>4}|{}'.format(1, 'a') }}", "   1|a"),
        ("{{ ['a', 'b']|join(', ') }} {{ ', '.join(['a', 'b']) }}", "a, b a, b"),
        ("{{ [{'n': 1}, {'n': 2}]|map(attribute='n')|join('-') }}", "1-2"),
        ("{{ [{'n': 1}, {'n': 2}]|join('-', attribute='n') }}", "1-2"),
        ("{{ 'aXbX'|replace('X', '--') }} {{ 'aXbX'.replace('X', '', 1) }}", "a--b-- abX"),
        ("{{ 'a\nb'|indent(2) }}", "a\n  b"),
        ("{{ 2.567|round(1) }} {{ '%d%%'|format(5) }} {{ [1]|string }}", "2.6 5% [1]"),
        (
            "{% macro f(x, y='d') %}<{{ x }}{{ y }}>{% endmacro %}{{ f('a') }}{{ f(1, 2) }}",
            "<ad><12>",
        ),
        (
            "{% set ns = namespace(n=0) %}{% for i in range(5) %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}",
            "10",
        ),
        ("{% set x %}a{{ 1 }}{% endset %}{{ x }}", "a1"),
        ("{% for k, v in {'b': 1, 'a': 2}|dictsort %}{{ k }}{{ v }}{% endfor %}", "a2b1"),
        ("{{ x.y is defined }}{{ missing }}", "False"),
        ("{{ [3, 1, 2]|sort|first }}{{ 'ab'|upper|list|last }}", "1B"),
    ],
)
def test_renders_as_transformers_does(source, text):
    assert run(source, x={}) == text


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10**9 }}",
        "{{ 10**9 * 'a' }}",
        "{{ [0] * 10**9 }}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(999) if false %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for i in [1] recursive %}{{ loop([1]) }}{% endfor %}",
        "{{ 10 ** 10 ** 10 }}{{ (10 ** 1000) ** 1000 }}",
        "{{ 'a'.ljust(10**9) }}",
        "{{ 'a'|center(10**9) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (1000000000, 1) }}",
        "{{ '%1000000000d'|format(1) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, 1000000000) }}",
        "{{ ('a' * 100000)|replace('a', 'b' * 100000) }}",
        "{{ ('a' * 100000).replace('a', 'b' * 100000) }}",
        "{{ ('a' * 100000)|join('b' * 100000) }}",
        "{{ ('b' * 100000).join('a' * 100000) }}",
        "{{ 'a'|indent(10**9) }}",
        "{{ [1]|tojson(indent=10**9) }}",
        "{{ 1.5|round(10**9, 'floor') }}",
        "{{ (5).to_bytes(10**9) }}",
        "{{ ('ab' * 3000000)|sort|first }}",
        "{% for i in range(9999) %}{{ 'x' * 99999 }}{% endfor %}",
        "{% macro f() %}{% for i in range(9999) %}{{ 'x' * 99999 }}{% endfor %}{% endmacro %}{{ f() }}",
    ],
)
def test_stops_what_loops_or_grows(source):
    start = time.monotonic()

    with pytest.raises(BadFileError, match=r"^chat template: ") as caught:
        run(source)

    assert time.monotonic() - start < 5
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("grow", ["ns.s + ns.s", "ns.s ~ ns.s", "ns.s|join(ns.s)", "[ns.s, ns.s]"])
@pytest.mark.parametrize(
    "use", ["ns.s", "ns.s|tojson", "ns.s|string", "ns.s ~ ''", "'%s' % [ns.s]"]
)
def test_stops_what_doubles(grow, use):
    source = f"{{% set ns = namespace(s='ab') %}}{{% for i in range(60) %}}{{% set ns.s = {grow} %}}{{% endfor %}}{{{{ {use} }}}}"

    with pytest.raises(BadFileError, match=r"stopped, it (ran for more than|made more than)"):
        run(source)


def test_stops_a_block_that_doubles():
    source = "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}{% endfor %}"

    with pytest.raises(BadFileError, match="made more than 64 MiB"):
        run(source)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ ''.__class__.__mro__ }}", "attribute '__class__' of 'str' object is unsafe"),
        ("{{ {}.update({1: 2}) }}", "attribute 'update' of 'dict' object is unsafe"),
        ("{{ [].append(1) }}", "attribute 'append' of 'list' object is unsafe"),
        ("{{ raise_exception.__globals__.sys }}", "is unsafe"),
        ("{{ '{0.__class__.x}'.format(1) }}", "is unsafe"),
    ],
)
def test_keeps_templates_in_the_sandbox(source, text):
    with pytest.raises(BadFileError, match=text):
        run(source)


@pytest.mark.parametrize("source", [EMBEDDED, PLAIN, QWEN], ids=["embedded", "plain", "qwen"])
def test_has_room_for_a_long_conversation(source):
    messages = [{"role": "user", "content": "word " * 500}, {"role": "assistant", "content": "ok"}]

    text = run(source, seconds=20, messages=messages * 500, add_generation_prompt=True)

    assert len(text) > 1_000_000
