"""The time of a prompt by phase: what a timeline's marks say, and that they change nothing."""

import dataclasses
import json

import numpy as np
import pytest

from strata_jax.config import TierSettings
from strata_jax.engine.peer_timing import PEER_PHASES
from strata_jax.engine.prefill_timing import CAPACITY, PrefillTiming
from strata_jax.engine.runner import Runner, RunnerOptions
from strata_jax.ops.native import Backend
from strata_jax.ops.timed import PHASES
from strata_jax.weights.device_experts import DeviceExperts
from strata_jax.weights.pack import open_pack
from tests.gguf_maker import TINY, make_model
from tests.stepper import same_bits

TILE = 128
MS = 1_000_000


@pytest.fixture
def timing():
    marks = [(5 * MS, 5), (7 * MS, 6), (8 * MS, 2), (18 * MS, 6), (19 * MS, 17)]
    return PrefillTiming(
        wall_s=0.02,
        slot_wait_s=0.001,
        experts_streamed=3,
        experts_unrouted=1,
        bytes_streamed=28_000_000,
        marks=tuple(marks),
    )


def test_a_phase_lasts_until_the_next_mark(timing):
    assert timing.device_s == 0.014
    assert timing.phases_ms == {
        "experts: gate and up": 10.0,
        "embedding": 2.0,
        "hyper-connections": 2.0,
    }


def test_is_told_in_lines_and_as_json(timing):
    written = json.loads(json.dumps(timing.to_json()))

    assert written["spans"][1] == ["hyper-connections", 2000.0, 1000.0]
    assert sum(span[2] for span in written["spans"]) == 14000.0
    assert timing.lines()[1].startswith("prompt by phase: experts: gate and up 10.0 ms (71 %), ")
    assert "3 experts streamed, 2.0 GB/s on average, and 1 left out" in timing.lines()[2]


def test_without_marks_only_the_whole_time_is_known(timing):
    lines = dataclasses.replace(timing, marks=(), experts_streamed=0).lines()

    assert list(lines) == ["prompt: 20.0 ms; phases are told of a GPU only"]


def test_marks_change_no_bit_and_name_every_phase(tmp_path, monkeypatch):
    monkeypatch.setattr("strata_jax.engine.runner_options.TILE_ROWS", {"cpu": TILE})
    sizes = dataclasses.replace(TINY, drafts=0)
    made = make_model(tmp_path / "tiny.gguf", sizes, types={"*_exps*": 8, "*_shexp.*": 8})
    with open_pack(made.path) as pack:
        ids = np.random.default_rng(3).integers(0, pack.config.vocab_size, TILE, np.int32)
        found = []
        peer = TierSettings(expert_cache=8, peer_device=1, peer_slots=4, peer_stream=0.5)
        for is_timed, tiers in ((False, TierSettings()), (True, peer)):
            options = RunnerOptions(
                max_context=200,
                backend=Backend("emulated"),
                prefill_timing=is_timed,
                tiers=tiers,
            )
            runner = Runner(pack, pack.config, options, lambda _: None)
            runner.reset()
            found.append(runner.read_tile(ids, want_logits=True).copy())
            assert isinstance(runner.tiers.experts, DeviceExperts)
            marks = runner.tiers.experts.take_marks()
            again = runner.tiers.experts.take_marks()
            peer_marks = runner.tiers.experts.take_peer_marks()
            runner.close()

    assert same_bits(found[0], found[1])
    assert {PHASES[phase] for _, phase in marks} == set(PHASES)
    assert {PEER_PHASES[phase] for _, phase in peer_marks} == set(PEER_PHASES[:5])
    assert [at for at, _ in marks] == sorted(at for at, _ in marks)
    assert 0 < len(marks) < CAPACITY // 100
    assert again == ()
