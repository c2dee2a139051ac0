"""Experts of a device's model that no memory holds: emulated here, real with --gpu."""

import dataclasses

import numpy as np
import pytest

from strata_jax.config import TierSettings
from strata_jax.engine.runner import Runner, RunnerOptions
from strata_jax.ops.native import Backend
from strata_jax.weights.pack import open_pack
from strata_jax.weights.placement import Tier
from tests.gguf_maker import BLOCKY, make_model

IDS = (np.arange(150, dtype=np.int32) * 53 + 7) % 500
TYPES = {"*_exps.*": 21, "*_shexp.*": 8, "*ffn_gate_inp_shexp.*": 0}
"""IQ3_S and Q8_0, for which tiles have kernels of their own."""
TIERS = ("primary", "stream", "host", "file")
BACKENDS = [
    pytest.param(Backend("emulated"), id="emulated"),
    pytest.param(Backend("cuda"), id="cuda", marks=pytest.mark.gpu),
]


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    """Four layers of width 256, experts of quantised types."""
    sizes = dataclasses.replace(BLOCKY, drafts=0)
    made = make_model(tmp_path_factory.mktemp("file") / "blocky.gguf", sizes, types=TYPES)
    with open_pack(made.path) as opened:
        yield opened


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request) -> Backend:
    return request.param


def make_runner(pack, backend: Backend, **tiers) -> Runner:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("strata_jax.engine.runner_options.TILE_ROWS", {"cpu": 128, "cuda": 2048})
        options = RunnerOptions(max_context=300, backend=backend, tiers=TierSettings(**tiers))
        return Runner(pack, pack.config, options, lambda _: None)


def read(runner: Runner) -> np.ndarray:
    """Logits after two tiles, of which the first gives none, and of two windows."""
    runner.reset()
    runner.read_tile(IDS[:64], want_logits=False)
    parts = [runner.read_tile(IDS[64:128], want_logits=True).copy()]
    parts.append(runner.read_window(IDS[128:133]).copy())
    return np.concatenate([*parts, runner.read_window(IDS[133:134])])


@pytest.fixture(scope="module")
def logits(pack, backend: Backend) -> np.ndarray:
    runner = make_runner(pack, backend)
    found = read(runner)
    runner.close()
    return found


@pytest.mark.parametrize(
    "flags",
    [
        {"expert_cache": 0, "resident_budget_gib": 0.0},
        {"expert_cache": 8, "resident_budget_gib": 0.0, "pcie_frac": 1.0, "prefill_ring": 0},
        {"expert_cache": 8, "resident_budget_gib": 0.0004, "pcie_frac": 0.5, "adapt_every": 1},
    ],
    ids=["all", "with slots, no ring", "with slots and RAM"],
)
def test_are_read_from_the_file_and_give_the_same_bits(pack, backend: Backend, logits, flags):
    runner = make_runner(pack, backend, **flags)
    got = [read(runner), read(runner)]
    counters, tiers = runner.tiers.experts.counters(), runner.tiers.experts.tiers()
    faults, plan = runner.tiers.experts.audit(), runner.tiers.plan
    runner.close()

    for found in got:
        np.testing.assert_array_equal(found.view(np.uint32), logits.view(np.uint32))
    assert counters["entries_file"] > 0
    routed = 2 * 134 * pack.config.num_experts_active * pack.config.num_layers
    assert sum(counters[f"entries_{tier}"] for tier in TIERS) == routed
    assert (tiers == Tier.FILE).any()
    told = " stay in the file: in windows the host's threads compute them"
    assert any(told in note for note in plan.notes)
    assert faults == []
    assert (plan.ring_slots > 0) == ("prefill_ring" not in flags)
    # Every pass needs all that the device has not, but for what no row had chosen.
    away = pack.config.num_layers * pack.config.num_experts - flags["expert_cache"]
    passes = 4 if plan.ring_slots else 0
    assert counters["experts_streamed"] + counters["experts_unrouted"] == passes * away
    assert counters["experts_not_awaited"] == 0


def test_are_counted_in_tiles_where_they_lie(pack, backend: Backend):
    runner = make_runner(pack, backend, expert_cache=8, pcie_frac=0.0)
    runner.reset()
    runner.read_tile(IDS[:64], want_logits=True)
    counters = runner.tiers.counters()
    runner.close()

    assert counters["bytes_read"] is None  # nobody counts: 0 would be a lie
    routed = 64 * pack.config.num_experts_active * pack.config.num_layers
    assert 0 < counters["entries_stream"] < routed
    assert counters["entries_stream_frac"] == 0  # that is for windows
    assert counters["entries_primary"] == routed - counters["entries_stream"]


def test_are_read_without_a_ring_that_fails(pack, backend: Backend, logits, monkeypatch):
    monkeypatch.setattr("strata_jax.weights.device_experts.PATIENCE_MS", 50)
    runner = make_runner(pack, backend, expert_cache=0, resident_budget_gib=0.0)
    runner.tiers.experts.before_tile(64)  # what is to be streamed is known from now on
    for call in ("before_prompt", "before_tile"):  # of two passes, and nobody copies for the second
        monkeypatch.setattr(runner.tiers.experts, call, lambda *_: None)
    got = read(runner)
    counters = runner.tiers.experts.counters()
    runner.close()

    np.testing.assert_array_equal(got.view(np.uint32), logits.view(np.uint32))
    assert counters["experts_not_awaited"] == pack.config.num_layers * pack.config.num_experts
