"""What memory there is, and what a model takes of it before the first expert is placed.

Sizes of workspaces are upper bounds from the model's settings alone, so that they are known before
anything is compiled: JAX's temporaries and the native ops' own buffers of the largest tile, window
and context. A test compares them with what XLA reports.
"""

import contextlib
import dataclasses
import resource
from collections.abc import Iterable
from pathlib import Path

import psutil

from strata_jax.config import TILE_ROWS, ModelConfig

MIB, GIB = 1 << 20, 1 << 30
_FLOAT = 4
_CAP_IPC_LOCK = 14
"""Number of the capability that lifts the limit on locked memory. Source: capabilities(7)."""
_SELECTING_ROWS = 64
"""Rows whose selection scores are there at once: one per thread."""
_SCORE_BYTES = 8
_TILE_SCORE_BYTES = 4
_MOST_TILE_SCORES = 128 * MIB
"""On a GPU all rows of a tile at once, as far as this goes (`ffi/cuda/ops/qsa_select.cu`)."""
_STREAM_SLOTS = 16
"""Streamed experts that are copied at once; more take several rounds."""
XLA_BYTES = 512 * MIB
"""Of XLA's share of a GPU: the vectors of the model, constants and what XLA keeps for itself."""
CUDA_RUNTIME_BYTES = XLA_BYTES + 88 * MIB
"""What a process takes of a GPU beside what the plan names: the above, loaded kernels with their local memory,
captured graphs. Measured on an H200: 533 to 594 MiB, 580 with 48 layers."""
SWAP_SPARES = 16
"""Experts of one size that change places at once on a GPU, each with spare room on both sides."""
CHUNK_SHARE = 8
"""Auto lets the workspace of a chunk take at most this part of a GPU's memory."""
MOST_AUTO_CHUNK = 8192
"""Rows of a chunk that auto makes on a GPU: enough for a third of the experts over PCIe 5 beside the
products (numerics.md, "Budgets")."""
_CACHE_GRAIN = 128
"""Tokens; at least that of `num_cells` in model/state.py."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostMemory:
    """RAM of this machine or, where that is less, of the control group this process is in."""

    total_bytes: int
    available_bytes: int
    """Free, or used by caches that give way."""
    lockable_bytes: int | None
    """What this process may page-lock (`ulimit -l`); None = no limit."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepSizes:
    """Sizes of the compiled programs."""

    tile_rows: int = TILE_ROWS["cpu"]
    window_rows: int = 8
    all_logits: bool = False
    """Tiles give the logits of every row."""
    chunk_tiles: int | None = 1
    """Most tiles that one program reads; None = not chosen yet (`choose_chunk`)."""
    lends: bool | None = None
    """Whether experts of programs of more than a tile are computed in borrowed slots (`prompt_plan.py`);
    None = not chosen yet."""
    on_gpu: bool = False
    """Whether it is a GPU that runs them: XLA keeps less at once there."""

    @property
    def chunk_rows(self) -> int:
        """Rows of the largest program."""
        assert self.chunk_tiles is not None, "choose_chunk comes first"
        return self.chunk_tiles * self.tile_rows

    @property
    def tile_widths(self) -> tuple[int, ...]:
        """Rows of the programs for prompts, ascending: a tile, then always twice as many, a chunk."""
        widths = [self.tile_rows]
        while widths[-1] < self.chunk_rows:
            widths.append(min(2 * widths[-1], self.chunk_rows))
        return tuple(widths)


def host_memory(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> HostMemory:
    """Measures.

    Args:
        proc: where the kernel describes this process.
        groups: where control groups are.
    """
    memory = psutil.virtual_memory()
    total, available = memory.total, memory.available
    for limit, used in _group_limits(proc, groups):
        if limit < total:
            total = limit
        available = min(available, max(0, limit - used))
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = soft == resource.RLIM_INFINITY or _may_lock(proc)
    return HostMemory(
        total_bytes=total,
        available_bytes=available,
        lockable_bytes=None if unlimited else soft,
    )


def workspace_bytes(
    config: ModelConfig, steps: StepSizes, max_context: int, kv_bytes_per_token: int
) -> int:
    """Upper bound of what chunks, windows and selection over the whole context need at once.

    Caches reach a chunk and a grain past the context, because the last chunk is padded: that counts
    here, too.
    """
    rows = chunk_bytes(config, steps)
    rows += _rows_bytes(config, steps.window_rows, steps.window_rows, steps.on_gpu)
    if config.index_budget:
        blocks = -(-max_context // config.index_ratio)
        of_threads = min(_SELECTING_ROWS, steps.chunk_rows) * blocks * _SCORE_BYTES
        of_tile = min(steps.chunk_rows * blocks * _TILE_SCORE_BYTES, _MOST_TILE_SCORES)
        rows += max(of_threads, of_tile)
    return rows + (steps.chunk_rows + _CACHE_GRAIN) * kv_bytes_per_token


def chunk_bytes(config: ModelConfig, steps: StepSizes) -> int:
    """Upper bound of what programs for prompts need at once, those of a tile and those of a chunk.

    What experts need where slots are borrowed for it is left out.
    """
    whole, tile = (
        _rows_bytes(config, rows, rows if steps.all_logits else 1, steps.on_gpu)
        for rows in (steps.chunk_rows, steps.tile_rows)
    )
    lent = expert_rows_bytes(config, steps.chunk_rows) if steps.lends else 0
    return max(whole - lent, tile)


def expert_rows_bytes(config: ModelConfig, rows: int) -> int:
    """Upper bound of what a layer's experts need at once: hidden and result rows of each entry."""
    per_row = (config.num_experts_active + 1) * (config.expert_width + config.hidden)
    return _FLOAT * rows * per_row


def choose_chunk(config: ModelConfig, steps: StepSizes, memory_bytes: int | None) -> StepSizes:
    """The sizes with the tiles of a chunk, if they were not chosen.

    One tile where nothing bounds the memory (the CPU, which streams nothing) and where every row's
    logits are kept; else a power of two.

    Args:
        config: of the model.
        steps: sizes of the compiled programs.
        memory_bytes: of a GPU.
    """
    if steps.chunk_tiles is not None:
        return steps
    tiles = 1
    if memory_bytes is not None and not steps.all_logits:
        while 2 * tiles * steps.tile_rows <= MOST_AUTO_CHUNK:
            twice = dataclasses.replace(steps, chunk_tiles=2 * tiles, lends=False)
            if chunk_bytes(config, twice) > memory_bytes // CHUNK_SHARE:
                break
            tiles *= 2
    return dataclasses.replace(steps, chunk_tiles=tiles)


def peer_workspace_bytes(config: ModelConfig, steps: StepSizes, rows: int | None = None) -> int:
    """Upper bound of a peer's workspace: activations in, hidden and result rows of every expert.

    Args:
        config: of the model.
        steps: sizes of the compiled programs.
        rows: most that the peer computes at once; None = those of the largest program.
    """
    rows = max(steps.chunk_rows, steps.window_rows) if rows is None else rows
    per_entry = config.expert_width + config.hidden
    return rows * _FLOAT * (2 * config.hidden + config.num_experts_active * per_entry)


def peer_result_bytes(config: ModelConfig, steps: StepSizes) -> int:
    """What a GPU's peer leaves on the primary: a row of results for every expert of a window's rows."""
    return steps.window_rows * config.num_experts_active * config.hidden * _FLOAT


def lockable_experts(allowed: int, expert_bytes: int) -> int:
    """Bytes of experts that the system's limit allows to lock: it counts the whole pages they touch.

    Each of an expert's three matrices may share a page at either end with what is not locked, and so may
    a table that is locked later.

    Args:
        allowed: bytes that may be locked.
        expert_bytes: of the smallest expert.
    """
    page = resource.getpagesize()
    return (allowed - 2 * page) * expert_bytes // (expert_bytes + 6 * page)


def stream_slots(num_experts: int, stream_share: float) -> int:
    """Copies of streamed experts that there is memory for, taken once at the start.

    Args:
        num_experts: of a layer.
        stream_share: part of the missed experts that is streamed.
    """
    return min(_STREAM_SLOTS, num_experts) if stream_share > 0 else 0


def swap_spare_bytes(slots: Iterable[int]) -> int:
    """Room that a device needs, and page-locked RAM as well, for experts that change places.

    Args:
        slots: bytes of an expert of each layer: those of equal size share spares.
    """
    return SWAP_SPARES * sum(set(slots))


def reserve_bytes(reserve_mib: int, is_given: bool, memory_bytes: int) -> int:
    """What stays free on a device: as given, by default at most an eighth of its memory.

    Source of the eighth: small cards have little to spare (reference-engine.md, section 2.8, lowers
    the reserve there, too).
    """
    wanted = reserve_mib * MIB
    return wanted if is_given else min(wanted, memory_bytes // 8)


def shown(count: int) -> str:
    """Bytes for people."""
    if count < MIB:
        return f"{count} B" if count < 1024 else f"{count / 1024:.1f} KiB"
    return f"{count / MIB:.1f} MiB" if count < GIB else f"{count / GIB:.1f} GiB"


def _rows_bytes(config: ModelConfig, rows: int, head_rows: int, on_gpu: bool) -> int:
    """Values of `rows` rows that are there at once in one layer, and logits of `head_rows`."""
    streams = config.num_streams * config.hidden
    values = config.gdn_value_heads * config.gdn_head_dim
    linear = 2 * config.gdn_key_heads * config.gdn_head_dim + 2 * values
    attention = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    attention += (config.index_heads + 1) * config.index_dim
    experts = expert_rows_bytes(config, 1) // _FLOAT
    # Streams before and after a block, normed, gated and packed for the next; a mixer's input
    # before and after its convolution, its heads and its output.
    per_row = 6 * streams + 4 * config.hidden + 4 * max(linear, attention) + experts
    if on_gpu:
        # Measured at the released sizes: 200 KB a row, 223 with a ring; this is 390.
        per_row = 3 * streams + 2 * config.hidden + 3 * max(linear, attention) // 2 + experts
    per_row += config.num_experts + 2 * config.low_rank
    return _FLOAT * (rows * per_row + head_rows * config.vocab_size)


def _group_limits(proc: Path, groups: Path) -> list[tuple[int, int]]:
    """(limit, bytes that cannot give way) of every control group above this process."""
    found = []
    with contextlib.suppress(OSError):
        for line in (proc / "self/cgroup").read_text().splitlines():
            _, controllers, name = line.split(":", 2)
            is_second = controllers == ""
            if is_second or "memory" in controllers.split(","):
                base = groups if is_second else groups / "memory"
                folder = base / name.lstrip("/")
                for each in (folder, *folder.parents):
                    if each == base or base in each.parents:
                        found += _group_limit(each, is_second)
    return found


def _group_limit(folder: Path, is_second: bool) -> list[tuple[int, int]]:
    """Of one control group; empty without a limit. Files differ between version 1 and 2."""
    names = (
        ("memory.max", "memory.current")
        if is_second
        else (
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
        )
    )
    with contextlib.suppress(OSError, ValueError):  # "max" is no number
        limit, used = (int((folder / name).read_text()) for name in names)
        gives_way = 0
        for line in (folder / "memory.stat").read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == ("inactive_file" if is_second else "total_inactive_file"):
                gives_way = int(value)
        return [(limit, max(0, used - gives_way))]
    return []


def _may_lock(proc: Path) -> bool:
    with contextlib.suppress(OSError):
        for line in (proc / "self/status").read_text().splitlines():
            if line.startswith("CapEff:"):
                return bool(int(line.split()[1], 16) >> _CAP_IPC_LOCK & 1)
    return False
