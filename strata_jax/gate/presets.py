"""The presets of `strata-jax gate`; each compares its sides with its first one."""

import dataclasses
from collections.abc import Callable, Mapping

from strata_jax.config import LOOPBACK, TILE_ROWS
from strata_jax.errors import UsageError
from strata_jax.gate.comparison import AnyClaim, Claim, Comparison, LiveRows, Mode, Side
from strata_jax.gate.draft_sides import VARIED, draft_sides, ids_sides, scripted
from strata_jax.gate.facts import ModelFacts

_MISSES = ("entries_stream", "entries_host", "entries_file")
_FROZEN = {"adapt_swaps": "0"}
_HECTIC = {"adapt_every": "1", "adapt_swaps": "8"}
_HECTIC_SLOTS = 3


PRIMARY = Claim(("entries_primary",))
PEER = Claim(("entries_peer",))
MISSES = Claim(_MISSES)
NO_MISSES = Claim(_MISSES, "== 0")
STREAM = Claim(("entries_stream",))
NO_STREAM = Claim(("entries_stream",), "== 0")
HOST = Claim(("entries_host",))
NO_HOST = Claim(("entries_host",), "== 0")
FILE = Claim(("entries_file",))
SWAPS = Claim(("swaps_primary",))
PEER_STREAM = Claim(("peer_experts_streamed",))
NO_PEER_STREAM = Claim(("peer_experts_streamed",), "== 0")
PEER_SWAPS = Claim(("swaps_peer",))
FROZEN = Claim(("swaps_primary", "swaps_peer"), "== 0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preset:
    """A named gate."""

    summary: str
    make: Callable[[ModelFacts], tuple[Comparison, ...]]
    needs_gpu: bool = False
    """Whether it is about something that only a GPU does."""


def _hectic_slots(facts: ModelFacts) -> int:
    """Three slots a layer, or fewer so that two experts are left: to swap in, to split misses."""
    return facts.layers * max(1, min(_HECTIC_SLOTS, facts.experts - 2))


def _hectic(facts: ModelFacts) -> dict[str, str]:
    return {"expert_cache": str(_hectic_slots(facts)), **_HECTIC}


def _hectic_two_cards(facts: ModelFacts) -> dict[str, str]:
    """As many experts, a third of them on the peer."""
    slots = _hectic_slots(facts)
    return _HECTIC | _two_cards(slots, slots // 3)


def _two_cards(slots: int, on_peer: int) -> dict[str, str]:
    """A peer on the primary's device does all that one on a second device does."""
    return {
        "expert_cache": str(slots - on_peer),
        "peer_device": LOOPBACK,
        "peer_slots": str(on_peer),
    }


_CARDS = frozenset({"expert_cache", "peer_device", "peer_slots"})
PEER_DEVICE = "peer_device"
"""A shared flag that is for the sides with a peer only: where their peer is."""


def _single_vs_peer(facts: ModelFacts) -> tuple[Comparison, ...]:
    half = facts.total_experts // 2
    return (
        Comparison(
            name="single-vs-peer, static",
            contract="T",
            varied=_CARDS,
            sides=(
                Side(
                    name="one card",
                    flags={"expert_cache": str(half), **_FROZEN},
                    claims=(PRIMARY, MISSES, FROZEN),
                ),
                Side(
                    name="two cards",
                    flags=_two_cards(half, half // 2) | _FROZEN,
                    claims=(PRIMARY, PEER, MISSES, FROZEN),
                ),
            ),
        ),
        Comparison(
            name="single-vs-peer, adapting",
            contract="T",
            varied=_CARDS,
            sides=(
                Side(name="one card", flags=_hectic(facts), claims=(PRIMARY, MISSES, SWAPS)),
                Side(
                    name="two cards",
                    flags=_hectic_two_cards(facts),
                    claims=(PRIMARY, PEER, MISSES, SWAPS, PEER_SWAPS),
                ),
            ),
            needs_ranking=True,
        ),
        _peer_drafts(facts),
    )


def _peer_drafts(facts: ModelFacts) -> Comparison:
    """Adapting with drafts: what the model's own layer proposes, and beside a peer what a script does."""
    drafts = {"window_rows": "8", "spec": "4"}
    one = Side(
        name="one card", flags=_hectic(facts) | drafts, claims=(PRIMARY, MISSES, LiveRows(4))
    )
    two = [scripted(_hectic_two_cards(facts) | drafts, 4, percent) for percent in (50, 100)]
    return Comparison(
        name="single-vs-peer, drafts",
        contract="W",
        varied=_CARDS | {"draft_script"},
        sides=(
            one,
            *(
                dataclasses.replace(
                    side, name=f"two cards, {side.name}", claims=(PRIMARY, PEER, *side.claims)
                )
                for side in two
            ),
        ),
        needs_ranking=True,
    )


def _residency(facts: ModelFacts) -> tuple[Comparison, ...]:
    total = facts.total_experts
    quarter, half = {"expert_cache": str(total // 4)}, {"expert_cache": str(total // 2)}
    partly = (PRIMARY, MISSES, SWAPS)
    # Some stay in RAM: a GPU swaps with those only.
    budget = {"resident_budget_gib": f"{facts.file_bytes / 16 / 2**30:.7f}"}
    from_file = {**quarter, **budget}
    sides = (
        Side(name="0 %", flags={"expert_cache": "0"}, claims=(MISSES,)),
        Side(name="25 %", flags=quarter | _HECTIC, claims=partly),
        Side(name="50 %", flags=half | _HECTIC, claims=partly),
        Side(name="100 %", flags={"expert_cache": str(total)}, claims=(PRIMARY, NO_MISSES)),
        Side(name="25 % and file", flags=from_file | _HECTIC, claims=(PRIMARY, FILE, SWAPS)),
    )
    return (
        Comparison(
            name="residency",
            contract="T",
            varied=frozenset({"expert_cache", "resident_budget_gib", *_HECTIC}),
            sides=sides,
        ),
    )


def _host_vs_gpu(facts: ModelFacts) -> tuple[Comparison, ...]:
    total = facts.total_experts
    sides = (
        Side(name="host", flags={"expert_cache": "0"}, claims=(MISSES,)),
        Side(name="half", flags={"expert_cache": str(total // 2)}, claims=(PRIMARY, MISSES)),
        Side(name="device", flags={"expert_cache": str(total)}, claims=(PRIMARY, NO_MISSES)),
    )
    frozen = tuple(dataclasses.replace(s, flags={**s.flags, **_FROZEN}) for s in sides)
    return (
        Comparison(
            name="host-vs-gpu",
            contract="T",
            varied=frozenset({"expert_cache"}),
            sides=frozen,
        ),
    )


def _hectic_preset(facts: ModelFacts) -> tuple[Comparison, ...]:
    resident = {"expert_cache": str(facts.total_experts), **_FROZEN}
    streamed = _hectic_two_cards(facts) | {"pcie_frac": "0.5"}
    two_cards = (PRIMARY, PEER, SWAPS, PEER_SWAPS)
    return (
        Comparison(
            name="hectic",
            contract="T",
            varied=_CARDS | {"pcie_frac", *_HECTIC},
            sides=(
                Side(name="resident", flags=resident, claims=(PRIMARY, NO_MISSES, FROZEN)),
                Side(name="hectic", flags=_hectic(facts), claims=(PRIMARY, MISSES, SWAPS)),
                Side(
                    name="hectic, two cards",
                    flags=_hectic_two_cards(facts),
                    claims=(*two_cards, MISSES),
                ),
                Side(
                    name="hectic, all tiers",
                    flags=streamed,
                    claims=(*two_cards, STREAM, HOST),
                ),
            ),
            needs_ranking=True,
        ),
    )


def _pcie(facts: ModelFacts) -> tuple[Comparison, ...]:
    claims = {"0": (HOST, NO_STREAM), "0.5": (HOST, STREAM), "1": (STREAM, NO_HOST)}
    return (
        Comparison(
            name="pcie",
            contract="T",
            varied=frozenset({"pcie_frac"}),
            sides=tuple(
                Side(
                    name=f"share {share}",
                    flags=_hectic(facts) | {"pcie_frac": share},
                    claims=(*done, SWAPS),
                )
                for share, done in claims.items()
            ),
        ),
    )


def _ple_io(facts: ModelFacts) -> tuple[Comparison, ...]:
    if not facts.has_ngram_table:
        raise UsageError(
            f"gate: {facts.path} has no n-gram table, --preset=ple-io compares ways to read one"
        )
    return (
        Comparison(
            name="ple-io",
            contract="T",
            varied=frozenset({"ple_io"}),
            sides=tuple(
                Side(name=mode, flags={"ple_io": mode}, claims=(Mode(("ngram", "mode"), mode),))
                for mode in ("direct", "mmap", "ram")
            ),
        ),
    )


def _threads(facts: ModelFacts) -> tuple[Comparison, ...]:
    return (
        Comparison(
            name="threads",
            contract="T",
            varied=frozenset({"threads", "pool_workers"}),
            sides=tuple(
                Side(
                    name=f"{count} thread{'s' if count > 1 else ''}",
                    flags=_hectic(facts) | {"threads": str(count), "pool_workers": str(count)},
                    claims=(PRIMARY, MISSES, SWAPS),
                )
                for count in (1, 2, 3)
            ),
        ),
    )


def _processes(facts: ModelFacts) -> tuple[Comparison, ...]:
    claims = (PRIMARY, PEER, MISSES, SWAPS, PEER_SWAPS)
    flags = _hectic_two_cards(facts)
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
                    flags=_hectic(facts) | {"window_rows": "8", "spec": str(rows)},
                    claims=(LiveRows(rows), PRIMARY, MISSES, SWAPS),
                )
                for rows in range(1, 9)
            ),
        ),
    )


def _drafts(facts: ModelFacts) -> tuple[Comparison, ...]:
    flags = _hectic(facts)
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


def _chunks(facts: ModelFacts) -> tuple[Comparison, ...]:
    half, total = str(facts.total_experts // 2), str(facts.total_experts)
    no_ram = {"resident_budget_gib": "0"}

    def side(name: str, tiles: int, experts: str, **flags: str) -> Side:
        misses = NO_MISSES if experts == total else MISSES
        if flags == no_ram:
            misses = FILE
        return Side(
            name=name,
            flags={"prefill": str(tiles), "expert_cache": experts, **flags, **_FROZEN},
            claims=(Mode(("plan", "chunk_tiles"), str(tiles)), PRIMARY, misses, FROZEN),
        )

    return (
        Comparison(
            name="chunks",
            contract="C",
            varied=frozenset({"prefill", "prefill_ring", "expert_cache", *no_ram}),
            sides=(
                side("one tile", 1, half),
                side("two tiles", 2, half),
                side("four tiles", 4, half),
                side("two tiles, resident", 2, total),
                side("one tile, no ring", 1, half, prefill_ring="0"),
                side("two tiles, from the file", 2, half, **no_ram),
            ),
        ),
    )


def _peer_prompts(facts: ModelFacts) -> tuple[Comparison, ...]:
    half = facts.total_experts // 2
    one, two = {"expert_cache": str(half)}, _two_cards(half, half // 2)

    def side(name: str, flags: Mapping[str, str], *claims: Claim) -> Side:
        flags = {**flags, "prefill": "2", **_FROZEN}
        return Side(name=name, flags=flags, claims=(PRIMARY, MISSES, FROZEN, *claims))

    return (
        Comparison(
            name="peer-prompts",
            contract="T",
            varied=_CARDS | {"peer_stream"},
            sides=(
                side("one card", one),
                side("share 0", two | {"peer_stream": "0"}, PEER, NO_PEER_STREAM),
                side("share 0.35", two | {"peer_stream": "0.35"}, PEER, PEER_STREAM),
                side("share 1", two | {"peer_stream": "1"}, PEER, PEER_STREAM),
            ),
        ),
    )


def _peer_attention(facts: ModelFacts) -> tuple[Comparison, ...]:
    rows = TILE_ROWS["cuda"]
    if facts.index_budget < rows:
        raise UsageError(
            f"gate: {facts.path} selects {facts.index_budget} tokens, so prompts of "
            f"--preset=peer-attention fill no tile of {rows} rows, whose last ones are the peer's"
        )
    half = facts.total_experts // 2
    one, two = {"expert_cache": str(half)}, _two_cards(half, half // 2)

    def side(name: str, flags: Mapping[str, str], *claims: AnyClaim) -> Side:
        flags = {**flags, "prefill": "1", **_FROZEN}
        return Side(name=name, flags=flags, claims=(PRIMARY, MISSES, FROZEN, *claims))

    def shared(share: float) -> Side:
        taken = Mode(("plan", "peer_part", "attention_rows"), str(int(rows * share)))
        return side(f"share {share:g}", two | {"peer_attention": f"{share:g}"}, PEER, taken)

    return (
        Comparison(
            name="peer-attention",
            contract="C",
            varied=_CARDS | {"peer_attention"},
            sides=(side("one card", one), shared(0.0), shared(0.25), shared(0.5)),
        ),
    )


PRESETS: Mapping[str, Preset] = {
    "single-vs-peer": Preset(
        summary="N experts on one card, and the same N split over two; static, adapting, with drafts",
        make=_single_vs_peer,
    ),
    "residency": Preset(
        summary="0, 25, 50 and 100 % of the experts on the primary, adapting, and from the file",
        make=_residency,
    ),
    "host-vs-gpu": Preset(
        summary="experts in the host's memory, half of them and all on the primary; none moves",
        make=_host_vs_gpu,
    ),
    "hectic": Preset(
        summary="all experts resident, and 3 slots a layer swapped after every window",
        make=_hectic_preset,
    ),
    "pcie": Preset(summary="0, half and all of the misses streamed", make=_pcie),
    "ple-io": Preset(summary="the n-gram table read in its three modes", make=_ple_io),
    "threads": Preset(summary="1, 2 and 3 threads", make=_threads),
    "chunks": Preset(
        summary="1, 2 and 4 tiles of a prompt at once, experts streamed from RAM or the file, resident or "
        "read over the link",
        make=_chunks,
    ),
    "peer-prompts": Preset(
        summary="prompts on one card and beside a peer that streams none, a part or all of the rest",
        make=_peer_prompts,
        needs_gpu=True,
    ),
    "peer-attention": Preset(
        summary="prompts on one card and beside a peer that takes none, a quarter or half of the queries",
        make=_peer_attention,
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
