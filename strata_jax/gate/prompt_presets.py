"""What presets about prompts compare: chunks, streamed experts, a peer's part."""

from collections.abc import Mapping

from strata_jax.config import TILE_ROWS
from strata_jax.errors import UsageError
from strata_jax.gate.comparison import AnyClaim, Claim, Comparison, Mode, Side
from strata_jax.gate.facts import ModelFacts
from strata_jax.gate.tier_flags import (
    CARDS,
    FILE,
    FROZEN,
    FROZEN_FLAGS,
    MISSES,
    NO_MISSES,
    NO_PEER_STREAM,
    PEER,
    PEER_STREAM,
    PRIMARY,
    two_cards,
)


def chunks(facts: ModelFacts) -> tuple[Comparison, ...]:
    """How many tiles of a prompt are read at once, and how their experts are fetched."""
    half, total = str(facts.total_experts // 2), str(facts.total_experts)
    no_ram = {"resident_budget_gib": "0"}

    def side(name: str, tiles: int, experts: str, **flags: str) -> Side:
        misses = NO_MISSES if experts == total else MISSES
        if flags == no_ram:
            misses = FILE
        return Side(
            name=name,
            flags={"prefill": str(tiles), "expert_cache": experts, **flags, **FROZEN_FLAGS},
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


def peer_prompts(facts: ModelFacts) -> tuple[Comparison, ...]:
    """Shares of the host's experts that a peer streams in prompts."""
    half = facts.total_experts // 2
    one, two = {"expert_cache": str(half)}, two_cards(half, half // 2)

    def side(name: str, flags: Mapping[str, str], *claims: Claim) -> Side:
        flags = {**flags, "prefill": "2", **FROZEN_FLAGS}
        return Side(name=name, flags=flags, claims=(PRIMARY, MISSES, FROZEN, *claims))

    return (
        Comparison(
            name="peer-prompts",
            contract="T",
            varied=CARDS | {"peer_stream"},
            sides=(
                side("one card", one),
                side("share 0", two | {"peer_stream": "0"}, PEER, NO_PEER_STREAM),
                side("share 0.35", two | {"peer_stream": "0.35"}, PEER, PEER_STREAM),
                side("share 1", two | {"peer_stream": "1"}, PEER, PEER_STREAM),
            ),
        ),
    )


def peer_attention(facts: ModelFacts) -> tuple[Comparison, ...]:
    """Shares of a tile's queries that a peer takes.

    Raises:
        UsageError: for a model that selects less than a tile: its prompts here fill none.
    """
    rows = TILE_ROWS["cuda"]
    if facts.index_budget < rows:
        raise UsageError(
            f"gate: {facts.path} selects {facts.index_budget} tokens, so prompts of "
            f"--preset=peer-attention fill no tile of {rows} rows, whose last ones are the peer's"
        )
    half = facts.total_experts // 2
    one, two = {"expert_cache": str(half)}, two_cards(half, half // 2)

    def side(name: str, flags: Mapping[str, str], *claims: AnyClaim) -> Side:
        flags = {**flags, "prefill": "1", **FROZEN_FLAGS}
        return Side(name=name, flags=flags, claims=(PRIMARY, MISSES, FROZEN, *claims))

    def shared(share: float) -> Side:
        taken = Mode(("plan", "peer_part", "attention_rows"), str(int(rows * share)))
        return side(f"share {share:g}", two | {"peer_attention": f"{share:g}"}, PEER, taken)

    return (
        Comparison(
            name="peer-attention",
            contract="C",
            varied=CARDS | {"peer_attention"},
            sides=(side("one card", one), shared(0.0), shared(0.25), shared(0.5)),
        ),
    )
