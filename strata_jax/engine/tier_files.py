"""What tiers leave in files: the learned profile and the routed ids.

An answer is worth more than either: what cannot be written is told, and ends nothing but the writing.
"""

import time
from collections.abc import Sequence
from pathlib import Path

from strata_jax.errors import StrataError
from strata_jax.weights.device_experts import DeviceExperts
from strata_jax.weights.experts import ExpertTiers
from strata_jax.weights.profile import Pair, learned
from strata_jax.weights.routing import RoutedModel, RoutingWriter

SAVE_EVERY_S = 600.0
"""Between two savings of the learned profile (reference-engine.md, section 1.4)."""


class TierFiles:
    """The files of one engine. After the constructor nothing but `write_routing` and `close` raises."""

    def __init__(
        self,
        experts: ExpertTiers | DeviceExperts,
        model: RoutedModel,
        profile: Path | None,
        prior: Sequence[Pair],
    ):
        """Writes nothing yet.

        Args:
            experts: tell what was routed and where they are.
            model: theirs.
            profile: where the learned profile is written; None = nowhere.
            prior: the ranking that the run began with.
        """
        self._experts = experts
        self._model = model
        self._profile = profile
        self._prior = prior
        self._saved_at = time.monotonic()
        self._has_learned = False
        self._routing_path: Path | None = None
        self._routing: RoutingWriter | None = None
        self._failed: dict[str, str] = {}  # a line for each file that is not as it should be
        self._told: set[str] = set()

    def write_routing(self, path: Path) -> None:
        """Writes the routed ids of every step from now on; see `weights/routing.py`.

        Raises:
            UsageError: on a device, which tells nobody what it routed.
            OSError: if the file cannot be made.
        """
        self._experts.record_routing(True)
        self._routing = RoutingWriter(path, self._model)
        self._routing_path = path

    def after_step(self) -> None:
        """Writes what is due: routed ids, and the learned profile every ten minutes."""
        self._has_learned = True
        self._write_routed()
        if time.monotonic() - self._saved_at >= SAVE_EVERY_S:
            self.save()

    def save(self) -> None:
        """Writes the learned profile: residents first, then use, then the order before.

        Before the first step nothing was learned that is worth the place of what is there.
        """
        if self._profile is None or not self._has_learned:
            return
        self._saved_at = time.monotonic()
        tiers = self._experts.tiers()
        resident = (tiers == 1) | (tiers == 2)
        profile = learned(self._model, resident, self._experts.usage(), self._prior)
        try:
            profile.save(self._profile)
        except OSError as error:
            self._failed["profile"] = (
                f"--expert_profile_save={self._profile}: what was learned cannot be written: "
                f"{_reason(error)}; a folder with room for it expected"
            )
        else:
            self._failed.pop("profile", None)

    def take_warnings(self) -> list[str]:
        """A line for each file that cannot be written, once."""
        new = [line for name, line in self._failed.items() if name not in self._told]
        self._told |= self._failed.keys()
        return new

    def close(self) -> None:
        """Writes what is left.

        Raises:
            StrataError: if a file is not as it should be, now that all was tried.
        """
        self._write_routed()
        self._close_routing()
        self.save()
        if self._failed:
            raise StrataError("; ".join(self._failed.values()))

    def _write_routed(self) -> None:
        if self._routing is None:
            return
        try:
            for layer, ids in self._experts.take_routing():
                self._routing.add(layer, ids)
        except OSError as error:
            self._routing_failed(error)
            self._experts.record_routing(False)
            self._close_routing()

    def _close_routing(self) -> None:
        routing, self._routing = self._routing, None
        try:
            if routing is not None:
                routing.close()
        except OSError as error:
            self._routing_failed(error)

    def _routing_failed(self, error: OSError) -> None:
        self._failed.setdefault(
            "routing",
            f"--routing_out={self._routing_path}: cannot be written any more: {_reason(error)}; its "
            "records end before the run did",
        )


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
