"""What a caller may choose about an engine, and what it makes of that. Needs no jax."""

import dataclasses
from pathlib import Path

from strata_jax.config import (
    MAX_CONTEXT,
    MOST_DRAFTS,
    TILE_ROWS,
    DraftSettings,
    KvType,
    ModelConfig,
    Platform,
    TierSettings,
)
from strata_jax.engine.scripted_drafter import DraftScript
from strata_jax.errors import UsageError
from strata_jax.weights.budget import StepSizes
from strata_jax.weights.pack import Pack
from strata_jax.weights.plan import DEFAULT_CONTEXT

DEFAULT_WINDOW_ROWS = 8
DEFAULT_LIVE_ROWS = 4
"""Of a window with drafts."""
DEFAULT_MIN_P: dict[Platform, float] = {"cpu": 0.5, "cuda": 0.1}
"""What a row costs beside an id: a third to a half on the CPU, a tenth to a fifth on a GPU."""
MAX_WINDOW_ROWS = 64
MAX_CHUNK_TILES = 64
_MAX_THREADS = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What a caller may choose about an engine."""

    max_context: int | None = None
    """Positions of the cache; None = the smaller of the file's and 8192."""
    threads: int | None = None
    """Threads of the native ops, for the whole process; None = as they are, at first one per core."""
    window_rows: int | None = None
    """Rows of a window; None = 8. Answers do not depend on it."""
    index_budget: int | None = None
    """Tokens a query may attend to beside the newest ones; None = what the file says."""
    kv: KvType = "fp16"
    """How keys and values are cached. Answers depend on it."""
    all_logits: bool = False
    """Keep the logits of every position read."""
    cache_dir: Path | None = None
    """Where compiled programs are kept between runs; None = where jax's own settings say."""
    spec: int | None = None
    """Most live rows of a window; None = all of its rows for known text, 4 for drafts."""
    spec_min_p: float | None = None
    """A draft less probable than this is not tried, nor those after it; None = `DEFAULT_MIN_P`."""
    suffix_draft: int = 0
    """Ids that must agree for a draft to be looked up in the text so far; 0 = no such drafts."""
    mtp: DraftSettings | None = None
    """How the draft layer drafts, if there is one; None = it does not."""
    draft_script: DraftScript | None = None
    """Drafts for gates and measurements."""
    prefill: int | None = None
    """Tiles of a chunk, the most of a prompt that one program reads; None = one on the CPU, on a GPU
    up to 8192 rows as its memory allows. Answers do not depend on it."""
    prefill_lends: bool | None = None
    """Whether a chunk's experts are computed in borrowed slots; None = what the plan chooses."""
    prefill_timing: bool = False
    """Tell where the time of each prompt went; programs for prompts are other ones then, answers are not."""
    tiers: TierSettings = dataclasses.field(default_factory=TierSettings)
    """Where experts lie and how they move. Answers do not depend on it."""
    platform: Platform = "cpu"
    """Where it runs."""
    routing_out: Path | None = None
    """Where the routed ids of every step are written (`weights/routing.py`), on the CPU; None = nowhere."""

    def __post_init__(self) -> None:
        if self.routing_out is not None and self.platform != "cpu":
            raise UsageError(
                "--routing_out: not available on a GPU, whose steps tell nobody what they routed; "
                "--platform=cpu records it"
            )

    def checked_rows(self) -> int:
        """Rows of a window.

        Raises:
            UsageError: for rows, live rows, tiles or threads out of range.
        """
        rows = DEFAULT_WINDOW_ROWS if self.window_rows is None else self.window_rows
        if not 1 <= rows <= MAX_WINDOW_ROWS:
            raise UsageError(f"window_rows: {rows}, expected 1 to {MAX_WINDOW_ROWS}")
        if self.spec is not None and not 1 <= self.spec <= rows:
            raise UsageError(f"spec: {self.spec}, expected 1 to window_rows, which is {rows}")
        if self.threads is not None and not 1 <= self.threads <= _MAX_THREADS:
            raise UsageError(f"threads: {self.threads}, expected 1 to {_MAX_THREADS}")
        if self.prefill is not None and not 1 <= self.prefill <= MAX_CHUNK_TILES:
            raise UsageError(f"prefill: {self.prefill} tiles, expected 1 to {MAX_CHUNK_TILES}")
        return rows

    def most_drafts(self) -> int:
        """Drafts of a window, if somebody drafts.

        Raises:
            UsageError: for settings of drafts that are out of range.
        """
        if not 0 <= self.min_probability <= 1:
            raise UsageError(f"spec_min_p: {self.spec_min_p}, expected 0 to 1")
        if self.suffix_draft < 0:
            raise UsageError(f"suffix_draft: {self.suffix_draft}, expected 0 (none) or more")
        live = DEFAULT_LIVE_ROWS if self.spec is None else self.spec
        return min(live, self.checked_rows(), MOST_DRAFTS + 1) - 1

    @property
    def min_probability(self) -> float:
        """`spec_min_p`, or what stands for it."""
        return DEFAULT_MIN_P[self.platform] if self.spec_min_p is None else self.spec_min_p

    def step_sizes(self) -> StepSizes:
        """Sizes of the compiled programs, for plans.

        Raises:
            UsageError: as `checked_rows` does.
        """
        return StepSizes(
            tile_rows=TILE_ROWS[self.platform],
            window_rows=self.checked_rows(),
            all_logits=self.all_logits,
            chunk_tiles=self.prefill,
            lends=self.prefill_lends,
        )

    def draft_settings(self) -> DraftSettings | None:
        """Of the draft layer; None where it has nothing to do.

        Raises:
            UsageError: as `most_drafts` does.
        """
        most = self.most_drafts()
        if self.mtp is None or most == 0 or self.draft_script is not None:
            return None
        return dataclasses.replace(self.mtp, most=most, min_probability=self.min_probability)


def choose_context(pack: Pack, options: EngineOptions) -> tuple[int, tuple[str, ...]]:
    """Positions of the cache, and what to note about them.

    Raises:
        UsageError: for a number out of range.
    """
    trained = pack.config.context_length
    if options.max_context is None:
        return min(trained, DEFAULT_CONTEXT), ()
    if not 1 <= options.max_context <= MAX_CONTEXT:
        raise UsageError(f"max_context: {options.max_context}, expected 1 to {MAX_CONTEXT}")
    if options.max_context > trained:
        note = f"max_context: {options.max_context} is more than the file's {trained}; kept"
        return options.max_context, (note,)
    return options.max_context, ()


def choose_index_budget(
    config: ModelConfig, budget: int | None
) -> tuple[ModelConfig, tuple[str, ...]]:
    """The model's settings with the budget asked for, and what to note about it.

    Raises:
        UsageError: for a budget that the file's blocks do not make up, or that it has not.
    """
    if budget is None:
        return config, ()
    if config.index_budget == 0:
        raise UsageError(
            f"index_budget: {budget}, but the file attends to every token and has no budget; leave "
            "it out"
        )
    if not 0 < budget <= MAX_CONTEXT or budget % config.index_ratio:
        raise UsageError(
            f"index_budget: {budget}, expected a positive multiple of {config.index_ratio}, the "
            f"tokens of one block of this file, and at most {MAX_CONTEXT}"
        )
    note = f"index_budget: {budget} tokens in force, the file says {config.index_budget}"
    return dataclasses.replace(config, index_budget=budget), (note,)


def kv_notes(kv: KvType, platform: Platform) -> tuple[str, ...]:
    """What to note about the type of the cache."""
    if kv == "f32" and platform == "cuda":
        return (
            "kv: f32 keys and values do not go through matrix units, so attention of prompts takes "
            "several times longer; --kv=fp16 (the default) avoids that",
        )
    if kv != "int8":
        return ()
    return (
        "kv: int8 rounds cached keys and values to 1/254 of the largest of 64 values, which changes "
        "answers a little; --kv=fp16 rounds to 1/2048 of each",
    )
