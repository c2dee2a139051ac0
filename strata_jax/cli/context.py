"""What a command gets beside its flags: its streams, Ctrl-C and the way to an engine.

The engine is known here by what commands use of it, so that they run against a fake in tests.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from absl import flags

from strata_jax.cli.devices import start_jax
from strata_jax.cli.interrupts import Interrupts
from strata_jax.cli.output import Output, Report

if TYPE_CHECKING:  # usage and plan wait for neither numpy nor the engine
    import numpy as np

    from strata_jax.engine.options import EngineOptions
    from strata_jax.engine.prefill_timing import PrefillTiming
    from strata_jax.engine.request import Request, Timings
    from strata_jax.weights.pack import Pack
    from strata_jax.weights.tier_needs import TierPlan


class Generation(Protocol):
    """An answer that is being written: an iterator of ids."""

    def __iter__(self) -> Iterator[int]: ...

    @property
    def finish_reason(self) -> str | None:
        """Why it ended: stop, length or cancelled."""
        ...

    @property
    def stuck_on(self) -> int | None:
        """The id that it repeated until it was ended."""
        ...

    @property
    def timings(self) -> "Timings":
        """How long its parts took."""
        ...

    @property
    def tier_counters(self) -> "dict[str, Any]":
        """What each tier did for it."""
        ...

    @property
    def windows(self) -> dict[int, int]:
        """How many windows had so many live rows."""
        ...

    @property
    def drafts(self) -> "dict[str, object] | None":
        """What became of drafts; None without a drafter."""
        ...

    @property
    def prefill_timing(self) -> "PrefillTiming | None":
        """Where the time of its prompt went, if that was asked for."""
        ...

    @property
    def ngram(self) -> "dict[str, object] | None":
        """How n-gram rows were read; None without a table."""
        ...

    @property
    def logits(self) -> "np.ndarray | None":
        """float32 [positions, V], if they were asked for."""
        ...

    def cancel(self) -> None:
        """Ends it; called between two ids."""
        ...


class Engine(Protocol):
    """A loaded model."""

    @property
    def max_context(self) -> int:
        """Tokens of prompt and answer together."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know, one line each."""
        ...

    @property
    def kept(self) -> int:
        """Ids of a prompt whose reading was stopped that need not be read again."""
        ...

    @property
    def plan(self) -> "TierPlan":
        """Where experts were placed, and what every memory has to hold."""
        ...

    @property
    def tile_rows(self) -> int:
        """Rows of a prompt tile."""
        ...

    def start(self, request: "Request", report: Callable[[int], None] | None = None) -> Generation:
        """Begins an answer; `report` hears how many prompt ids have been read.

        UsageError if the request cannot be answered.
        """
        ...

    def take_warnings(self) -> list[str]:
        """What went wrong beside the answers, one line each, told once."""
        ...

    def close(self) -> None:
        """Gives everything back; then StrataError if a file could not be written."""
        ...


OpenEngine = Callable[["Pack", "EngineOptions", Report], Engine]


def open_engine(pack: "Pack", options: "EngineOptions", report: Report) -> Engine:
    """Loads the model. StrataError if it cannot run here or does not fit."""
    plan = _check_fits(pack, options)
    # Free memory may be another number by the time the engine plans: the chunk is chosen here.
    options = dataclasses.replace(
        options, prefill=plan.steps.chunk_tiles, prefill_lends=plan.steps.lends
    )
    report("starting JAX")
    start_jax(options.platform, plan.xla_bytes)
    from strata_jax.engine.engine import Engine as RealEngine

    return RealEngine.open(pack, options, report)


def _check_fits(pack: "Pack", options: "EngineOptions") -> "TierPlan":
    """The engine plans, too, but JAX takes a second to start, and who has to choose waits."""
    from strata_jax.cli.plan import plan_of

    _, plan = plan_of(pack, options)
    plan.check()
    return plan


@dataclasses.dataclass(frozen=True, kw_only=True)
class Context:
    """The surroundings of one command."""

    output: Output
    interrupts: Interrupts
    stdin: TextIO | None
    open_engine: OpenEngine


class Command(Protocol):
    """What a module of a command offers."""

    SUMMARY: str

    def define(self, values: flags.FlagValues) -> None:
        """Defines the command's flags."""
        ...

    def run(self, values: flags.FlagValues, context: Context) -> int:
        """Does it; returns the exit code."""
        ...
