"""The presets of `strata-jax gate`; each compares its sides with its first one."""

import dataclasses
from collections.abc import Callable, Mapping

from strata_jax.config import LOOPBACK
from strata_jax.errors import UsageError
from strata_jax.gate.comparison import Comparison, LiveRows, Side
from strata_jax.gate.draft_sides import VARIED, draft_sides, ids_sides
from strata_jax.gate.facts import ModelFacts
from strata_jax.gate.prompt_presets import chunks, peer_attention, peer_prompts
from strata_jax.gate.tier_flags import (
    MISSES,
    PEER,
    PEER_DEVICE,
    PEER_SWAPS,
    PRIMARY,
    SWAPS,
    hectic,
    hectic_two_cards,
)
from strata_jax.gate.tier_presets import (
    hectic_preset,
    host_vs_gpu,
    pcie,
    ple_io,
    residency,
    single_vs_peer,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preset:
    """A named gate."""

    summary: str
    make: Callable[[ModelFacts], tuple[Comparison, ...]]
    needs_gpu: bool = False
    """Whether it is about something that only a GPU does."""


def _threads(facts: ModelFacts) -> tuple[Comparison, ...]:
    return (
        Comparison(
            name="threads",
            contract="T",
            varied=frozenset({"threads", "pool_workers"}),
            sides=tuple(
                Side(
                    name=f"{count} thread{'s' if count > 1 else ''}",
                    flags=hectic(facts) | {"threads": str(count), "pool_workers": str(count)},
                    claims=(PRIMARY, MISSES, SWAPS),
                )
                for count in (1, 2, 3)
            ),
        ),
    )


def _processes(facts: ModelFacts) -> tuple[Comparison, ...]:
    claims = (PRIMARY, PEER, MISSES, SWAPS, PEER_SWAPS)
    flags = hectic_two_cards(facts)
    return (
        Comparison(
            name="processes",
            contract="R",
            varied=frozenset({"compile_cache"}),
            sides=(
                Side(name="first process", flags=flags, claims=claims),
                Side(name="second process", flags=flags, claims=claims),
                # What the cache of compiled programs holds must be what is compiled now.
                Side(name="compiled anew", flags=flags | {"compile_cache": "off"}, claims=claims),
            ),
            needs_ranking=True,
        ),
    )


def _windows(facts: ModelFacts) -> tuple[Comparison, ...]:
    return (
        Comparison(
            name="windows",
            contract="W",
            varied=frozenset({"spec"}),
            sides=tuple(
                Side(
                    name=f"{rows} live row{'s' if rows > 1 else ''}",
                    flags=hectic(facts) | {"window_rows": "8", "spec": str(rows)},
                    claims=(LiveRows(rows), PRIMARY, MISSES, SWAPS),
                )
                for rows in range(1, 9)
            ),
        ),
    )


def _drafts(facts: ModelFacts) -> tuple[Comparison, ...]:
    flags = hectic(facts)
    return (
        Comparison(name="drafts", contract="W", varied=VARIED, sides=draft_sides(flags)),
        Comparison(
            name="drafts, ids alone",
            contract="W",
            varied=VARIED,
            sides=ids_sides(flags),
            ids_only=True,
        ),
    )


PRESETS: Mapping[str, Preset] = {
    "single-vs-peer": Preset(
        summary="N experts on one card, and the same N split over two; static, adapting, with drafts",
        make=single_vs_peer,
    ),
    "residency": Preset(
        summary="0, 25, 50 and 100 % of the experts on the primary, adapting, and from the file",
        make=residency,
    ),
    "host-vs-gpu": Preset(
        summary="experts in the host's memory, half of them and all on the primary; none moves",
        make=host_vs_gpu,
    ),
    "hectic": Preset(
        summary="all experts resident, and 3 slots a layer swapped after every window",
        make=hectic_preset,
    ),
    "pcie": Preset(summary="0, half and all of the misses streamed", make=pcie),
    "ple-io": Preset(summary="the n-gram table read in its three modes", make=ple_io),
    "threads": Preset(summary="1, 2 and 3 threads", make=_threads),
    "chunks": Preset(
        summary="1, 2 and 4 tiles of a prompt at once, experts streamed from RAM or the file, resident or "
        "read over the link",
        make=chunks,
    ),
    "peer-prompts": Preset(
        summary="prompts on one card and beside a peer that streams none, a part or all of the rest",
        make=peer_prompts,
        needs_gpu=True,
    ),
    "peer-attention": Preset(
        summary="prompts on one card and beside a peer that takes none, a quarter or half of the queries",
        make=peer_attention,
        needs_gpu=True,
    ),
    "processes": Preset(
        summary="the same command twice, and with programs compiled anew", make=_processes
    ),
    "windows": Preset(summary="1 to 8 live rows in a window of 8", make=_windows),
    "drafts": Preset(
        summary="no drafts, and 1 to 7 in a window, of which all, some or none come true",
        make=_drafts,
    ),
}
ALL = "all"
"""The name that stands for every preset."""


def comparisons(
    name: str, facts: ModelFacts, peer: str = LOOPBACK, *, on_gpu: bool = True
) -> tuple[tuple[Comparison, ...], tuple[str, ...]]:
    """What a preset compares for a model, and one line for each preset that `ALL` leaves out.

    Args:
        name: of the preset, or `ALL`.
        facts: of the model.
        peer: device of the peer, on the sides that have one.
        on_gpu: whether the sides run on a GPU.

    Raises:
        UsageError: if the model or the platform has not what the one preset is about.
    """
    if name != ALL:
        return tuple(_with_peer(each, peer) for each in _made(name, facts, on_gpu)), ()
    chosen: list[Comparison] = []
    notes = []
    for each in PRESETS:
        try:
            chosen += _made(each, facts, on_gpu)
        except UsageError as error:
            notes.append(f"left out: {error}")
    return tuple(_with_peer(each, peer) for each in chosen), tuple(notes)


def _made(name: str, facts: ModelFacts, on_gpu: bool) -> tuple[Comparison, ...]:
    preset = PRESETS[name]
    if preset.needs_gpu and not on_gpu:
        raise UsageError(f"gate: --preset={name} is about a GPU; --platform=cuda runs it on one")
    return preset.make(facts)


def _with_peer(comparison: Comparison, peer: str) -> Comparison:
    sides = tuple(
        dataclasses.replace(side, flags={**side.flags, PEER_DEVICE: peer})
        if PEER_DEVICE in side.flags
        else side
        for side in comparison.sides
    )
    return dataclasses.replace(comparison, sides=sides)
