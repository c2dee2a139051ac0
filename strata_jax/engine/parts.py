"""What a runner opens before it compiles: where experts lie, and the n-gram table."""

from collections.abc import Callable

from strata_jax import _native
from strata_jax.engine.runner_options import RunnerOptions
from strata_jax.engine.tiers import EngineTiers
from strata_jax.weights.device_table import DeviceNgramTable, HostReadTable
from strata_jax.weights.experts import TIMEOUT_MS
from strata_jax.weights.ngram_table import NgramTable
from strata_jax.weights.pack import Pack
from strata_jax.weights.tier_needs import TierPlan


def open_tiers(
    pack: Pack,
    store: _native.WeightStore | None,
    options: RunnerOptions,
    report: Callable[[str], None],
) -> EngineTiers:
    """The tiers, planned for a runner of these options; see `EngineTiers.open`."""
    return EngineTiers.open(
        pack,
        store,
        options.tiers,
        options.max_context,
        options.kv,
        options.step_sizes(),
        report,
        options.backend,
        options.draft_needs,
    )


def open_table(
    pack: Pack, plan: TierPlan, options: RunnerOptions, report: Callable[[str], None]
) -> NgramTable | DeviceNgramTable | HostReadTable | None:
    """The table where the runner's ops read it; None if the model has none.

    Raises:
        StrataError: if it cannot be had.
    """
    mode = plan.ngram_io
    if mode is None:
        return None
    if not options.backend.is_device:
        return NgramTable(pack, mode, report)
    if mode == "ram":
        return DeviceNgramTable(pack, options.backend, report)
    tokens = max(plan.steps.chunk_rows, options.window_rows)
    return HostReadTable(
        pack, mode, options.backend, report, most_tokens=tokens, timeout_ms=TIMEOUT_MS
    )
