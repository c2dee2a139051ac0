import dataclasses
import resource
from pathlib import Path

import psutil
import pytest

from strata_jax.cli.files import EMBEDDED
from strata_jax.weights.budget import (
    CUDA_RUNTIME_BYTES,
    GIB,
    MIB,
    StepSizes,
    host_memory,
    peer_workspace_bytes,
    reserve_bytes,
    shown,
    stream_slots,
    workspace_bytes,
)
from strata_jax.weights.pack import open_pack
from strata_jax.weights.plan import kv_bytes_per_token
from tests.weights.tier_plans import make_pack_file, need_of, planner

ROOT = Path(__file__).resolve().parent.parent.parent
MODEL = ROOT.joinpath("strata_jax", *EMBEDDED)
CAP_IPC_LOCK = 1 << 14


@pytest.fixture(scope="module")
def config():
    with open_pack(MODEL) as pack:
        return pack.config


class _Kernel:
    """Files as the kernel shows them to a process."""

    def __init__(self, folder: Path, groups: str, capabilities: int = 0):
        self.proc, self.groups = folder / "proc", folder / "groups"
        self._write(self.proc / "self/cgroup", groups)
        self._write(self.proc / "self/status", f"Name:\tx\nCapEff:\t{capabilities:016x}\n")

    def limit(self, folder: str, limit: int | str, used: int, cache: int, first: bool = False):
        names = ("memory.max", "memory.current", "inactive_file")
        if first:
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        self._write(self.groups / folder / names[0], f"{limit}\n")
        self._write(self.groups / folder / names[1], f"{used}\n")
        self._write(self.groups / folder / "memory.stat", f"anon 5\n{names[2]} {cache}\n")

    def measure(self):
        return host_memory(self.proc, self.groups)

    def _write(self, path: Path, text: str):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_measures_this_machine():
    memory = host_memory()

    assert 0 < memory.available_bytes <= memory.total_bytes <= psutil.virtual_memory().total


def test_knows_the_limits_of_control_groups(tmp_path: Path):
    kernel = _Kernel(tmp_path, "0::/outer/inner\n")
    kernel.limit("outer", 512 * MIB, used=300 * MIB, cache=100 * MIB)
    kernel.limit("outer/inner", "max", used=300 * MIB, cache=0)

    memory = kernel.measure()

    assert (memory.total_bytes, memory.available_bytes) == (512 * MIB, 312 * MIB)


def test_knows_control_groups_of_version_1(tmp_path: Path):
    kernel = _Kernel(tmp_path, "4:cpu:/\n3:memory,x:/a\n0::/\n")
    kernel.limit("memory/a", 64 * MIB, used=70 * MIB, cache=0, first=True)
    kernel.limit("memory", 1 << 62, used=0, cache=0, first=True)

    memory = kernel.measure()

    assert (memory.total_bytes, memory.available_bytes) == (64 * MIB, 0)


def test_does_without_control_groups(tmp_path: Path):
    memory = host_memory(tmp_path, tmp_path)

    assert memory.total_bytes == psutil.virtual_memory().total


@pytest.mark.parametrize(
    ("limit", "capabilities", "lockable"),
    [
        (8 * MIB, 0, 8 * MIB),
        (8 * MIB, CAP_IPC_LOCK, None),
        (resource.RLIM_INFINITY, 0, None),
        (0, ~CAP_IPC_LOCK & 0xFFFF, 0),
    ],
)
def test_knows_what_may_be_locked(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    limit: int,
    capabilities: int,
    lockable: int | None,
):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))

    assert _Kernel(tmp_path, "", capabilities).measure().lockable_bytes == lockable


def test_workspaces_grow_with_what_they_are_for(config):
    def size(context: int = 4096, **steps) -> int:
        kv = kv_bytes_per_token(config, "f32")
        return workspace_bytes(config, StepSizes(**steps), context, kv)

    assert size(tile_rows=512) > size()
    assert size(window_rows=64) > size()
    assert size(context=1 << 18) > size()
    assert size(all_logits=True) - size() == 255 * config.vocab_size * 4
    dense = dataclasses.replace(config, index_budget=0)
    kv = kv_bytes_per_token(dense, "f32")
    assert workspace_bytes(dense, StepSizes(), 4096, kv) == workspace_bytes(
        dense, StepSizes(), 1 << 18, kv
    )


def test_the_peers_workspace_grows_with_the_larger_program(config):
    tile = peer_workspace_bytes(config, StepSizes())

    assert peer_workspace_bytes(config, StepSizes(window_rows=64)) == tile
    assert peer_workspace_bytes(config, StepSizes(tile_rows=512)) == 2 * tile


@pytest.mark.parametrize("all_logits", [False, True])
def test_workspaces_cover_what_xla_asks_for(config, all_logits: bool):
    from strata_jax.engine import runner

    context = 2048
    options = runner.RunnerOptions(max_context=context, window_rows=8, all_logits=all_logits)
    with open_pack(MODEL) as pack:
        running = runner.Runner(pack, config, options, lambda _: None)
        programs = [running._programs.window, *running._programs.tiles.values()]
        asked = 0
        for program in programs:
            memory = program.memory_analysis()
            assert memory is not None
            made = memory.output_size_in_bytes - memory.alias_size_in_bytes
            asked += memory.temp_size_in_bytes + max(0, made)
        running.close()

    kv = kv_bytes_per_token(config, "f32")
    assert asked < workspace_bytes(config, StepSizes(all_logits=all_logits), context, kv)


@pytest.mark.parametrize(
    ("experts", "share", "slots"), [(512, 0.0, 0), (512, 0.001, 16), (512, 1.0, 16), (4, 1.0, 4)]
)
def test_copies_of_streamed_experts_are_as_many_at_every_share(experts, share, slots):
    assert stream_slots(experts, share) == slots


def test_steps_are_the_engines():
    source = (ROOT / "strata_jax/engine/runner_options.py").read_text()

    assert f"window_rows: int = {StepSizes().window_rows}\n" in source


@pytest.mark.parametrize(
    ("mib", "is_given", "memory", "expected"),
    [
        (700, False, 24 * GIB, 700 * MIB),
        (700, False, 64 * MIB, 8 * MIB),
        (700, True, 64 * MIB, 700 * MIB),
        (0, True, 64 * MIB, 0),
    ],
)
def test_a_default_reserve_shrinks_on_small_devices(mib, is_given, memory, expected):
    assert reserve_bytes(mib, is_given, memory) == expected


@pytest.mark.parametrize(
    ("count", "expected"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 * MIB, "3.0 MiB"), (5 * GIB, "5.0 GiB")],
)
def test_shows_bytes_with_their_unit(count: int, expected: str):
    assert shown(count) == expected


def test_what_a_gpus_process_takes_is_planned_also_for_a_count_of_experts(tmp_path: Path):
    """A count does away with the reserve, not with XLA's own memory and the loaded kernels."""
    with open_pack(make_pack_file(tmp_path)) as pack:
        flags = {"platform": "cuda", "free": (2 * GIB, None), "expert_cache": 4}
        bare = need_of(planner(pack)(**flags), "primary")
        real = need_of(planner(pack)(**flags, runtime=CUDA_RUNTIME_BYTES), "primary")

    assert bare.parts["reserve"] == real.parts["reserve"] == 0
    assert real.need_bytes - bare.need_bytes == real.parts["runtime"] == CUDA_RUNTIME_BYTES
