"""Where a GPU's peer is, and how a window's rows get there and back."""

import dataclasses

from strata_jax.config import LOOPBACK, TierSettings, unreachable_xla_memory
from strata_jax.errors import UsageError
from strata_jax.ops.native import Backend

_PRIMARY = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class PeerDevice:
    """The peer of an engine."""

    number: int
    """Of its device; the primary's own for a loopback peer."""
    through_host: bool
    """Rows go through RAM, not from card to card."""
    note: str
    """What a user should know of the way."""

    @property
    def is_reached(self) -> bool:
        """Whether the primary reads the peer's experts where they lie: tiles do."""
        return self.number == _PRIMARY or not self.through_host


def find_peer(settings: TierSettings, backend: Backend) -> PeerDevice | None:
    """The peer that the settings name, on a machine that has it; None if they name none.

    Raises:
        UsageError: if rows are to go from card to card and cannot.
    """
    if settings.peer_device is None:
        return None
    number = _PRIMARY if settings.peer_device == LOOPBACK else settings.peer_device
    problem = _why_not_direct(number, backend)
    if settings.peer_link == "p2p" and problem:
        raise UsageError(f"--peer_link=p2p: {problem}; --peer_link=auto sends rows through RAM")
    if settings.peer_link == "host":
        note = "peer: rows go through RAM (--peer_link=host)"
    elif problem:
        note = f"peer: rows go through RAM: {problem}"
    else:
        note = "peer: rows stay on the card" if number == _PRIMARY else "peer: rows go over P2P"
    return PeerDevice(
        number=number, through_host=settings.peer_link == "host" or bool(problem), note=note
    )


def _why_not_direct(number: int, backend: Backend) -> str:
    """Why kernels of one device cannot read and write the other's memory; empty if they can."""
    if number == _PRIMARY:
        return ""
    enable = backend.library.enable_peer_access
    return unreachable_xla_memory() or enable(number, _PRIMARY) or enable(_PRIMARY, number)
