"""What is compared: sides that must agree, what is promised of them, and what they must have done.

A side is a set of flags of `generate`; flags it does not name are at their defaults. `varied` lists the
flags in which sides may differ: a gate whose sides differ in anything else compares two things at once.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

Contract = Literal["T", "W", "C", "R"]
PROMISES: Mapping[Contract, str] = {
    "T": "placement invariance: an expert's row has the same bits on the primary, the peer, streamed "
    "and on the host, alone or grouped, while experts move, for any number of threads; rows of the "
    "n-gram table are the file's bytes however they are read",
    "W": "window invariance: a row's bits depend neither on the other rows of its window nor on its "
    "place, so neither the number of live rows nor drafts, whatever becomes of them, change anything",
    "C": "chunk and cache invariance: state and logits follow from the ids and from which of them tiles "
    "and windows read, not from how many tiles are read at once, nor how their experts are fetched",
    "R": "reproducible runs: the same command, file and seed give the same ids in every process",
}
"""What is promised, by the letter of design.md."""


@dataclasses.dataclass(frozen=True)
class Claim:
    """Something a side must have done, told from its counters summed over all requests."""

    counters: tuple[str, ...]
    relation: Literal["> 0", "== 0"] = "> 0"

    @property
    def text(self) -> str:
        """The claim as a formula."""
        return f"{' + '.join(self.counters)} {self.relation}"

    def holds(self, count: int) -> bool:
        """Whether the sum of the counters is what is claimed."""
        return count > 0 if self.relation == "> 0" else count == 0


@dataclasses.dataclass(frozen=True)
class Mode:
    """Something a side must have been in, told from every result."""

    keys: tuple[str, ...]
    """Where it stands in the object of `generate --json`."""
    value: str

    @property
    def text(self) -> str:
        """The claim as a formula."""
        return f"{'.'.join(self.keys)} == {self.value}"


@dataclasses.dataclass(frozen=True)
class LiveRows:
    """Live rows that the widest windows of every request must have had, told from every result."""

    rows: int

    @property
    def text(self) -> str:
        """The claim as a formula."""
        return f"live rows of the widest window == {self.rows}"


@dataclasses.dataclass(frozen=True)
class DraftsSeen:
    """What must have become of some drafts, or of none, told from all results together."""

    what: Literal["accepted", "rejected"]
    relation: Literal["> 0", "== 0"] = "> 0"

    @property
    def text(self) -> str:
        """The claim as a formula."""
        return f"drafts {self.what} {self.relation}"

    def holds(self, count: int) -> bool:
        """Whether so many are what is claimed."""
        return count > 0 if self.relation == "> 0" else count == 0


AnyClaim = Claim | Mode | LiveRows | DraftsSeen


@dataclasses.dataclass(frozen=True, kw_only=True)
class Side:
    """One configuration."""

    name: str
    flags: Mapping[str, str]
    claims: tuple[AnyClaim, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """Sides that must give the same bits; the first is what the others are compared with."""

    name: str
    contract: Contract
    varied: frozenset[str]
    """Flags in which the sides may differ."""
    sides: tuple[Side, ...]
    needs_ranking: bool = False
    """All sides are filled by a ranking in rounds over the layers, so that the peer holds some
    experts of each layer; without one it takes whole layers, where nothing is left to swap in."""
    ids_only: bool = False
    """Nobody asks for logits: a device then finds ids by itself, on another way than with them."""

    def __post_init__(self) -> None:
        assert len({side.name for side in self.sides}) == len(self.sides) > 1, self.name
        stray = differing_flags([side.flags for side in self.sides]) - self.varied
        assert not stray, f"{self.name}: {stray} are not meant to vary"


def differing_flags(flags: Sequence[Mapping[str, str]]) -> frozenset[str]:
    """Names that are not in all of the mappings, or not with one value."""
    names = {name for each in flags for name in each}
    return frozenset(name for name in names if len({each.get(name) for each in flags}) > 1)
