"""What a gate found: runs, differences, counters seen, and the verdict that follows from them."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from strata_jax.gate.compare import Difference, LogitsSummary
from strata_jax.gate.comparison import (
    AnyClaim,
    Claim,
    Comparison,
    DraftsSeen,
    LiveRows,
    Mode,
    Side,
)
from strata_jax.gate.facts import ModelFacts
from strata_jax.gate.prompts import Prompt

Verdict = Literal["identical", "not exercised", "differs", "failed"]
_WORST_LAST: tuple[Verdict, ...] = ("identical", "not exercised", "differs", "failed")
EXIT_CODES: Mapping[Verdict, int] = {"identical": 0, "not exercised": 5, "differs": 1, "failed": 1}
"""Source: design.md. A run that failed is told apart from one that differs in words."""
TIERS = ("primary", "peer", "stream", "host", "file")
COUNTERS = (
    *(f"entries_{tier}" for tier in TIERS),
    "entries_stream_frac",
    "swaps_primary",
    "swaps_peer",
    "bytes_swapped",
    "bytes_streamed",
    "peer_experts_streamed",
    "bytes_read",
    "waits_us",
)
"""Those of a request that can be added up over requests."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """One prompt's answer on one side."""

    prompt: Prompt
    result: Mapping[str, Any]
    """The object of `generate --json`."""
    lines: tuple[str, ...]
    """What `generate` said beside it."""
    seconds: float
    logits: LogitsSummary

    @property
    def ids(self) -> tuple[int, ...]:
        """The generated ids."""
        return tuple(self.result["ids"])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seen:
    """Something a side should have done, and what it did."""

    text: str
    found: int | str | None
    """None where nothing was reported."""
    holds: bool

    @classmethod
    def count(cls, claim: Claim, counters: Mapping[str, int]) -> "Seen":
        """Looks a sum up; what was not reported was not shown."""
        if any(name not in counters for name in claim.counters):
            return cls(text=claim.text, found=None, holds=False)
        count = sum(counters[name] for name in claim.counters)
        return cls(text=claim.text, found=count, holds=claim.holds(count))

    @classmethod
    def mode(cls, claim: Mode, results: Sequence[Mapping[str, Any]]) -> "Seen":
        """Looks a mode up, which must be the same in all results."""
        modes = {_look_up(result, claim.keys) for result in results}
        found = ", ".join(sorted(mode for mode in modes if mode is not None)) or None
        return cls(text=claim.text, found=found, holds=modes == {claim.value})

    @classmethod
    def live_rows(cls, claim: LiveRows, results: Sequence[Mapping[str, Any]]) -> "Seen":
        """Looks up how wide windows were, which must be the same in all results."""
        widest = {_widest_window(result) for result in results}
        known = {rows for rows in widest if rows is not None}
        found = ", ".join(map(str, sorted(known))) or None
        return cls(text=claim.text, found=found, holds=widest == {claim.rows})

    @classmethod
    def drafts(cls, claim: DraftsSeen, results: Sequence[Mapping[str, Any]]) -> "Seen":
        """Adds up what became of drafts; what one result does not report was not shown."""
        counts = [_drafts(result, claim.what) for result in results]
        known = [count for count in counts if count is not None]
        if len(known) < len(counts) or not counts:
            return cls(text=claim.text, found=None, holds=False)
        return cls(text=claim.text, found=sum(known), holds=claim.holds(sum(known)))

    @classmethod
    def of(
        cls,
        claim: AnyClaim,
        counters: Mapping[str, int],
        results: Sequence[Mapping[str, Any]],
    ) -> "Seen":
        """Looks up what a claim is about."""
        if isinstance(claim, Mode):
            return cls.mode(claim, results)
        if isinstance(claim, LiveRows):
            return cls.live_rows(claim, results)
        if isinstance(claim, DraftsSeen):
            return cls.drafts(claim, results)
        return cls.count(claim, counters)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SideRun:
    """One side's process."""

    side: Side
    flags: Mapping[str, str]
    """What all its requests have in common, the side's flags among it."""
    command: tuple[str, ...]
    pid: int | None
    answers: tuple[Answer, ...]
    failure: str | None = None
    """Why it has not answered everything."""
    differences: tuple[Difference, ...] = ()
    """From the reference."""
    seconds: float = 0.0

    @property
    def counters(self) -> dict[str, int]:
        """Tier counters summed over all requests; only those that every request reported."""
        tiers = [answer.result.get("tiers") or {} for answer in self.answers]
        return {
            name: sum(each[name] for each in tiers)
            for name in COUNTERS
            if tiers and all(isinstance(each.get(name), int) for each in tiers)
        }

    @property
    def shares(self) -> dict[str, float] | None:
        """Part of all routed entries by tier; None where that is not known, or nothing was routed."""
        counts = [self.counters.get(f"entries_{tier}") for tier in TIERS]
        known = [count for count in counts if count is not None]
        if len(known) < len(counts) or not sum(known):
            return None
        return {tier: count / sum(known) for tier, count in zip(TIERS, known)}

    @property
    def seen(self) -> tuple[Seen, ...]:
        """What had to be exercised: the side's claims, and that there was anything to compare."""
        counters = self.counters
        results = [answer.result for answer in self.answers]
        claims = tuple(Seen.of(claim, counters, results) for claim in self.side.claims)
        num_ids = sum(len(answer.ids) for answer in self.answers)
        empty = sum(answer.logits.rows_without_number for answer in self.answers)
        return (
            *claims,
            Seen(text="generated ids > 0", found=num_ids, holds=num_ids > 0),
            Seen(text="positions with nothing but NaN == 0", found=empty, holds=empty == 0),
        )

    @property
    def verdict(self) -> Verdict:
        """Of this side alone; a reference is identical to itself."""
        if self.failure is not None:
            return "failed"
        if self.differences:
            return "differs"
        return "identical" if all(each.holds for each in self.seen) else "not exercised"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """One comparison on one model."""

    comparison: Comparison
    facts: ModelFacts
    max_tokens: int
    prompts: tuple[Prompt, ...]
    runs: tuple[SideRun, ...]
    """The reference first; those behind a reference that failed are missing."""
    seconds: float

    @property
    def verdict(self) -> Verdict:
        """The worst of its sides."""
        return worst([run.verdict for run in self.runs])


def _look_up(result: Mapping[str, Any], keys: Sequence[str]) -> str | None:
    found: Any = result
    for key in keys:
        found = found.get(key) if isinstance(found, Mapping) else None
    return str(found) if isinstance(found, str | int) else None


def _widest_window(result: Mapping[str, Any]) -> int | None:
    """The most live rows that any window of a request had; None if that is not reported."""
    windows = result.get("windows")
    if not isinstance(windows, Mapping):
        return None
    counted = [rows for rows, count in windows.items() if isinstance(count, int) and count > 0]
    return max((int(rows) for rows in counted if str(rows).isdecimal()), default=None)


def _drafts(result: Mapping[str, Any], what: str) -> int | None:
    """Drafts of a request that were accepted, or looked at in vain; None if that is not reported."""
    drafts = result.get("drafts")
    if not isinstance(drafts, Mapping):
        return None
    accepted, steps = drafts.get("accepted"), drafts.get("steps")
    if not isinstance(accepted, int) or not isinstance(steps, list):
        return None
    return accepted if what == "accepted" else sum(each["looked_at"] for each in steps) - accepted


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    """The verdict of several."""
    return max(verdicts, key=_WORST_LAST.index)
