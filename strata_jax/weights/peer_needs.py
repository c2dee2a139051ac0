"""What a peer has to hold beside experts, as a plan finds it out step by step."""

import dataclasses

import numpy as np

from strata_jax.config import LOOPBACK, KvType, ModelConfig, TierSettings
from strata_jax.weights.budget import StepSizes, peer_workspace_bytes
from strata_jax.weights.machine import Machine
from strata_jax.weights.peer_prompts import (
    PeerPart,
    PeerWay,
    attention_bytes,
    attention_sizes,
    peer_part,
    tiles_bytes,
    with_ring,
)


class PeerNeeds:
    """Of the peer that settings name, or of none."""

    def __init__(self, settings: TierSettings, machine: Machine, has_expert_tiles: bool):
        """Finds the peer's part in prompts.

        Args:
            settings: with or without a peer.
            machine: where it is.
            has_expert_tiles: whether tiles of the model's experts go through matrix units.
        """
        self._settings = settings
        self._is_reached = settings.peer_device == LOOPBACK or machine.peer_is_reached
        self.part: PeerPart | None = None
        """On a GPU, where there is a peer."""
        self._notes: dict[str, tuple[str, ...]] = {}
        self.workspace = self.attention = self.ring = 0
        """Bytes."""
        self.staging = 0
        """Bytes of spare room for swaps; the planner's to set."""
        if machine.platform != "cpu" and settings.peer_device is not None:
            self.part, self._notes["part"] = peer_part(settings, self._is_reached, has_expert_tiles)
        self._share = 0.0 if self.part is None else self.part.share

    @property
    def notes(self) -> list[str]:
        """What a user should know so far."""
        return [note for notes in self._notes.values() for note in notes]

    @property
    def is_by_windows(self) -> bool:
        """Whether rows of tiles go through kernels that want memory for each of them."""
        return self.part is not None and self.part.way == PeerWay.WINDOWS

    @property
    def fixed(self) -> int:
        """All that is not experts or reserve, in bytes."""
        return self.workspace + self.attention + self.ring + self.staging

    def size(
        self, config: ModelConfig, steps: StepSizes, max_context: int, kv: KvType = "fp16"
    ) -> None:
        """What follows from the programs' sizes."""
        part = self.part
        rows = None if part is None else part.most_rows(steps)
        self.workspace = peer_workspace_bytes(config, steps, rows)
        if part is None:
            return
        if part.way == PeerWay.COMPUTES:
            self.workspace += tiles_bytes(config, steps.chunk_rows)
        sizes, notes = attention_sizes(
            self._settings, config, steps, (max_context, kv), is_reached=self._is_reached
        )
        self.part = dataclasses.replace(part, attention=sizes)
        self._notes["attention"] = notes
        self.attention = attention_bytes(sizes)

    def choose_ring(self, host: np.ndarray, slot_bytes: int, memory_bytes: int | None) -> None:
        """Slots through which the peer streams its share of the host's experts, if it has one.

        Args:
            host: bool [L, E], experts in the host's memory.
            slot_bytes: of the largest expert.
            memory_bytes: of the peer.
        """
        if self.part is None or self._share == 0:
            return
        part = dataclasses.replace(self.part, share=self._share)
        self.part, self._notes["ring"] = with_ring(part, host, slot_bytes, memory_bytes)
        self.ring = self.part.ring_slots * slot_bytes

    def parts(self, reserved: int, experts: int) -> dict[str, int]:
        """Bytes by what they are for.

        Args:
            reserved: all but experts.
            experts: bytes of them.
        """
        return {
            "workspace": self.workspace,
            "attention": self.attention,
            "prefill ring": self.ring,
            "staging": self.staging,
            "reserve": reserved - self.fixed,
            "experts": experts,
        }
