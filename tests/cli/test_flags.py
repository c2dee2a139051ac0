from pathlib import Path

import pytest
from absl import flags

from strata_jax.cli import flags as cli_flags
from strata_jax.errors import UsageError


def _values() -> flags.FlagValues:
    values = flags.FlagValues()
    cli_flags.define_model(values)
    cli_flags.define_engine(values)
    cli_flags.define_sampling(values)
    flags.DEFINE_boolean("json", False, "help of it", flag_values=values)
    return values


def _parse(*args: str, others: dict[str, list[str]] | None = None) -> flags.FlagValues:
    values = _values()
    cli_flags.parse("test", values, list(args), others or {})
    return values


@pytest.mark.parametrize(
    "args",
    [
        ("--max-context=7",),
        ("--max_context=7",),
        ("--max-context", "7"),
        ("-max_context=7",),
        ("--max-context=3", "--max_context=7"),
    ],
)
def test_takes_dashes_for_underscores(args: tuple[str, ...]):
    assert _parse(*args).max_context == 7


def test_leaves_values_alone():
    assert _parse("--model", "--top-k=1").model == "--top-k=1"
    assert _parse("--model=a-b", "--no-json").model == "a-b"


def test_takes_no_for_false():
    assert _parse("--json", "--nojson").json is False


def test_reads_flag_files(tmp_path: Path):
    inner = tmp_path / "inner"
    inner.write_text("--top-k=5\n")
    outer = tmp_path / "outer"
    outer.write_text(f"# a comment\n\n--max-context=7\n--flagfile={inner}\n")

    values = _parse("--seed", "3", f"--flagfile={outer}", "--top_p=0.5")

    assert (values.max_context, values.top_k, values.seed, values.top_p) == (7, 5, 3, 0.5)


def test_reads_flag_files_behind_a_separate_value(tmp_path: Path):
    file = tmp_path / "flags"
    file.write_text("--top-k=5\n")

    assert _parse("--max-context", "7", "--flagfile", str(file)).top_k == 5


@pytest.mark.parametrize(
    ("content", "expected"),
    [(b"\xff\xfe\n", "utf-8"), (b"--pear=1\n", "--pear"), (b"max_context=7\n", "'max_context=7'")],
)
def test_refuses_bad_flag_files(tmp_path: Path, content: bytes, expected: str):
    file = tmp_path / "flags"
    file.write_bytes(content)

    with pytest.raises(UsageError, match=expected):
        _parse(f"--flagfile={file}")


def test_refuses_a_missing_flag_file():
    with pytest.raises(UsageError, match=r"flagfile: .*No such file.*/none"):
        _parse("--flagfile=/none")


@pytest.mark.parametrize(
    ("arg", "expected"),
    [
        ("--max_contxt=7", "--max_contxt; did you mean --max_context?"),
        ("--undefok=foo", "--undefok"),
        ("--zzzzzz", "no flag has a name like it"),
        ("--max_context=x", "--max_context=x: a whole number from 1 to 16777216 expected"),
        ("--max_context=0", "from 1 to"),
        ("--max_context=1.5", "a whole number"),
        ("--max_context=1e400", "a whole number"),
        (f"--max_context={10**400}", "a whole number"),
        ("--temperature=nan", "a number of at least 0 expected"),
        ("--temperature=-1", "a number of at least 0 expected"),
        ("--presence_penalty=inf", "a number expected"),
        ("--top_p=1.1", "a number from 0 to 1 expected"),
        ("--top_p=-0.1", "a number from 0 to 1 expected"),
        ("--platform=gpu", "auto|cpu|cuda"),
        ("--json=maybe", "true or false expected"),
        ("--nojson=1", "does not take an argument"),
        ("--max_context", "issing value"),
        ("word", "received 'word', flags only"),
    ],
)
def test_says_what_is_wrong(arg: str, expected: str):
    with pytest.raises(UsageError) as error:
        _parse(arg)

    assert expected in str(error.value)
    assert "\n" not in str(error.value)


def test_names_the_command_a_flag_belongs_to():
    with pytest.raises(UsageError, match="--port is a flag of serve, not of test"):
        _parse("--port=1", others={"serve": ["port"], "plan": ["json"]})


@pytest.mark.parametrize("arg", ["--help", "-h", "--helpfull", "-?", "--helpshort"])
def test_asks_for_the_usage(arg: str):
    with pytest.raises(cli_flags.HelpRequest):
        _parse("--json", arg)


def test_a_value_is_no_request_for_help():
    assert _parse("--model", "--help").model == "--help"


def test_the_usage_names_values_and_defaults():
    text = cli_flags.usage("test", "tests.", _values())

    assert "strata-jax test [flags]: tests.\n" in text
    assert "  --platform=auto|cpu|cuda\n" in text
    assert "  --max_context=N\n" in text
    assert "  --[no]json\n      help of it\n" in text
    assert "(default 0)" in text
    assert max(map(len, text.splitlines())) <= 100


def test_commands_do_not_share_flags():
    assert "json" not in flags.FLAGS
    assert _parse("--json").json
    assert not _parse().json
