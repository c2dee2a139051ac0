"""What a runner opens before it compiles: matrices, where experts lie, and the n-gram table."""

import contextlib
from collections.abc import Callable
from typing import Any

from strata_jax.engine.runner_options import RunnerOptions
from strata_jax.engine.tiers import EngineTiers
from strata_jax.ops.sets import OpSet, native_ops
from strata_jax.weights.device_table import DeviceNgramTable, HostReadTable
from strata_jax.weights.experts import TIMEOUT_MS
from strata_jax.weights.matrices import fill_store
from strata_jax.weights.ngram_table import NgramTable
from strata_jax.weights.pack import Pack
from strata_jax.weights.tier_needs import TierPlan


class Parts:
    """Those of one runner."""

    def __init__(self, pack: Pack, options: RunnerOptions, report: Callable[[str], None]):
        """Opens all of them, or none.

        Raises:
            StrataError: if one of them cannot be had.
        """
        # On a device the tiers hold the matrices, too.
        self.store = None if options.backend.is_device else fill_store(pack)
        self.table: NgramTable | DeviceNgramTable | HostReadTable | None = None
        self._backend = options.backend
        self._last_report: dict[str, object] | None = None
        with contextlib.ExitStack() as opened:
            opened.callback(self._close_store)
            self.tiers = EngineTiers.open(
                pack,
                self.store,
                options.tiers,
                options.max_context,
                options.kv,
                options.step_sizes(),
                report,
                options.backend,
                options.draft_needs,
            )
            opened.callback(self.tiers.close)
            self.table = _open_table(pack, self.tiers.plan, options, report)
            opened.pop_all()
        self.notes = self.tiers.experts.notes + (() if self.table is None else self.table.notes)
        """What they are like, and what is not as asked for; one line each."""

    def ops(self) -> OpSet:
        """Ops over them."""
        return native_ops(
            self.tiers.experts.store if self.store is None else self.store.slot,
            tiers=self.tiers.experts.slot,
            table=-1 if self.table is None else self.table.slot,
            is_asked=isinstance(self.table, HostReadTable),
            backend=self._backend,
        )

    def answering(self) -> list[Any]:
        """Those whose threads steps wait for."""
        table = [self.table] if isinstance(self.table, HostReadTable) else []
        return [self.tiers.experts, *table]

    def table_report(self) -> dict[str, object] | None:
        """How n-gram rows are read, and the totals of the table so far; None without a table.

        After `close` it is what it was then.
        """
        if self.table is None:
            return self._last_report
        return {"mode": self.table.mode, **self.table.counters()}

    def close(self) -> None:
        """Lets go of all.

        Raises:
            StrataError: as `EngineTiers.close` does; all is closed then, too.
        """
        with contextlib.ExitStack() as closing:
            closing.callback(self._close_store)
            closing.callback(self._close_table)
            self.tiers.close()

    def _close_table(self) -> None:
        if self.table is not None:
            self._last_report = self.table_report()
            self.table.close()
            self.table = None

    def _close_store(self) -> None:
        if self.store is not None:
            self.store.close()


def _open_table(
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
