"""Who drafts on a device behind a window that the host has not seen."""

from typing import Protocol

import jax

from strata_jax.engine.follow_programs import Orders
from strata_jax.engine.queued import Window


class Follower(Protocol):
    """A drafter that works on the device behind a window, before the host knows what the window gave."""

    def begin(self) -> None:
        """Everything before the next window's rows was told by `Drafter.read`."""
        ...

    def follow(
        self, window: Window, drawn: jax.Array, stops: jax.Array, orders: Orders, end: int
    ) -> tuple[jax.Array, jax.Array]:
        """Queues what follows a window, which sees to its rows as `Drafter.read` does.

        Args:
            window: in the queue.
            drawn: see `follow_programs.find`.
            stops: likewise.
            orders: likewise; the origin is the drafter's to fill in.
            end: the position behind the window's rows, at most.

        Returns:
            the next window's operand, and the report on this window.
        """
        ...

    def passed(self, token: int, residual: jax.Array, place: int, position: int) -> None:
        """A window read `position` alone, behind which nobody drafts; `token` follows.

        Args:
            token: see above.
            residual: the ring of the newest window.
            place: of the row in it.
            position: see above.
        """
        ...

    def saw(self, ids: list[int], position: int) -> None:
        """The host knows now what a window gave; as `Drafter.read`, but the device has seen to the rows."""
        ...

    def lose(self) -> None:
        """A window failed: what is on the device means nothing."""
        ...
