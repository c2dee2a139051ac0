"""`strata-jax chat`: a conversation in the terminal, or line by line through a pipe."""

from absl import flags

from strata_jax.cli import flags as cli_flags
from strata_jax.cli.context import Context
from strata_jax.cli.draft_flags import define_draft_layer, define_drafts
from strata_jax.cli.tier_flags import define_tiers

SUMMARY = "talks with the model in the terminal; through a pipe every line is a turn"


def define(values: flags.FlagValues) -> None:
    """Defines the command's flags."""
    cli_flags.define_model(values)
    cli_flags.define_answer(values)
    cli_flags.define_number(
        values,
        "max_tokens",
        int,
        "longest answer; what the context leaves if not given",
        lower=1,
    )
    cli_flags.define_sampling(values)
    cli_flags.define_engine(values)
    define_drafts(values)
    define_draft_layer(values)
    define_tiers(values)


def run(values: flags.FlagValues, context: Context) -> int:
    """Talks until /exit or the end of the input."""
    from strata_jax.cli import conversation, session

    output = context.output
    platform = session.check_platform(values, output)
    with session.opened_pack(values, output) as pack:
        talk = conversation.Conversation.of(values, pack)
        with session.running_engine(pack, values, context, platform) as engine:
            return conversation.Terminal(context, engine, talk).run()
