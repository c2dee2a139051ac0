"""The plan of the tiers as it is shown and checked: need and have of each, and what would fit."""

import dataclasses
from typing import Any

from strata_jax.config import NgramIo
from strata_jax.errors import CapacityError
from strata_jax.weights.budget import MIB, XLA_BYTES, StepSizes, shown
from strata_jax.weights.peer_prompts import PeerPart
from strata_jax.weights.placement import Placement, Tier
from strata_jax.weights.prompt_plan import PromptPlan

DRAFT_XLA = "draft cache"
"""The draft layer's part that XLA holds; its weights are not."""
_OF_XLA = ("kv", "state", "workspace", DRAFT_XLA)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Need:
    """What one memory has to hold."""

    name: str
    """primary, peer, host or locked."""
    parts: dict[str, int]
    """Bytes by what they are for, the fixed ones first."""
    have_bytes: int | None
    """None = not bounded."""
    bound_by: str
    """The flag or the fact that gives `have_bytes`."""
    most_bytes: int | None = None
    """Need beyond `have_bytes` still runs up to here (RAM in use now may be given up); None = no."""
    advice: tuple[str, ...] = ()
    """Flags with values that would make it fit."""

    @property
    def need_bytes(self) -> int:
        """All parts together."""
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        """Whether it runs at all."""
        most = self.have_bytes if self.most_bytes is None else self.most_bytes
        return most is None or self.need_bytes <= most

    def line(self) -> str:
        """Need and have for people."""
        parts = ", ".join(f"{name} {shown(size)}" for name, size in self.parts.items() if size)
        have, left = "no bound", ""
        if self.have_bytes is not None:
            have = f"have {shown(self.have_bytes)}"
            free = self.have_bytes - self.need_bytes
            left = f"; {shown(max(0, free))} stay free" if self.fits else "  DOES NOT FIT"
        text = f"{self.name:<10} need {shown(self.need_bytes)}, {have} ({self.bound_by}): {parts}"
        return f"{text}{left}"

    def problem(self) -> str:
        """Why it does not fit and what would."""
        assert self.have_bytes is not None, "what is not bounded fits"
        parts = ", ".join(f"{name} {shown(size)}" for name, size in self.parts.items() if size)
        advice = f"; {' or '.join(self.advice)} would fit" if self.advice else ""
        return (
            f"{self.name} needs {-(-self.need_bytes // MIB)} MiB ({parts}), at most "
            f"{self.have_bytes // MIB} MiB expected ({self.bound_by}){advice}"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TierPlan:
    """What goes where, before a byte is loaded."""

    needs: tuple[Need, ...]
    placement: Placement
    ngram_io: NgramIo | None
    """How the n-gram table is read; None without one."""
    steps: StepSizes
    """Sizes of the compiled programs, all of them chosen."""
    prompt: PromptPlan
    """What a GPU's prompts need beside a tile's workspace."""
    cache_is_on: bool
    """Whether the primary has slots for experts."""
    peer_is_on: bool
    peer_part: PeerPart | None
    """A GPU's peer in prompts; None without one."""
    primary_moves: bool
    """Whether experts there may change places, if the settings want it."""
    peer_moves: bool
    notes: tuple[str, ...]
    """What the user should know, one line each."""

    @property
    def ring_slots(self) -> int:
        """Slots of a GPU that prompts stream the host's experts through; 0 = none."""
        return self.prompt.ring_slots

    @property
    def fits(self) -> bool:
        """Whether every memory holds what it has to."""
        return all(need.fits for need in self.needs)

    @property
    def streams(self) -> bool:
        """Whether prompts wait for copies of experts."""
        return self.ring_slots > 0 or (self.peer_part is not None and self.peer_part.ring_slots > 0)

    @property
    def xla_bytes(self) -> int:
        """What XLA holds of the primary: caches, state and temporaries, with its own needs."""
        parts = next((need.parts for need in self.needs if need.name == "primary"), {})
        return sum(parts.get(name, 0) for name in _OF_XLA) + XLA_BYTES

    def check(self) -> None:
        """CapacityError naming every memory that is too small, need and have, and what would fit."""
        problems = [need.problem() for need in self.needs if not need.fits]
        if problems:
            raise CapacityError(f"plan: {'; '.join(problems)}")

    def to_json(self) -> dict[str, Any]:
        """The plan in dicts, lists, strings and numbers."""
        placed = self.placement
        needs = [
            {
                "name": need.name,
                "need_bytes": need.need_bytes,
                "have_bytes": need.have_bytes,
                "bound_by": need.bound_by,
                "parts": need.parts,
                "fits": need.fits,
                "advice": list(need.advice),
            }
            for need in self.needs
        ]
        return {
            "fits": self.fits,
            "chunk_tiles": self.steps.chunk_tiles,
            "chunk_rows": self.steps.chunk_rows,
            "ring_slots": self.ring_slots,
            "lent_bytes": self.prompt.lent_bytes,
            "peer_part": None if self.peer_part is None else self.peer_part.to_json(),
            "needs": needs,
            "cache_is_on": self.cache_is_on,
            "peer_is_on": self.peer_is_on,
            "placement": {
                tier.name.lower(): {
                    "experts": placed.count(tier),
                    "bytes": placed.total_bytes(tier),
                    "experts_by_layer": (placed.tiers == tier).sum(axis=1).tolist(),
                }
                for tier in Tier
            },
            "locked_bytes": placed.locked_bytes,
            "arena_bytes": {"primary": placed.primary_bytes, "peer": placed.peer_bytes},
            "notes": list(self.notes),
        }

    def table(self) -> str:
        """The plan for people."""
        placed = self.placement
        lines = [need.line() for need in self.needs]
        total = placed.tiers.size
        for tier in (Tier.PRIMARY, Tier.PEER, Tier.HOST, Tier.FILE):
            count = placed.count(tier)
            if count:
                size = shown(placed.total_bytes(tier))
                lines.append(
                    f"experts    {tier.name.lower():<8} {count} of {total} "
                    f"({100 * count / total:.0f} %), {size}"
                )
        return "\n".join([*lines, *self.notes])
