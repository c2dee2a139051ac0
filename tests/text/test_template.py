"""From source to text: every failure is one line that says whose fault it is."""

import datetime

import pytest

from strata_jax.errors import BadFileError, UsageError
from strata_jax.text.template import compile_template, parse_template, run_template


def run(source):
    return run_template(compile_template(parse_template(source)), {}, datetime.datetime.now)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% if", "line 1: unexpected 'end of template'"),
        ("a\n{{ x|nothing }}", "line 2: No filter named 'nothing'"),
        ("{% nothing %}", "line 1: Encountered unknown tag 'nothing'"),
        ("{{" + "(" * 3000 + ")" * 3000 + "}}", "cannot be read|deep"),
        ("{{" + "-" * 150 + "1}}", "nested more than 100 deep"),
        ("{{ 1" + "+1" * 150 + "}}", "nested more than 100 deep"),
        ("{% for a in b %}" * 30 + "{% endfor %}" * 30, "cannot be compiled"),
        ("x" * ((1 << 20) + 1), "1048577 characters, expected at most 1048576"),
    ],
)
def test_refuses_sources_that_are_no_template(source, text):
    with pytest.raises(BadFileError, match=text) as caught:
        compile_template(parse_template(source))

    assert "\n" not in str(caught.value)


def test_reports_what_the_template_says_in_one_safe_line():
    with pytest.raises(UsageError, match=r"^chat template: roles must alternate$"):
        run("{{ raise_exception('roles \n must\x1b alternate') }}")


@pytest.mark.parametrize(
    "source", ["{{ x.y.z }}", "{{ 1 / 0 }}", "{% include 'x' %}", "{{ 1|items|list }}"]
)
def test_reports_what_goes_wrong_while_rendering(source):
    with pytest.raises(UsageError, match=r"^chat template: it cannot use these messages \(\w+: "):
        run(source)
