"""Where a device's kernels find rows of the n-gram table: emulated here, real with --gpu."""

import dataclasses

import jax
import numpy as np
import pytest

from strata_jax.config import NgramIo, TierSettings
from strata_jax.engine.runner import Runner, RunnerOptions
from strata_jax.errors import StrataError
from strata_jax.ops.native import Backend
from strata_jax.weights.device_table import DeviceNgramTable, HostReadTable
from strata_jax.weights.ngram_table import TENSOR
from strata_jax.weights.pack import open_pack
from tests.gguf_maker import TINY, make_model
from tests.stalls import FOR_GOOD_MS, reset_at_last

IDS = (np.arange(150, dtype=np.int32) * 37 + 11) % 500
MODES: list[NgramIo] = ["ram", "direct", "mmap"]
BACKENDS = [
    pytest.param(Backend("emulated"), id="emulated"),
    pytest.param(Backend("cuda"), id="cuda", marks=pytest.mark.gpu),
]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A model file of the test's own: four layers of width 64."""
    sizes = dataclasses.replace(TINY, drafts=0)
    return make_model(tmp_path_factory.mktemp("model") / "tiny.gguf", sizes).path


@pytest.fixture
def pack(path):
    with open_pack(path) as opened:
        yield opened


@pytest.fixture(params=BACKENDS)
def backend(request, monkeypatch) -> Backend:
    if request.param.name == "emulated":
        monkeypatch.setattr("strata_jax.engine.runner_options.TILE_ROWS", {"cpu": 64})
    return request.param


def make_runner(pack, backend: Backend, mode: NgramIo | None) -> Runner:
    options = RunnerOptions(max_context=300, backend=backend, tiers=TierSettings(ple_io=mode))
    return Runner(pack, pack.config, options, lambda _: None)


def read_few(runner: Runner) -> np.ndarray:
    """Logits of a window of several ids."""
    runner.reset()
    return runner.read_window(IDS[:5]).copy()


def read(runner: Runner, count: int = 3) -> np.ndarray:
    """Logits after two tiles, after a window of several ids and after `count` ids of its own."""
    runner.reset()
    runner.read_ahead(IDS[:0], IDS[:64])
    runner.read_tile(IDS[:64], want_logits=False)
    runner.read_ahead(IDS[:64], IDS[64:128])
    parts = [runner.read_tile(IDS[64:128], want_logits=True).copy()]
    parts.append(runner.read_window(IDS[128:133]).copy())
    for token in runner.best_ids(int(IDS[133]), count):
        parts.append(np.full((1, parts[0].shape[1]), token, np.float32))
    return np.concatenate(parts)


def test_gives_the_same_bits_in_every_mode(pack, backend: Backend):
    found, counters, modes = [], [], []
    for mode in MODES:
        runner = make_runner(pack, backend, mode)
        found.append(read(runner))
        report = runner.table_report()
        runner.close()
        assert report is not None
        modes.append(report["mode"])
        counters.append(report.get("rows", 0))

    for logits in found[1:]:
        np.testing.assert_array_equal(logits.view(np.uint32), found[0].view(np.uint32))
    assert modes == MODES
    assert pack.config.ngram is not None
    rows = (128 + 5 + 3) * pack.config.ngram.num_heads
    assert counters == [0, rows, rows]


def test_reads_a_small_table_into_memory_where_nobody_says(pack, backend: Backend):
    runner = make_runner(pack, backend, None)
    table, notes = runner._parts.table, runner.notes
    runner.close()

    assert isinstance(table, DeviceNgramTable)
    assert any("page-locked, read by the GPU (--ple_io=ram)" in note for note in notes)


def test_names_the_thread_that_reads(pack, backend: Backend):
    runner = make_runner(pack, backend, "direct")
    notes = runner.notes
    runner.close()

    assert any("a thread of the host reads rows for the GPU (--ple_io=direct)" in n for n in notes)


def test_ends_a_request_whose_reader_is_silent_and_serves_the_next(pack, backend: Backend):
    runner = make_runner(pack, backend, "direct")
    expected = read_few(runner)
    assert isinstance(runner._parts.table, HostReadTable)

    runner._parts.table.stall(milliseconds=FOR_GOOD_MS, timeout_ms=200)
    with pytest.raises(StrataError, match=r"n-gram table: .*no sign of life for 200 ms"):
        read_few(runner)
    with pytest.raises(AssertionError, match="reset"):
        runner.read_window(IDS[:1])
    with pytest.raises(StrataError, match="it is still lost; open the model again"):
        runner.reset()
    runner._parts.table.stall(milliseconds=0, timeout_ms=60_000)
    reset_at_last(runner)
    again = read_few(runner)
    runner.close()

    np.testing.assert_array_equal(again.view(np.uint32), expected.view(np.uint32))


def test_does_not_forget_a_silent_reader_before_somebody_looks(pack, backend: Backend):
    """Between two ids of an answer a program may do other things, for longer than the time-out."""
    runner = make_runner(pack, backend, "direct")
    read_few(runner)
    assert isinstance(runner._parts.table, HostReadTable)
    ids = runner.best_ids(5, 20)
    next(ids)
    jax.block_until_ready(runner._newest.first)  # the step in the queue has had its rows

    runner._parts.table.stall(milliseconds=FOR_GOOD_MS, timeout_ms=100)
    next(ids)
    jax.block_until_ready(runner._newest.first)  # the step behind has waited for its rows in vain
    runner._parts.table.stall(milliseconds=0, timeout_ms=60_000)

    with pytest.raises(StrataError, match="no sign of life"):
        next(ids)
    runner.close()


def test_ends_a_request_whose_rows_cannot_be_read(path, backend: Backend):
    with open_pack(path) as pack:
        runner = make_runner(pack, backend, "direct")
        expected = read_few(runner)
        info = pack.tensor(TENSOR)
        whole = path.read_bytes()
        assert isinstance(runner._parts.table, HostReadTable)
        fresh = IDS[::-1].copy()  # rows that the cache has not

        with path.open("r+b") as file:
            file.truncate(info.offset)
        try:
            runner.reset()
            with pytest.raises(StrataError, match=r"n-gram table: .* row \d+ at byte \d+ gave"):
                runner.read_window(fresh[:8])
        finally:
            path.write_bytes(whole)
        again = read_few(runner)
        runner.close()

    np.testing.assert_array_equal(again.view(np.uint32), expected.view(np.uint32))
