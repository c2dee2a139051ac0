"""What presets about tiers compare: where experts and rows of the n-gram table are while ids are written."""

import dataclasses

from strata_jax.errors import UsageError
from strata_jax.gate.comparison import Comparison, LiveRows, Mode, Side
from strata_jax.gate.draft_sides import scripted
from strata_jax.gate.facts import ModelFacts
from strata_jax.gate.tier_flags import (
    CARDS,
    FILE,
    FROZEN,
    FROZEN_FLAGS,
    HECTIC_FLAGS,
    HOST,
    MISSES,
    NO_HOST,
    NO_MISSES,
    NO_STREAM,
    PEER,
    PEER_SWAPS,
    PRIMARY,
    STREAM,
    SWAPS,
    hectic,
    hectic_two_cards,
    two_cards,
)


def single_vs_peer(facts: ModelFacts) -> tuple[Comparison, ...]:
    """As many experts on one card and over two: frozen, adapting, and with drafts."""
    half = facts.total_experts // 2
    return (
        Comparison(
            name="single-vs-peer, static",
            contract="T",
            varied=CARDS,
            sides=(
                Side(
                    name="one card",
                    flags={"expert_cache": str(half), **FROZEN_FLAGS},
                    claims=(PRIMARY, MISSES, FROZEN),
                ),
                Side(
                    name="two cards",
                    flags=two_cards(half, half // 2) | FROZEN_FLAGS,
                    claims=(PRIMARY, PEER, MISSES, FROZEN),
                ),
            ),
        ),
        Comparison(
            name="single-vs-peer, adapting",
            contract="T",
            varied=CARDS,
            sides=(
                Side(name="one card", flags=hectic(facts), claims=(PRIMARY, MISSES, SWAPS)),
                Side(
                    name="two cards",
                    flags=hectic_two_cards(facts),
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
    one = Side(name="one card", flags=hectic(facts) | drafts, claims=(PRIMARY, MISSES, LiveRows(4)))
    two = [scripted(hectic_two_cards(facts) | drafts, 4, percent) for percent in (50, 100)]
    return Comparison(
        name="single-vs-peer, drafts",
        contract="W",
        varied=CARDS | {"draft_script"},
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


def residency(facts: ModelFacts) -> tuple[Comparison, ...]:
    """Shares of the experts that the card holds."""
    total = facts.total_experts
    quarter, half = {"expert_cache": str(total // 4)}, {"expert_cache": str(total // 2)}
    partly = (PRIMARY, MISSES, SWAPS)
    # Some stay in RAM: a GPU swaps with those only.
    budget = {"resident_budget_gib": f"{facts.file_bytes / 16 / 2**30:.7f}"}
    from_file = {**quarter, **budget}
    sides = (
        Side(name="0 %", flags={"expert_cache": "0"}, claims=(MISSES,)),
        Side(name="25 %", flags=quarter | HECTIC_FLAGS, claims=partly),
        Side(name="50 %", flags=half | HECTIC_FLAGS, claims=partly),
        Side(name="100 %", flags={"expert_cache": str(total)}, claims=(PRIMARY, NO_MISSES)),
        Side(name="25 % and file", flags=from_file | HECTIC_FLAGS, claims=(PRIMARY, FILE, SWAPS)),
    )
    return (
        Comparison(
            name="residency",
            contract="T",
            varied=frozenset({"expert_cache", "resident_budget_gib", *HECTIC_FLAGS}),
            sides=sides,
        ),
    )


def host_vs_gpu(facts: ModelFacts) -> tuple[Comparison, ...]:
    """Experts in RAM, half of them on the card, and all."""
    total = facts.total_experts
    sides = (
        Side(name="host", flags={"expert_cache": "0"}, claims=(MISSES,)),
        Side(name="half", flags={"expert_cache": str(total // 2)}, claims=(PRIMARY, MISSES)),
        Side(name="device", flags={"expert_cache": str(total)}, claims=(PRIMARY, NO_MISSES)),
    )
    frozen = tuple(dataclasses.replace(s, flags={**s.flags, **FROZEN_FLAGS}) for s in sides)
    return (
        Comparison(
            name="host-vs-gpu",
            contract="T",
            varied=frozenset({"expert_cache"}),
            sides=frozen,
        ),
    )


def hectic_preset(facts: ModelFacts) -> tuple[Comparison, ...]:
    """Experts that change after every window, in every tier."""
    resident = {"expert_cache": str(facts.total_experts), **FROZEN_FLAGS}
    streamed = hectic_two_cards(facts) | {"pcie_frac": "0.5"}
    two_cards = (PRIMARY, PEER, SWAPS, PEER_SWAPS)
    return (
        Comparison(
            name="hectic",
            contract="T",
            varied=CARDS | {"pcie_frac", *HECTIC_FLAGS},
            sides=(
                Side(name="resident", flags=resident, claims=(PRIMARY, NO_MISSES, FROZEN)),
                Side(name="hectic", flags=hectic(facts), claims=(PRIMARY, MISSES, SWAPS)),
                Side(
                    name="hectic, two cards",
                    flags=hectic_two_cards(facts),
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


def pcie(facts: ModelFacts) -> tuple[Comparison, ...]:
    """Shares of the misses that are read over the link."""
    claims = {"0": (HOST, NO_STREAM), "0.5": (HOST, STREAM), "1": (STREAM, NO_HOST)}
    return (
        Comparison(
            name="pcie",
            contract="T",
            varied=frozenset({"pcie_frac"}),
            sides=tuple(
                Side(
                    name=f"share {share}",
                    flags=hectic(facts) | {"pcie_frac": share},
                    claims=(*done, SWAPS),
                )
                for share, done in claims.items()
            ),
        ),
    )


def ple_io(facts: ModelFacts) -> tuple[Comparison, ...]:
    """Ways to read the n-gram table.

    Raises:
        UsageError: for a model without one.
    """
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
