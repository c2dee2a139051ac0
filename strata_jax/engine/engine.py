"""Ids in, ids out: the map of the program.

A request's prompt is read in tiles, its last n mod 64 ids in windows; then each window reads the
id drawn last, with drafts of those that may follow, and gives the logits of the next
(`engine/generation.py`). The engine knows no text.
"""

import contextlib
from collections.abc import Callable

import jax

from strata_jax import _native
from strata_jax.engine.compile_cache import damage_removed, use_compile_cache
from strata_jax.engine.drafters import Drafters
from strata_jax.engine.generation import Generation
from strata_jax.engine.options import EngineOptions, choose_context, choose_index_budget, kv_notes
from strata_jax.engine.request import Request
from strata_jax.engine.runner import Runner, RunnerOptions
from strata_jax.engine.xla_errors import in_a_sentence
from strata_jax.errors import UsageError
from strata_jax.ops.native import Backend
from strata_jax.weights.pack import Pack
from strata_jax.weights.tier_needs import TierPlan


def _ignore(_: str) -> None:
    pass


class Engine:
    """One model, one request at a time."""

    def __init__(
        self,
        pack: Pack,
        runner: Runner,
        options: EngineOptions,
        drafters: Drafters,
        notes: tuple[str, ...],
    ):
        self.pack = pack
        self.notes = notes
        """One line for each choice a user may want to know of."""
        self.tile_rows = runner.tile_rows
        """Rows of a prompt tile; bits depend on them (contract C), so results name them."""
        self._runner = runner
        self._options = options
        self._drafters = drafters
        self._current: Generation | None = None

    @classmethod
    def open(
        cls, pack: Pack, options: EngineOptions, report: Callable[[str], None] = _ignore
    ) -> "Engine":
        """Loads and compiles; `report` gets a line for each phase.

        Raises:
            UsageError: for options out of range.
            CapacityError: if the model does not fit.
            BadFileError: for a file, of the model or another one, that cannot be used.
            StrataError: if this machine does not do what the options ask for.
            OSError: if `routing_out` cannot be written.
        """
        context, notes = choose_context(pack, options)
        config, budget_notes = choose_index_budget(pack.config, options.index_budget)
        drafters = Drafters.plan(pack, options, context)
        if options.threads is not None:
            _native.set_threads(options.threads)
        if options.cache_dir is not None:
            use_compile_cache(options.cache_dir)
        runner_options = RunnerOptions(
            max_context=context,
            window_rows=options.checked_rows(),
            chunk_tiles=options.prefill,
            chunk_lends=options.prefill_lends,
            prefill_timing=options.prefill_timing,
            kv=options.kv,
            all_logits=options.all_logits,
            tiers=options.tiers,
            backend=Backend(options.platform),
            drafts=drafters.any,
            residual=drafters.needs is not None,
            ring=drafters.follow,
            draft_needs=drafters.needs,
        )
        with damage_removed(options.cache_dir) as cache_notes:
            runner = Runner(pack, config, runner_options, report)
            try:
                drafters.open(pack, runner, report)
                if options.routing_out is not None:  # last: it empties what is there
                    runner.tiers.files.write_routing(options.routing_out)
            except BaseException as error:
                drafters.close()
                runner.close()
                if isinstance(error, jax.errors.JaxRuntimeError):
                    raise in_a_sentence(error, runner.tiers.plan) from error
                raise
        notes += (
            budget_notes
            + kv_notes(options.kv, options.platform)
            + runner.tiers.plan.notes
            + runner.notes
            + drafters.notes
            + tuple(cache_notes)
        )
        return cls(pack, runner, options, drafters, notes)

    @property
    def max_context(self) -> int:
        """Positions that prompt and answer may fill together."""
        return self._runner.options.max_context

    def start(self, request: Request, report: Callable[[int], None] | None = None) -> "Generation":
        """Begins a request; iterate the result for the ids. Ends any earlier one.

        Args:
            request: what to read and to answer.
            report: gets the number of prompt ids read, a chunk at a time.

        Raises:
            UsageError: if the prompt is empty, too long, or holds ids the model has not.
        """
        vocab = self.pack.config.vocab_size
        for place, token in enumerate(request.ids):
            if not 0 <= token < vocab:
                raise UsageError(
                    f"prompt: id {token} at place {place}, expected ids from 0 to {vocab - 1}"
                )
        if not request.ids:
            raise UsageError("prompt: no tokens, expected at least one")
        if len(request.ids) > self.max_context:
            raise UsageError(
                f"prompt: {len(request.ids)} tokens, at most {self.max_context} fit; shorten it or "
                f"raise --max_context"
            )
        if request.max_tokens < 0:
            raise UsageError(f"max_tokens: {request.max_tokens}, expected 0 or more")
        if request.max_repeats < 0:
            raise UsageError(f"max_repeats: {request.max_repeats}, expected 0 (any) or more")
        self._end_current()
        drafting = self._drafters.drafting
        self._current = Generation(self._runner, request, self._options, drafting, report)
        return self._current

    @property
    def kept(self) -> int:
        """Ids of a prompt whose reading was stopped that need not be read again, if it is asked for next."""
        left = self._runner.left
        return 0 if left is None else len(left) - 1

    @property
    def plan(self) -> TierPlan:
        """What was placed where, and what every memory has to hold."""
        return self._runner.tiers.plan

    def audit(self) -> list[str]:
        """Compares the bytes of every expert slot with the file; one line for each fault."""
        return self._runner.tiers.experts.audit()

    def take_warnings(self) -> list[str]:
        """What went wrong beside the answers and a user should know, one line each, told once."""
        return self._runner.tiers.files.take_warnings()

    def close(self) -> None:
        """Ends a request that runs and frees the device; the pack stays the caller's to close.

        Raises:
            StrataError: if a file that was asked for could not be written; all is closed then, too.
        """
        with contextlib.ExitStack() as closing:
            closing.callback(self._runner.close)
            closing.callback(self._drafters.close)
            self._end_current()

    def _end_current(self) -> None:
        if self._current is not None:
            self._current.cancel()
            self._current = None
