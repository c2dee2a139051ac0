"""Flags of drafts: guesses of several ids that one window verifies."""

from pathlib import Path

from absl import flags

from strata_jax.cli.flags import define_number
from strata_jax.engine.scripted_drafter import DraftScript
from strata_jax.errors import UsageError


def define_drafts(values: flags.FlagValues) -> None:
    """Defines how windows draft. Answers do not depend on it."""
    define_number(
        values,
        "spec",
        int,
        "most live rows of a window, the certain id among them; if not given, 4 where drafts are made "
        "and all rows for known text",
        lower=1,
    )
    define_number(
        values,
        "spec_min_p",
        float,
        "a draft less probable than this ends a window's drafts",
        default=0.0,
        lower=0,
        upper=1,
    )
    define_number(
        values,
        "suffix_draft",
        int,
        "drafts what followed when the last N ids, or more, stood in the text before; 0: no such drafts",
        default=0,
        lower=0,
    )
    flags.DEFINE_string(
        "draft_script",
        None,
        "for gates and measurements, PERCENT:FILE: so many drafts are right, taken from a JSON list of "
        "lists of ids, each a prompt with its answer",
        flag_values=values,
    )


def script(value: str | None) -> DraftScript | None:
    """The value of --draft_script.

    Raises:
        UsageError: if it is none.
    """
    if value is None:
        return None
    percent, colon, path = value.partition(":")
    try:
        share = float(percent)
    except ValueError:
        share = -1.0
    if not (colon and path and 0 <= share <= 100):
        raise UsageError(f"--draft_script={value}: PERCENT:FILE expected, as in 50:answers.json")
    return DraftScript(path=Path(path).expanduser(), percent=share)
