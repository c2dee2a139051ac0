from pathlib import Path

import pytest
from absl import flags

from strata_jax.cli import flags as cli_flags
from strata_jax.cli.draft_flags import define_draft_layer, draft_settings
from strata_jax.config import DraftSettings
from strata_jax.errors import UsageError


def settings(*args: str) -> DraftSettings | None:
    values = flags.FlagValues()
    define_draft_layer(values)
    cli_flags.parse("test", values, list(args), {})
    return draft_settings(values)


def test_no_flag_is_the_default():
    assert settings() == DraftSettings()


def test_none_is_wanted_with_off():
    assert settings("--mtp=off") is None


@pytest.mark.parametrize(
    ("arg", "name", "value"),
    [
        ("--mtp=auto", "mtp", None),
        ("--mtp=/a/mtp.gguf", "mtp", Path("/a/mtp.gguf")),
        ("--mtp-window=128", "mtp_window", 128),
        ("--mtp_norm=per_stream", "mtp_norm", "per_stream"),
        ("--draft-vocab=/a/ids.txt", "draft_vocab", Path("/a/ids.txt")),
    ],
)
def test_a_flag_sets_its_field(arg, name, value):
    assert getattr(settings(arg), name) == value


@pytest.mark.parametrize("arg", ["--mtp_window=128", "--draft_vocab=x", "--mtp_norm=per_stream"])
def test_a_flag_of_a_layer_that_is_off_is_refused(arg):
    with pytest.raises(UsageError, match="no effect beside --mtp=off"):
        settings("--mtp=off", arg)


@pytest.mark.parametrize(
    "arg", ["--mtp_window=63", "--mtp_window=x", "--mtp_norm=both", "--mtp=", "--draft_vocab="]
)
def test_a_value_that_is_none_is_refused(arg):
    with pytest.raises(UsageError, match=arg[2:].partition("=")[0]):
        settings(arg)
