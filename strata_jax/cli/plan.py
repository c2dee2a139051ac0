"""`strata-jax plan`: what a model holds and needs, and where it would go, from headers alone."""

from typing import TYPE_CHECKING

from absl import flags

from strata_jax.cli import draft_flags, tier_flags
from strata_jax.cli import flags as cli_flags
from strata_jax.cli.context import Context

if TYPE_CHECKING:
    from strata_jax.config import DraftSettings, Platform, TierSettings
    from strata_jax.engine.options import EngineOptions
    from strata_jax.weights.budget import StepSizes
    from strata_jax.weights.pack import Pack
    from strata_jax.weights.plan import Plan
    from strata_jax.weights.tier_needs import TierPlan

SUMMARY = "lists tensors, bytes and tiers, what fits and what would, from headers alone"


def define(values: flags.FlagValues) -> None:
    """Defines the command's flags."""
    cli_flags.define_model(values)
    cli_flags.define_choice(
        values, "platform", ["auto", "cpu", "cuda"], "where the model would run, as of generate"
    )
    cli_flags.define_max_context(values)
    cli_flags.define_kv(values)
    cli_flags.define_number(
        values, "window_rows", int, "rows of a decoding window, as of generate", lower=1
    )
    cli_flags.define_prefill(values)
    tier_flags.define_tiers(values)
    draft_flags.define_draft_layer(values)
    flags.DEFINE_boolean("json", False, "prints one JSON object", flag_values=values)


def run(values: flags.FlagValues, context: Context) -> int:
    """Prints the plan; its table ends with what is odd about the file and the settings.

    Raises:
        CapacityError: after the plan, if it does not fit; the message says what would.
    """
    from strata_jax.cli.devices import choose_platform, nvidia_devices
    from strata_jax.cli.files import model_path
    from strata_jax.engine.options import EngineOptions, choose_context
    from strata_jax.weights.pack import open_pack

    options = EngineOptions(
        max_context=values.max_context,
        window_rows=values.window_rows,
        kv=values.kv,
        prefill=None if values.prefill == cli_flags.AUTO else values.prefill,
        tiers=tier_flags.tier_settings(values),
        mtp=draft_flags.draft_settings(values),
        platform=choose_platform(values.platform, nvidia_devices()).platform,
    )
    with open_pack(model_path(values)) as pack:
        for line in choose_context(pack, options)[1]:
            context.output.note(line)
        plan, tiers = plan_of(pack, options)
    if values.json:
        context.output.json({**plan.to_json(), "memory": tiers.to_json()})
    else:
        context.output.text(f"{plan.table()}\n\n{tiers.table()}\n")
    tiers.check()
    return 0


def plan_of(pack: "Pack", options: "EngineOptions") -> tuple["Plan", "TierPlan"]:
    """What an engine of these options would plan on this machine as it is now.

    Raises:
        UsageError: for options that the engine would refuse.
        BadFileError: for a profile or a draft layer that cannot be used.
    """
    from strata_jax.engine.options import choose_context
    from strata_jax.weights.plan import make_plan

    steps, drafts = options.step_sizes(), options.draft_settings()
    sizes = make_plan(pack, choose_context(pack, options)[0], options.kv)
    return sizes, plan_here(pack, sizes, options.tiers, steps, options.platform, drafts)


def plan_here(
    pack: "Pack",
    sizes: "Plan",
    settings: "TierSettings",
    steps: "StepSizes",
    platform: "Platform",
    drafts: "DraftSettings | None" = None,
) -> "TierPlan":
    """Where a model's experts would go on this machine as it is now; `drafts` of its draft layer.

    Raises:
        UsageError, BadFileError: for a device that is not there, a profile that cannot be used.
    """
    from strata_jax.cli.devices import cuda_machine
    from strata_jax.weights.budget import host_memory
    from strata_jax.weights.draft_needs import draft_needs
    from strata_jax.weights.profile import load_profile
    from strata_jax.weights.tier_plan import Machine, plan_tiers

    if platform == "cpu":
        machine = Machine(platform="cpu", host=host_memory())
    else:
        machine = cuda_machine(settings)
    profile = load_profile(pack, settings.expert_profile)
    draft = draft_needs(pack, drafts, sizes.max_context, sizes.kv, steps, platform)
    return plan_tiers(pack, sizes, settings, machine, steps=steps, profile=profile, draft=draft)
