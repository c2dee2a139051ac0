from typing import Any

import pytest

from strata_jax.config import TierSettings
from strata_jax.errors import UsageError
from strata_jax.ops.native import Backend
from strata_jax.weights import device_peer
from strata_jax.weights.device_peer import PeerDevice, find_peer


class FakeLibrary:
    def __init__(self, problem: str):
        self.asked: list[tuple[int, int]] = []
        self._problem = problem

    def enable_peer_access(self, device: int, peer: int) -> str:
        self.asked.append((device, peer))
        return self._problem


class FakeBackend(Backend):
    problem = ""

    @property
    def library(self) -> Any:
        return FakeLibrary(self.problem)


class Apart(FakeBackend):
    problem = "device 1 cannot reach the memory of device 0"


def found(backend: type[FakeBackend], **settings) -> PeerDevice:
    peer = find_peer(TierSettings(**settings), backend("cuda"))
    assert peer is not None
    return peer


def test_finds_none_where_none_is_named():
    assert find_peer(TierSettings(), FakeBackend("cuda")) is None


@pytest.mark.parametrize(
    ("backend", "settings", "number", "through_host", "note"),
    [
        (FakeBackend, {"peer_device": 1}, 1, False, "peer: rows go over P2P"),
        (FakeBackend, {"peer_device": 3, "peer_link": "p2p"}, 3, False, "peer: rows go over P2P"),
        (Apart, {"peer_device": "loopback"}, 0, False, "peer: rows stay on the card"),
        (
            FakeBackend,
            {"peer_device": "loopback", "peer_link": "host"},
            0,
            True,
            "peer: rows go through RAM (--peer_link=host)",
        ),
        (
            Apart,
            {"peer_device": 1},
            1,
            True,
            "peer: rows go through RAM: device 1 cannot reach the memory of device 0",
        ),
    ],
)
def test_takes_the_straight_way_where_there_is_one(backend, settings, number, through_host, note):
    peer = found(backend, **settings)

    assert (peer.number, peer.through_host, peer.note) == (number, through_host, note)


def test_refuses_a_way_that_is_not_there():
    with pytest.raises(UsageError) as error:
        found(Apart, peer_device=1, peer_link="p2p")

    assert str(error.value) == (
        "--peer_link=p2p: device 1 cannot reach the memory of device 0; --peer_link=auto sends rows "
        "through RAM"
    )


def test_goes_through_ram_where_xla_allocates_memory_that_no_peer_reaches(monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_ALLOCATOR", "cuda_async")
    assert device_peer.unreachable_xla_memory().startswith("XLA_PYTHON_CLIENT_ALLOCATOR=cuda_async")

    assert found(FakeBackend, peer_device=1).through_host
