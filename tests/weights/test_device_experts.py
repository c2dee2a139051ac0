"""A whole model on a device: emulated here, real with --gpu."""

import importlib.resources

import jax
import numpy as np
import pytest

from strata_jax.config import TILE_ROWS, TierSettings
from strata_jax.engine.device_sampling import DeviceSampling
from strata_jax.engine.request import SamplingSettings
from strata_jax.engine.runner import Runner, RunnerOptions
from strata_jax.engine.sampling import Sampler
from strata_jax.errors import CapacityError, StrataError, UsageError
from strata_jax.ops.native import Backend
from strata_jax.weights.device_experts import DeviceExperts
from strata_jax.weights.pack import open_pack
from strata_jax.weights.placement import Tier
from strata_jax.weights.profile import Profile, routed_model
from tests.stalls import FOR_GOOD_MS, reset_at_last

IDS = (np.arange(13, dtype=np.int32) * 37 + 11) % 4000
BACKENDS = [
    pytest.param(Backend("emulated"), id="emulated"),
    pytest.param(Backend("cuda"), id="cuda", marks=pytest.mark.gpu),
]

WINDOWS = 8
"""In which experts move, in each of two passes: an emulated device takes half a second for each."""


@pytest.fixture(scope="module")
def pack():
    name = importlib.resources.files("strata_jax") / "models/strata-small/model-IQ3_S.gguf"
    with importlib.resources.as_file(name) as path, open_pack(path) as opened:
        yield opened


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request) -> Backend:
    return request.param


def make_runner(pack, backend: Backend, **tiers) -> Runner:
    options = RunnerOptions(max_context=300, backend=backend, tiers=TierSettings(**tiers))
    return Runner(pack, pack.config, options, lambda _: None)


def read(runner: Runner, steps: int) -> np.ndarray:
    """Logits of the prompt and of `steps` greedy tokens, [13 + steps, V]."""
    runner.reset()
    parts = [runner.read_window(IDS[:8]).copy(), runner.read_window(IDS[8:]).copy()]
    for _ in range(steps):
        token = np.array([parts[-1][-1].argmax()], np.int32)
        parts.append(runner.read_window(token).copy())
    return np.concatenate(parts)


def kl(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Kullback-Leibler divergence of softmax(p) from softmax(q), a row each, in nats."""

    def log_softmax(x: np.ndarray) -> np.ndarray:
        x = x.astype(np.float64)
        x -= x.max(axis=1, keepdims=True)
        return x - np.log(np.exp(x).sum(axis=1, keepdims=True))

    p, q = log_softmax(p), log_softmax(q)
    return (np.exp(p) * (p - q)).sum(axis=1)


@pytest.fixture(scope="module")
def resident(pack, backend: Backend):
    """A runner with every expert in the device's memory."""
    runner = make_runner(pack, backend)
    yield runner
    runner.close()


@pytest.fixture(scope="module")
def logits(resident: Runner) -> np.ndarray:
    return read(resident, 4)


@pytest.fixture(scope="module")
def more_logits(resident: Runner) -> np.ndarray:
    return read(resident, WINDOWS)


def test_gives_nearly_the_logits_of_the_cpu(pack, logits):
    """The dense part need not agree bit for bit across platforms (design.md)."""
    with jax.default_device(jax.devices("cpu")[0]):
        runner = make_runner(pack, Backend("cpu"))
        expected = read(runner, 4)
        runner.close()

    # A sum in another order can move an activation over the border between two int8 codes, which
    # changes logits by a per cent or two; what a reader would notice is the distribution.
    divergence = kl(expected, logits)
    assert divergence.mean() < 2e-3, divergence
    assert (logits.argmax(axis=1) == expected.argmax(axis=1)).mean() >= 0.9


@pytest.mark.parametrize(("experts", "share"), [(0, None), (40, 0.0), (40, 0.5), (0, 1.0)])
def test_gives_the_same_bits_wherever_experts_lie(
    pack, backend: Backend, logits, experts: int, share: float | None
):
    runner = make_runner(pack, backend, expert_cache=experts, pcie_frac=share)
    got = read(runner, 4)
    counters = runner.tiers.experts.counters()
    runner.close()

    np.testing.assert_array_equal(got.view(np.uint32), logits.view(np.uint32))
    if share is not None:
        assert (counters["entries_stream"] > 0) == (share > 0)
        assert counters["entries_stream_frac"] == counters["entries_stream"]
        assert (counters["entries_host"] > 0) == (share < 1)
    assert (counters["entries_primary"] > 0) == (experts > 0)
    active, layers = pack.config.num_experts_active, pack.config.num_layers
    routed = sum(counters[f"entries_{tier}"] for tier in ("primary", "stream", "host"))
    assert routed == len(got) * active * layers


def test_moves_experts_between_windows_and_keeps_the_bits(pack, backend: Backend, more_logits):
    flags = {"expert_cache": 3 * pack.config.num_layers, "adapt_every": 1, "adapt_swaps": 8}
    runner = make_runner(pack, backend, pcie_frac=0.5, **flags)
    before = runner.tiers.experts.tiers()
    got = read(runner, WINDOWS)
    again = read(runner, WINDOWS)
    experts = runner.tiers.experts
    counters, after, faults = experts.counters(), experts.tiers(), experts.audit()
    runner.close()

    np.testing.assert_array_equal(got.view(np.uint32), more_logits.view(np.uint32))
    np.testing.assert_array_equal(again.view(np.uint32), more_logits.view(np.uint32))
    assert counters["swaps_primary"] > 8
    assert counters["bytes_swapped"] > 0
    assert (before != after).any()
    assert (before == 1).sum() == (after == 1).sum()
    assert faults == []


@pytest.mark.parametrize(("peer_device", "peer_link"), [("loopback", None), (1, "host")])
def test_moves_experts_on_the_peer_too(
    pack, backend: Backend, more_logits, tmp_path, peer_device, peer_link: str | None
):
    if peer_device == 1 and backend.library.device_count() < 2:
        pytest.skip("needs two GPUs")
    layers, experts = pack.config.num_layers, pack.config.num_experts
    # Without one the peer holds whole layers, where nothing is left to swap in.
    ranking = [(layer, expert) for expert in range(experts) for layer in range(layers)]
    Profile(model=routed_model(pack), ranked=tuple(ranking)).save(tmp_path / "ranking")
    runner = make_runner(
        pack,
        backend,
        expert_cache=2 * layers,
        peer_slots=3 * layers,
        peer_device=peer_device,
        peer_link=peer_link,
        expert_profile=tmp_path / "ranking",
        adapt_every=1,
        adapt_swaps=8,
    )
    before = runner.tiers.experts.tiers()
    got = read(runner, WINDOWS)
    again = read(runner, WINDOWS)
    counters, after = runner.tiers.experts.counters(), runner.tiers.experts.tiers()
    faults = runner.tiers.experts.audit()
    runner.close()

    np.testing.assert_array_equal(got.view(np.uint32), more_logits.view(np.uint32))
    np.testing.assert_array_equal(again.view(np.uint32), more_logits.view(np.uint32))
    assert counters["swaps_primary"] > 8
    assert counters["swaps_peer"] > 8
    for tier in (Tier.PRIMARY, Tier.PEER):
        assert (before == tier).sum() == (after == tier).sum() > 0
        assert (before == tier).tolist() != (after == tier).tolist()
    assert faults == []


def test_ends_a_step_that_the_host_leaves_alone_and_serves_the_next(pack, backend: Backend, logits):
    runner = make_runner(pack, backend, expert_cache=0, pcie_frac=0.0)
    read(runner, 0)  # compiled and warm
    assert isinstance(runner.tiers.experts, DeviceExperts)
    runner.tiers.experts.stall(milliseconds=FOR_GOOD_MS, timeout_ms=200)
    with pytest.raises(StrataError, match="no sign of life for 200 ms; ask again"):
        read(runner, 4)
    with pytest.raises(AssertionError, match="reset"):
        runner.read_window(IDS[:1])
    runner.tiers.experts.stall(milliseconds=0, timeout_ms=60_000)
    reset_at_last(runner)
    got = read(runner, 4)
    runner.close()

    np.testing.assert_array_equal(got.view(np.uint32), logits.view(np.uint32))


def test_says_that_a_peer_sent_no_rows_and_serves_the_next(
    pack, backend: Backend, logits, monkeypatch
):
    """The small model's kernels start behind the peer's, so what the device says is put in its mouth;
    tests/ops/test_expert_ffn_tiers.py has kernels that give up."""
    runner = make_runner(pack, backend, expert_cache=78, peer_device="loopback", peer_slots=50)
    experts = runner.tiers.experts
    assert isinstance(experts, DeviceExperts)
    store, lost = experts._native, iter([False, True])
    monkeypatch.setattr(experts, "_native", SilentPeer(store, lost))
    with pytest.raises(StrataError, match="peer's rows of a layer did not come in time"):
        read(runner, 4)
    got = read(runner, 4)
    runner.close()

    np.testing.assert_array_equal(got.view(np.uint32), logits.view(np.uint32))


class SilentPeer:
    """A store whose peer is said to be silent when asked as `lost` says, and no more afterwards."""

    def __init__(self, store, lost):
        self._store, self._lost = store, lost

    def __getattr__(self, name: str):
        return getattr(self._store, name)

    def peer_aborted(self) -> bool:
        return next(self._lost, False)


@pytest.mark.parametrize(
    ("peer_device", "peer_link", "on_primary"),
    [("loopback", None, 40), (1, None, 78), (1, "host", 40)],
)
def test_gives_the_same_bits_whichever_way_a_peer_is_reached(
    pack, backend: Backend, logits, peer_device, peer_link: str | None, on_primary: int
):
    """With 78 experts on the primary and 50 on the peer none is elsewhere."""
    if peer_device == 1 and backend.library.device_count() < 2:
        pytest.skip("needs two GPUs")
    runner = make_runner(
        pack,
        backend,
        expert_cache=on_primary,
        peer_device=peer_device,
        peer_slots=50,
        peer_link=peer_link,
    )
    got = read(runner, 4)
    counters = runner.tiers.experts.counters()
    faults, notes = runner.tiers.experts.audit(), runner.notes
    runner.close()

    np.testing.assert_array_equal(got.view(np.uint32), logits.view(np.uint32))
    assert faults == []
    assert any(note.startswith("peer: rows ") for note in notes)
    assert counters["entries_primary"] > 0
    assert counters["entries_peer"] > 0
    missed = counters["entries_stream"] + counters["entries_host"]
    assert (missed > 0) == (on_primary == 40)
    tiers = ("primary", "peer", "stream", "host")  # on a GPU the host takes its measured share
    routed = sum(counters[f"entries_{name}"] for name in tiers)
    assert routed == len(got) * pack.config.num_experts_active * pack.config.num_layers


def test_gives_back_what_a_peer_had(pack):
    library = Backend("emulated").library
    before = library.device_bytes(), library.pinned_bytes()

    make_runner(pack, Backend("emulated"), expert_cache=40, peer_device=1, peer_slots=8).close()

    assert (library.device_bytes(), library.pinned_bytes()) == before


def test_refuses_a_peer_that_is_not_there(pack, backend: Backend):
    count = backend.library.device_count()

    with pytest.raises(UsageError, match=f"--peer_device={count}: there is no such device, 0 to "):
        make_runner(pack, backend, expert_cache=40, peer_device=count)


def test_finds_the_ids_that_the_logits_say(resident: Runner, logits):
    """With a step in the queue while the host looks at the last one's id."""
    expected = logits[12:].argmax(axis=1).tolist()
    resident.reset()
    resident.read_window(IDS[:8])
    resident.read_window(IDS[8:])

    assert list(resident.best_ids(expected[0], 4)) == expected[1:]


def test_draws_the_ids_that_the_host_draws(resident: Runner):
    chosen = SamplingSettings(temperature=0.8, top_k=20, top_p=0.9, repetition_penalty=1.1, seed=3)

    def start() -> Sampler:
        resident.reset()
        resident.read_window(IDS[:8])
        return Sampler(chosen, tuple(IDS[:8].tolist()), resident.config.vocab_size)

    sampler, token, expected = start(), 17, []
    for _ in range(5):
        token = sampler.pick(resident.read_window(np.asarray([token]))[0], resident.position)
        expected.append(token)
    sampling = DeviceSampling(
        chosen, start(), resident.placing.sharding, resident.placing.result_sharding
    )

    assert list(resident.best_ids(17, 5, sampling)) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("backend", [Backend("cuda")], ids=["cuda"], indirect=True)
def test_windows_write_what_they_find_where_that_of_the_one_before_lay(resident: Runner):
    """A captured graph is told of every other address: that takes the host longer than many a step."""

    def addresses() -> list[int]:
        leaves = jax.tree.leaves((resident._state, resident._results, resident._best))
        return [leaf.unsafe_buffer_pointer() for leaf in leaves if leaf.size]

    resident.reset()
    resident.read_window(IDS[:8])
    before = addresses()
    resident.read_window(IDS[8:10])

    assert addresses() == before


def test_refuses_to_record_routing(resident: Runner):
    with pytest.raises(UsageError, match="--platform=cpu records"):
        resident.tiers.experts.record_routing(True)


def test_says_how_much_memory_is_missing_before_it_takes_any(pack, backend: Backend):
    with pytest.raises(CapacityError, match="MiB"):
        make_runner(pack, backend, device_memory_mib=1)


def test_finds_every_expert_as_the_file_has_it(resident: Runner, logits):
    assert resident.tiers.experts.audit() == []


def test_enables_access_to_a_peer_as_often_as_it_likes():
    """That it is enabled already is no error, and none stays behind for the next launch to find."""
    library = Backend("emulated").library

    assert [library.enable_peer_access(0, 1) for _ in range(3)] == ["", "", ""]
    assert library.last_error() == "cudaSuccess"
    assert "cannot reach" in library.enable_peer_access(0, 2)
    assert library.last_error() == "cudaSuccess"


@pytest.mark.gpu
@pytest.mark.parametrize("peer", [{}, {"peer_device": "loopback", "peer_slots": 50}])
def test_runs_no_handler_after_the_warm_up(pack, peer: dict):
    """A replayed graph asks nobody, and follows new ids and new routing all the same."""
    backend = Backend("cuda")
    runner = make_runner(pack, backend, expert_cache=78, **peer)

    def found() -> list[int]:
        runner.reset()
        runner.read_window(IDS[:8])
        return list(runner.best_ids(int(IDS[8]), 24))

    expected, ids = read(runner, 4), found()
    assert (found(), read(runner, 4)[0, 0]) == (ids, expected[0, 0])
    before = backend.library.handler_calls()
    got, again = read(runner, 4), found()
    after = backend.library.handler_calls()
    runner.close()

    np.testing.assert_array_equal(got.view(np.uint32), expected.view(np.uint32))
    assert again == ids
    assert after == before


@pytest.mark.gpu
def test_a_first_prompt_compiles_nothing(pack):
    """What a prompt needs is there once the runner is ready."""
    compiled = []

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(duration_secs)

    rows = TILE_ROWS["cuda"]
    options = RunnerOptions(max_context=2 * rows + 8, backend=Backend("cuda"), tiers=TierSettings())
    runner = Runner(pack, pack.config, options, lambda _: None)
    jax.monitoring.register_event_duration_secs_listener(listen)
    runner.reset()
    ids = (np.arange(2 * rows + 8, dtype=np.int32) * 37 + 11) % 4000
    for begin in (0, rows):
        runner.read_tile(ids[begin : begin + rows], want_logits=False)
    runner.read_window(ids[2 * rows :])
    jax.monitoring.unregister_event_duration_listener(listen)
    runner.close()

    assert compiled == []
