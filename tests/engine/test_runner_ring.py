"""Prompts whose experts are streamed through a ring of slots: emulated here, real with --gpu."""

import dataclasses
import pathlib

import numpy as np
import pytest

from strata_jax.config import TierSettings
from strata_jax.engine.runner import Runner, RunnerOptions
from strata_jax.errors import StrataError, UsageError
from strata_jax.ops.native import Backend
from strata_jax.weights.budget import CHUNK_SHARE, MIB, StepSizes, chunk_bytes
from strata_jax.weights.pack import open_pack
from strata_jax.weights.placement import Tier
from tests.gguf_maker import BLOCKY, TINY, make_model
from tests.ops_device import emulating
from tests.stepper import same_bits

TILE = 128  # more than a window has
BACKENDS = [
    pytest.param(Backend("emulated"), id="emulated"),
    pytest.param(Backend("cuda"), id="cuda", marks=pytest.mark.gpu),
]


@pytest.fixture(scope="module", autouse=True)
def small_tiles():
    """Rows of a tile: an emulated device is slow."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("strata_jax.engine.runner_options.TILE_ROWS", {"cpu": TILE, "cuda": TILE})
        yield


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request) -> Backend:
    return request.param


def tiny_model(folder) -> pathlib.Path:
    """Two layers of eight experts in blocks of eight bits, all else float32.

    Devices of capability 9 have wide tiles for the second of an expert's products (rows of 128).
    """
    sizes = dataclasses.replace(TINY, drafts=0, experts=8, layers=2, width=128)
    return make_model(folder / "tiny.gguf", sizes, types={"*_exps*": 8, "*_shexp.*": 8}).path


@pytest.fixture(scope="module")
def pack(tmp_path_factory, backend, embedded_pack):
    """The embedded model; a smaller one where the device is emulated, which is slow."""
    if backend.name == "cuda":
        yield embedded_pack
        return
    with open_pack(tiny_model(tmp_path_factory.mktemp("ring"))) as opened:
        yield opened


@pytest.fixture(scope="module")
def prompt(pack) -> np.ndarray:
    return np.random.default_rng(3).integers(0, pack.config.vocab_size, 2 * TILE, np.int32)


@pytest.fixture(scope="module")
def expected(pack, backend, prompt) -> np.ndarray:
    """Logits of two tiles and of some windows, every expert on the device."""
    runner = make_runner(pack, backend)
    logits = read(runner, prompt)
    runner.close()
    return logits


@pytest.fixture(scope="module")
def expected_of_9(pack, backend, prompt, expected) -> np.ndarray:
    """The same by a device of capability 9; emulated, its products of floats add in another order."""
    if backend.name == "cuda":
        return expected
    runner = make_runner(pack, backend)
    with emulating(backend, capability=9):
        logits = read(runner, prompt)
    runner.close()
    np.testing.assert_allclose(logits, expected, atol=1e-4 * np.abs(expected).max())
    return logits


def make_runner(pack, backend: Backend, chunk_tiles: int = 1, **tiers) -> Runner:
    options = RunnerOptions(
        max_context=440, backend=backend, chunk_tiles=chunk_tiles, tiers=TierSettings(**tiers)
    )
    return Runner(pack, pack.config, options, lambda _: None)


def read(runner: Runner, prompt: np.ndarray, windows: int = 3) -> np.ndarray:
    """Logits after the prompt and after each of some windows of one id, [1 + windows, V]."""
    runner.reset()
    rows, logits = runner.chunk_rows, np.zeros((1, 1))
    for begin in range(0, len(prompt), rows):
        last = begin + rows >= len(prompt)
        logits = runner.read_tile(prompt[begin : begin + rows], want_logits=last)
    parts = [logits.copy()]
    for token in range(windows):
        parts.append(runner.read_window(np.asarray([token], np.int32)).copy())
    return np.concatenate(parts)


@pytest.mark.parametrize(("experts", "chunk_tiles", "slots"), [(0, 1, 2), (5, 2, 5), (5, 2, None)])
def test_gives_the_same_bits(
    pack, backend, prompt, expected, expected_of_9, slots: int | None, experts, chunk_tiles: int
):
    flags = {"prefill_ring": slots, "expert_cache": experts, "adapt_swaps": 0}
    runner = make_runner(pack, backend, chunk_tiles, **flags)
    got = read(runner, prompt)
    with emulating(backend, capability=9):
        again = read(runner, prompt)
    counters = runner.tiers.experts.counters()
    ring = runner.tiers.plan.ring_slots
    runner.close()

    assert same_bits(got, expected)
    assert same_bits(again, expected_of_9)
    away = pack.config.num_layers * pack.config.num_experts - experts
    passes = 2 * (2 if chunk_tiles == 1 else 1)
    assert counters["experts_streamed"] + counters["experts_unrouted"] == passes * away
    assert ring == slots or slots is None


def test_without_a_ring_experts_are_read_over_the_link(pack, backend, prompt, expected):
    runner = make_runner(pack, backend, expert_cache=5, prefill_ring=0)
    got = read(runner, prompt)
    counters = runner.tiers.experts.counters()
    runner.close()

    assert same_bits(got, expected)
    assert counters["experts_streamed"] == 0
    assert counters["bytes_streamed"] > 0


def test_experts_of_a_card_that_is_not_reached_come_through_the_ring(
    pack, backend, prompt, expected
):
    """Computed by its kernels of windows they made prompts five times slower."""
    if backend.library.device_count() < 2:
        pytest.skip("a second GPU is needed: NOT CHECKED")
    flags = {"peer_device": 1, "peer_link": "host", "peer_slots": 3, "adapt_swaps": 0}
    runner = make_runner(pack, backend, expert_cache=5, **flags)
    got = read(runner, prompt)
    counters = runner.tiers.experts.counters()
    runner.close()

    assert same_bits(got, expected)
    passes, away = 2, pack.config.num_layers * pack.config.num_experts - 5
    assert counters["experts_streamed"] == passes * away
    assert counters["entries_peer"] > 0


@pytest.mark.parametrize(
    ("device", "share", "capability"), [("loopback", 1.0, 9), (1, 0.0, 8), (1, 0.5, 9)]
)
def test_a_peer_computes_its_rows_beside_the_primary(
    pack, backend, prompt, expected, expected_of_9, device, share: float, capability: int
):
    if device != "loopback" and backend.library.device_count() < 2:
        pytest.skip("a second GPU is needed: NOT CHECKED")
    flags = {"peer_device": device, "peer_slots": 3, "peer_stream": share, "adapt_swaps": 0}
    runner = make_runner(pack, backend, expert_cache=5, **flags)
    with emulating(backend, capability):
        got = read(runner, prompt)
    few = read(runner, prompt[:1])  # too few to stream
    counters, plan = runner.tiers.experts.counters(), runner.tiers.plan
    runner.close()

    assert same_bits(got, expected_of_9 if capability == 9 else expected)
    assert np.isfinite(few).all()
    lent = plan.prompt.lent_experts(plan.placement)
    passes, on_host = 2, ((plan.placement.tiers == Tier.HOST) | lent).sum(axis=1)
    assert counters["experts_streamed"] == passes * on_host.sum()
    assert counters["peer_experts_streamed"] == passes * int((on_host * share // 1).sum())
    assert counters["entries_peer"] > 0


def test_few_rows_stream_nothing(pack, backend, prompt):
    runner = make_runner(pack, backend, expert_cache=5)
    read(runner, prompt[:1])
    counters = runner.tiers.experts.counters()
    runner.close()

    assert counters["experts_streamed"] == 0


def test_follows_experts_that_have_moved(pack, backend, prompt, expected):
    peer = {"peer_device": "loopback", "peer_slots": 4, "peer_stream": 0.5}
    flags = {"expert_cache": 4, "adapt_every": 1, "adapt_swaps": 8, **peer}
    runner = make_runner(pack, backend, **flags)
    parts = [read(runner, prompt, windows) for windows in (3, 7, 5, 12, 3)]
    counters, faults = runner.tiers.experts.counters(), runner.tiers.experts.audit()
    runner.close()

    for part in parts:
        assert same_bits(part[:4], expected)
    assert counters["swaps_primary"] > 0
    assert counters["experts_streamed"] > 0
    assert faults == []


def test_a_prompt_that_was_left_in_the_middle_harms_nobody(pack, backend, prompt, expected):
    runner = make_runner(pack, backend, expert_cache=5, prefill_ring=2)
    runner.reset()
    runner.read_tile(prompt[:TILE], want_logits=False)
    got = read(runner, prompt)
    runner.close()

    assert same_bits(got, expected)


def test_lost_copies_cost_time_only_and_are_counted(pack, backend, prompt, expected, monkeypatch):
    """Contract N: the command tells of it."""
    monkeypatch.setattr("strata_jax.weights.device_experts.PATIENCE_MS", 50)
    runner = make_runner(pack, backend, expert_cache=5)
    read(runner, prompt[:TILE], windows=0)  # what is to be copied is known from now on
    for call in ("before_prompt", "before_tile"):  # and nobody copies
        monkeypatch.setattr(runner.tiers.experts, call, lambda *_: None)
    got = read(runner, prompt, windows=0)
    counters = runner.tiers.experts.counters()
    runner.close()

    assert same_bits(got, expected[:1])
    away = pack.config.num_layers * pack.config.num_experts - 5
    assert counters["experts_not_awaited"] == 2 * away
    assert counters["experts_streamed"] == away


def fail_to_fill_slots(runner: Runner) -> None:
    """Leaves a prompt's slots lent: whoever looks next at experts tries again."""
    library = runner.options.backend.library
    library.set_copy_limit(4096)  # less than an expert has
    for _ in range(2):
        with pytest.raises(StrataError, match="lent_slots: invalid argument"):
            runner.read_window(np.asarray([0], np.int32))
    library.set_copy_limit(2**63)


def test_slots_are_borrowed_for_a_large_chunk_and_filled_again(tmp_path):
    """Where memory is short: the same bits in prompts and windows, while other experts change places."""
    sizes = dataclasses.replace(BLOCKY, drafts=0, layers=2, experts=12)
    path = make_model(tmp_path / "m.gguf", sizes, types={"*_exps*": 8, "*_shexp.*": 8}).path
    prompt = np.random.default_rng(3).integers(0, BLOCKY.vocab, TILE + 8, np.int32)
    with open_pack(path) as pack:
        full = make_runner(pack, Backend("emulated"), 2)
        wanted = read(full, prompt)
        with emulating(Backend("emulated"), capability=9):
            wanted_of_9 = read(full, prompt)
        full.close()
        steps = StepSizes(tile_rows=TILE, chunk_tiles=2, on_gpu=True)
        memory = CHUNK_SHARE * chunk_bytes(pack.config, steps) // MIB  # a little less than it wants
        flags = {"expert_cache": 21, "adapt_every": 1, "adapt_swaps": 4}
        runner = make_runner(pack, Backend("emulated"), 2, device_memory_mib=memory, **flags)
        parts = [read(runner, prompt, windows=7)]
        with emulating(Backend("emulated"), capability=9):
            parts.append(read(runner, prompt, windows=0))
        fail_to_fill_slots(runner)
        parts += [runner.read_window(np.asarray([token], np.int32)).copy() for token in range(3)]
        faults, counters = runner.tiers.experts.audit(), runner.tiers.experts.counters()
        prompt_plan, placed = runner.tiers.plan.prompt, runner.tiers.plan.placement
        tiers = runner.tiers.experts.tiers()
        runner.close()

    assert same_bits(parts[0][:4], wanted)
    assert same_bits(np.concatenate(parts[1:]), wanted_of_9)
    assert prompt_plan.scratch_bytes > 0
    lent = prompt_plan.lent_experts(placed)
    assert (tiers[lent] == Tier.PRIMARY).all()
    assert counters["swaps_primary"] > 0
    copied = counters["experts_streamed"] + counters["experts_unrouted"]
    assert copied == 2 * (placed.count(Tier.HOST) + lent.sum())
    assert faults == []


def test_gives_its_memory_back(tmp_path):
    library = Backend("emulated").library
    with open_pack(tiny_model(tmp_path)) as pack:
        before = library.device_bytes(), library.pinned_bytes()
        make_runner(pack, Backend("emulated"), expert_cache=5).close()

        assert (library.device_bytes(), library.pinned_bytes()) == before


def test_refuses_a_ring_that_is_too_small(pack, backend):
    with pytest.raises(UsageError, match="--prefill_ring=1: 0 or at least 2 slots expected"):
        make_runner(pack, backend, expert_cache=0, prefill_ring=1)
