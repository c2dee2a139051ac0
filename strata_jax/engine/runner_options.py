"""What the programs of a runner are made for."""

import dataclasses

from strata_jax.config import MOST_DRAFTS, TILE_ROWS, KvType, TierSettings
from strata_jax.ops.native import CPU, Backend
from strata_jax.weights.budget import StepSizes
from strata_jax.weights.draft_needs import DraftNeeds


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunnerOptions:
    """Sizes that are part of the compiled programs."""

    max_context: int
    """Positions the cache holds."""
    window_rows: int = 8
    """Width of the window program; a row's bits do not depend on it."""
    chunk_tiles: int | None = None
    """Tiles of the largest program; None = what the plan chooses. Results do not depend on it."""
    chunk_lends: bool | None = None
    """Whether its experts are computed in borrowed slots; None = what the plan chooses."""
    prefill_timing: bool = False
    """Whether a device's programs for prompts mark when their parts begin."""
    kv: KvType = "fp16"
    """How keys and values are cached."""
    all_logits: bool = False
    """Tiles give the logits of every row, not of the last one only."""
    tiers: TierSettings = dataclasses.field(default_factory=TierSettings)
    """Where experts lie and how they move; results do not depend on it."""
    backend: Backend = CPU
    """Whose kernels run."""
    drafts: bool = False
    """Windows may hold drafts."""
    residual: bool = False
    """Steps give the residual of their rows, which a drafter reads."""
    ring: bool = False
    """Windows leave their residuals in one array of several windows' rows: for a drafter that follows them
    on the device, and for which arrays of many windows would be too many."""
    draft_needs: DraftNeeds | None = None
    """What the drafter takes of the memory."""

    @property
    def most_drafts(self) -> int:
        """Rows of a window that may be drafts."""
        return min(self.window_rows - 1, MOST_DRAFTS)

    def step_sizes(self) -> StepSizes:
        """Sizes of the programs, for plans."""
        tiles = self.chunk_tiles
        if tiles is None and self.backend.name == "emulated":
            tiles = 1  # it has no speed
        return StepSizes(
            tile_rows=TILE_ROWS[self.backend.platform],
            window_rows=self.window_rows,
            all_logits=self.all_logits,
            chunk_tiles=tiles,
            lends=self.chunk_lends,
        )
