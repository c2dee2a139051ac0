"""Weights are brought in before they are needed, and it is told."""

import pathlib

import pytest

from strata_jax.weights import read_ahead as module
from strata_jax.weights.pack import open_pack
from strata_jax.weights.read_ahead import read_ahead

EMBEDDED = pathlib.Path(__file__).parents[2] / "strata_jax/models/strata-small/model-IQ3_S.gguf"


@pytest.fixture(scope="module")
def pack():
    with open_pack(EMBEDDED) as pack:
        yield pack


def bytes_of(pack, *tiers):
    return sum(pack.tensor(name).nbytes for name, spec in pack.specs.items() if spec.tier in tiers)


def test_everything_but_the_table_and_the_draft_is_touched_if_it_fits(pack):
    done = read_ahead(pack, 1 << 40, lambda line: None)

    assert done == bytes_of(pack, "dense", "embedding", "experts")


def test_experts_are_left_on_disk_if_memory_is_short(pack):
    dense = bytes_of(pack, "dense", "embedding")

    assert read_ahead(pack, dense, lambda line: None) == dense
    assert read_ahead(pack, 0, lambda line: None) == 0


def test_bytes_rate_and_time_left_are_told_every_two_seconds(pack, monkeypatch):
    monkeypatch.setattr(module, "PIECE_BYTES", 1 << 20)
    now = iter(range(10**6))
    lines = []

    read_ahead(pack, 1 << 40, lines.append, clock=lambda: next(now) * 0.7)

    assert len(lines) > 3
    assert all("MiB/s" in line and "s left" in line for line in lines)
