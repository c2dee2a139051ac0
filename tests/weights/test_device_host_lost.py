"""Threads of the host that are lost, stopped or starved while a device waits: emulated, real with --gpu."""

import dataclasses
import os
import subprocess
import sys
import time

import numpy as np
import pytest

from strata_jax.config import TierSettings
from strata_jax.engine.runner import Runner, RunnerOptions
from strata_jax.errors import StrataError
from strata_jax.ops.native import Backend
from strata_jax.weights.device_experts import DeviceExperts
from strata_jax.weights.device_table import HostReadTable
from strata_jax.weights.pack import open_pack
from tests.gguf_maker import TINY, make_model
from tests.stalls import FOR_GOOD_MS

IDS = (np.arange(24, dtype=np.int32) * 37 + 11) % 500
BACKENDS = [
    pytest.param(Backend("emulated"), id="emulated"),
    pytest.param(Backend("cuda"), id="cuda", marks=pytest.mark.gpu),
]
WHOSE = ["experts", "table"]


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    sizes = dataclasses.replace(TINY, drafts=0)
    with open_pack(make_model(tmp_path_factory.mktemp("lost") / "tiny.gguf", sizes).path) as opened:
        yield opened


@pytest.fixture(params=BACKENDS)
def backend(request, monkeypatch) -> Backend:
    monkeypatch.setattr("strata_jax.engine.runner_options.TILE_ROWS", {"cpu": 64, "cuda": 2048})
    return request.param


def make_runner(pack, backend: Backend) -> Runner:
    """All experts are the host's, and so is the reading of the table."""
    tiers = TierSettings(expert_cache=0, pcie_frac=0.0, ple_io="direct")
    options = RunnerOptions(max_context=300, backend=backend, tiers=tiers)
    return Runner(pack, pack.config, options, lambda _: None)


def read(runner: Runner) -> np.ndarray:
    runner.reset()
    parts = [runner.read_window(IDS[at : at + 8]).copy() for at in (0, 8)]
    return np.concatenate([*parts, runner.read_window(IDS[16:17])])


def stall(runner: Runner, whose: str, milliseconds: int, timeout_ms: int) -> None:
    """The next letter to that thread is looked at so much later."""
    found = runner.tiers.experts if whose == "experts" else runner._parts.table
    assert isinstance(found, DeviceExperts | HostReadTable)
    found.stall(milliseconds, timeout_ms)


@pytest.mark.parametrize("whose", WHOSE)
def test_a_lost_thread_ends_the_request_and_the_next_one_says_why(pack, backend, whose: str):
    runner = make_runner(pack, backend)
    expected = read(runner)
    stall(runner, whose, FOR_GOOD_MS, 200)

    begin = time.monotonic()
    with pytest.raises(StrataError, match="no sign of life for 200 ms"):
        read(runner)
    took = time.monotonic() - begin
    with pytest.raises(StrataError, match="still lost; open the model again"):
        read(runner)
    runner.close()
    closed = time.monotonic() - begin
    again = make_runner(pack, backend)
    got = read(again)
    again.close()

    assert took < 30
    assert closed < 60
    np.testing.assert_array_equal(got.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("whose", WHOSE)
def test_a_thread_stopped_for_less_than_the_time_out_is_no_fault(pack, backend, whose: str):
    runner = make_runner(pack, backend)
    expected = read(runner)
    stall(runner, whose, 1000, 60_000)

    begin = time.monotonic()
    got = read(runner)
    took = time.monotonic() - begin
    runner.close()

    assert took > 0.9
    np.testing.assert_array_equal(got.view(np.uint32), expected.view(np.uint32))


def test_threads_starved_on_one_core_answer_late_and_right(pack, backend):
    expected_of = make_runner(pack, backend)
    expected = read(expected_of)
    expected_of.close()
    cores = os.sched_getaffinity(0)
    core = min(cores)
    greedy = subprocess.Popen(
        [sys.executable, "-c", f"import os\nos.sched_setaffinity(0, {{{core}}})\nwhile True: pass"]
    )
    os.sched_setaffinity(0, {core})  # threads that are started from now on inherit it
    try:
        runner = make_runner(pack, backend)
        got = [read(runner) for _ in range(3)]
        runner.close()
    finally:
        os.sched_setaffinity(0, cores)
        greedy.kill()
        greedy.wait()

    for found in got:
        np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))
