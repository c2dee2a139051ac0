"""Flags that sides of several presets have, and what such sides claim."""

from strata_jax.config import LOOPBACK
from strata_jax.gate.comparison import Claim
from strata_jax.gate.facts import ModelFacts

_MISSES = ("entries_stream", "entries_host", "entries_file")
FROZEN_FLAGS = {"adapt_swaps": "0"}
HECTIC_FLAGS = {"adapt_every": "1", "adapt_swaps": "8"}
_HECTIC_SLOTS = 3


PRIMARY = Claim(("entries_primary",))
PEER = Claim(("entries_peer",))
MISSES = Claim(_MISSES)
NO_MISSES = Claim(_MISSES, "== 0")
STREAM = Claim(("entries_stream_frac",))
NO_STREAM = Claim(("entries_stream_frac",), "== 0")
HOST = Claim(("entries_host",))
NO_HOST = Claim(("entries_host",), "== 0")
FILE = Claim(("entries_file",))
SWAPS = Claim(("swaps_primary",))
PEER_STREAM = Claim(("peer_experts_streamed",))
NO_PEER_STREAM = Claim(("peer_experts_streamed",), "== 0")
PEER_SWAPS = Claim(("swaps_peer",))
FROZEN = Claim(("swaps_primary", "swaps_peer"), "== 0")


def _hectic_slots(facts: ModelFacts) -> int:
    """Three slots a layer, or fewer so that two experts are left: to swap in, to split misses."""
    return facts.layers * max(1, min(_HECTIC_SLOTS, facts.experts - 2))


def hectic(facts: ModelFacts) -> dict[str, str]:
    """Few experts on the card, which change after every window."""
    return {"expert_cache": str(_hectic_slots(facts)), **HECTIC_FLAGS}


def hectic_two_cards(facts: ModelFacts) -> dict[str, str]:
    """As many experts, a third of them on the peer."""
    slots = _hectic_slots(facts)
    return HECTIC_FLAGS | two_cards(slots, slots // 3)


def two_cards(slots: int, on_peer: int) -> dict[str, str]:
    """A peer on the primary's device does all that one on a second device does."""
    return {
        "expert_cache": str(slots - on_peer),
        "peer_device": LOOPBACK,
        "peer_slots": str(on_peer),
    }


CARDS = frozenset({"expert_cache", "peer_device", "peer_slots"})
PEER_DEVICE = "peer_device"
"""A shared flag that is for the sides with a peer only: where their peer is."""
