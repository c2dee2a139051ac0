"""Flags of drafts: guesses of several ids that one window verifies, and of the draft layer that makes them."""

from typing import TYPE_CHECKING, get_args

from absl import flags

from strata_jax.cli.files import user_path
from strata_jax.cli.flags import AUTO, define_choice, define_number
from strata_jax.config import DraftSettings, HiddenNorm
from strata_jax.errors import UsageError

if TYPE_CHECKING:  # usage waits for no numpy
    from strata_jax.engine.scripted_drafter import DraftScript

OFF = "off"
_DEFAULTS = DraftSettings()
_OTHERS = ("mtp_window", "mtp_norm", "draft_vocab")


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
        "a draft less probable than this ends a window's drafts; if not given, 0.5 on the CPU and 0.1 on a GPU, "
        "where a row more costs less",
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


def define_draft_layer(values: flags.FlagValues) -> None:
    """Defines which draft layer guesses ids, and how. Answers do not depend on these flags."""
    flags.DEFINE_string(
        "mtp",
        AUTO,
        "file that holds the draft layer (MTP); auto: the model's own, if it has one; off: none",
        flag_values=values,
    )
    define_number(
        values,
        "mtp_window",
        int,
        "positions that the draft layer remembers at least",
        default=_DEFAULTS.mtp_window,
        lower=64,
    )
    define_choice(
        values,
        "mtp_norm",
        list(get_args(HiddenNorm)),
        "what the root mean square of the draft layer's hidden norm spans: all residual streams, or each",
    )
    flags.DEFINE_string(
        "draft_vocab",
        None,
        "file of the ids that are drafted (tools/draft_vocab.py writes one); all if not given",
        flag_values=values,
    )


def script(value: str | None) -> "DraftScript | None":
    """The value of --draft_script.

    Raises:
        UsageError: if it is none.
    """
    from strata_jax.engine.scripted_drafter import DraftScript

    if value is None:
        return None
    percent, colon, path = value.partition(":")
    try:
        share = float(percent)
    except ValueError:
        share = -1.0
    if not (colon and path and 0 <= share <= 100):
        raise UsageError(f"--draft_script={value}: PERCENT:FILE expected, as in 50:answers.json")
    return DraftScript(path=user_path("draft_script", path), percent=share)


def draft_settings(values: flags.FlagValues) -> DraftSettings | None:
    """The settings; None if no draft layer is wanted.

    Raises:
        UsageError: for a draft layer's flag beside --mtp=off, and for a path that is none.
    """
    if values.mtp == OFF:
        given = [name for name in _OTHERS if not values[name].using_default_value]
        if given:
            raise UsageError(f"--{given[0]}: no effect beside --mtp=off; leave out one of them")
        return None
    return DraftSettings(
        mtp=None if values.mtp == AUTO else user_path("mtp", values.mtp),
        mtp_window=values.mtp_window,
        mtp_norm=values.mtp_norm,
        draft_vocab=(
            None if values.draft_vocab is None else user_path("draft_vocab", values.draft_vocab)
        ),
    )
