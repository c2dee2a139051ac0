"""`strata-jax plan`: what a model file holds and needs, from its headers alone."""

from absl import flags

from strata_jax.cli import flags as cli_flags
from strata_jax.cli.context import Context

SUMMARY = "lists tensors, types and bytes by tier, from the file's headers alone"


def define(values: flags.FlagValues) -> None:
    """Defines the command's flags."""
    cli_flags.define_model(values)
    cli_flags.define_max_context(values)
    flags.DEFINE_boolean("json", False, "prints one JSON object", flag_values=values)


def run(values: flags.FlagValues, context: Context) -> int:
    """Prints the plan; its table ends with what is odd about the file."""
    from strata_jax.cli.files import model_path
    from strata_jax.weights.pack import open_pack
    from strata_jax.weights.plan import make_plan

    with open_pack(model_path(values)) as pack:
        plan = make_plan(pack, values.max_context)
    if values.json:
        context.output.json(plan.to_json())
    else:
        context.output.text(plan.table() + "\n")
    return 0
