"""Frozen settings of a model and of its tiers, and what the environment says.

The model's settings are parsed from a file's metadata by `weights/metadata.py`, the tiers' from the
command line by `cli/tier_flags.py`. Nothing else reads environment variables.
"""

import contextlib
import dataclasses
import math
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args

from strata_jax.errors import UsageError

LayerKind = Literal["linear", "attention"]
Platform = Literal["cpu", "cuda"]
"""Where the model runs."""

TILE_ROWS: Mapping[Platform, int] = {"cpu": 256, "cuda": 2048}
"""Rows of a prompt tile. Bits depend on them (numerics.md, contract C)."""

MAX_CONTEXT = 1 << 24
"""Most positions of a cache."""
MOST_DRAFTS = 7
"""Drafts of a window: as many as the recurrent state has room for."""

NgramIo = Literal["direct", "mmap", "ram"]
KvType = Literal["fp16", "int8", "f32"]
"""How keys and values are cached (`ops/cells.py`); the first is the default."""

HiddenNorm = Literal["whole", "per_stream"]
"""What the root mean square of a draft layer's hidden norm spans: all residual streams together, or each
alone. Engines disagree (gguf.md, "Disagreement between implementations"); answers do not depend on it."""

LOOPBACK = "loopback"
PeerLink = Literal["p2p", "host"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class NgramConfig:
    """The hashed n-gram embedding (`docs`: model.md section 7; file keys `qwen4exp.ple.*`)."""

    layer: int
    """0-based layer before whose read the embedding is added."""
    ngram_size: int
    """Longest n-gram in tokens, 3 in the released model."""
    heads_per_ngram: int
    """Hash heads for each n-gram length 2..ngram_size."""
    conv_kernel: int
    """Taps of the depthwise causal convolution; they lie `ngram_size` tokens apart."""
    eos_id: int
    """Token that ends a segment and pads short histories."""
    image_id: int
    """Token hashed at image positions."""
    row_width: int
    """Values in one table row."""
    num_rows: int
    """Rows of the table, padding included."""
    multipliers: tuple[int, ...]
    """Odd hash multipliers, one per n-gram place (up to 63 bits)."""
    head_offsets: tuple[int, ...]
    """First table row of each head."""
    head_sizes: tuple[int, ...]
    """Prime modulus of each head."""

    @property
    def num_heads(self) -> int:
        """Table rows read per token."""
        return len(self.head_sizes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes of a qwen4exp model, in words (letters are axes only)."""

    hidden: int
    num_layers: int
    """Trunk layers; draft layers are not counted."""
    layer_kinds: tuple[LayerKind, ...]
    num_draft_layers: int
    num_streams: int
    """Parallel residual streams (hyper-connections)."""
    low_rank: int
    """Inner width of the hyper-connection mixers."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_dim: int
    """Leading values of a head that are rotated."""
    rope_theta: float
    rope_sections: tuple[int, ...]
    num_experts: int
    num_experts_active: int
    expert_width: int
    shared_width: int
    conv_kernel: int
    gdn_head_dim: int
    """Width of a key and of a value head of the gated delta net."""
    gdn_key_heads: int
    gdn_value_heads: int
    index_heads: int
    index_dim: int
    index_budget: int
    """Tokens a query may attend to beside the tail; 0 = dense attention."""
    index_ratio: int
    """Tokens per selection block."""
    vocab_size: int
    context_length: int
    eps: float
    ngram: NgramConfig | None
    eos_id: int
    """Token that ends an answer (`tokenizer.ggml.eos_token_id`)."""


_PEER_STREAM = "STRATA_PF_PEER_STREAM"
_XLA_MEMORY = (
    "XLA_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_PREALLOCATE",
)
"""Variables that decide how much of a GPU XLA takes, and when; the first is the current name. Which
allocator takes it stays the user's choice: see `unreachable_xla_memory`."""


def environment_notes(*, has_peer: bool = False) -> tuple[str, ...]:
    """One line for every environment variable that is set although it decides nothing here.

    Args:
        has_peer: whether --peer_device names one.
    """
    notes = []
    if not has_peer and (share := os.environ.get(_PEER_STREAM)):
        notes.append(
            f"{_PEER_STREAM}={share} has no effect: there is no peer; --peer_device=N adds one"
        )
    if os.environ.get("STRATA_MMQ_NO_STREAMK", "0") not in ("", "0"):
        notes.append("STRATA_MMQ_NO_STREAMK: always on here, sums have one order")
    for name in ("JAX_PLATFORMS", "JAX_PLATFORM_NAME"):
        value = os.environ.get(name, "")
        if value not in ("", "cpu"):
            notes.append(f"{name}={value} has no effect: --platform decides")
    for name in _XLA_MEMORY:
        if os.environ.get(name):
            notes.append(f"{name}={os.environ[name]} has no effect: the plan decides")
    return tuple(notes)


def wants_prefill_timing() -> bool:
    """Whether the environment asks for what --prefill_timing does; UsageError for other than 0 and 1."""
    value = os.environ.get("STRATA_PREFILL_TIMING") or "0"
    if value not in ("0", "1"):
        raise UsageError(f"STRATA_PREFILL_TIMING={value}: 0 or 1 expected")
    return value == "1"


def environment_peer_stream() -> float | None:
    """What the environment gives for --peer_stream.

    Raises:
        UsageError: if it is no number from 0 to 1.
    """
    value = os.environ.get(_PEER_STREAM, "")
    if not value:
        return None
    try:
        share = float(value)
    except ValueError:
        share = math.nan
    if not 0 <= share <= 1:
        raise UsageError(f"{_PEER_STREAM}={value}: a number from 0 to 1 expected")
    return share


def user_cache_dir() -> pathlib.Path | None:
    """Where this user's caches live (XDG base directory specification); None without a home."""
    base = pathlib.Path(os.environ.get("XDG_CACHE_HOME", ""))
    if base.is_absolute():  # the specification: relative paths are to be ignored
        return base / "strata_jax"
    try:
        return pathlib.Path.home() / ".cache" / "strata_jax"
    except RuntimeError:
        return None


def number_devices_as_the_driver() -> None:
    """Device N is what nvidia-smi calls N among the visible ones; before CUDA's first call.

    CUDA's own order begins with the fastest. An order that the user chose is kept.
    """
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")


@contextlib.contextmanager
def reserve_xla_memory(share: float) -> Iterator[None]:
    """Lets XLA take this share of a GPU's memory, at once, if its backend starts meanwhile.

    What the user's own variables say is overruled: experts and matrices were given the rest, and either
    side would run out in the middle of a prompt. `environment_notes` names them. Source: jax-ffi.md,
    section 5 (names as of jaxlib 0.11).
    """
    before = {name: os.environ.pop(name) for name in _XLA_MEMORY if name in os.environ}
    os.environ[_XLA_MEMORY[0]] = f"{share:.4f}"
    try:
        yield
    finally:
        del os.environ[_XLA_MEMORY[0]]
        os.environ.update(before)


def unreachable_xla_memory() -> str:
    """Why no other device reaches what XLA allocates; empty if nothing stands in the way.

    Access between devices is enabled for memory of cudaMalloc. Source: jax-ffi.md, section 5.
    """
    for name in ("XLA_CLIENT_ALLOCATOR", "XLA_PYTHON_CLIENT_ALLOCATOR"):
        value = os.environ.get(name, "")
        if value.lower() not in ("", "default", "bfc", "platform"):
            return f"{name}={value} allocates memory that no other device reaches"
    return ""


def loader_environment() -> dict[str, str]:
    """Variables that decide which shared libraries and devices a process sees, as far as set."""
    names = (
        "LD_LIBRARY_PATH",
        "LD_PRELOAD",
        "CUDA_VISIBLE_DEVICES",
        "CUDA_DEVICE_ORDER",
        "JAX_PLATFORMS",
        "XLA_FLAGS",
        "PYTHONPATH",
    )
    return {name: os.environ[name] for name in names if os.environ.get(name)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftSettings:
    """How the draft layer is used. Fields are named after their flags; answers do not depend on them."""

    mtp: pathlib.Path | None = None
    """File that holds the draft layer; None = the model's own."""
    mtp_window: int = 4096
    """Positions that the draft layer remembers at least; whole blocks before them are dropped."""
    mtp_norm: HiddenNorm = "whole"
    draft_vocab: pathlib.Path | None = None
    """File that names the ids which are drafted (`weights/draft_vocab.py`); None = all."""
    most: int = 3
    """Drafts of a chain."""
    min_probability: float = 0.0
    """A chain ends with the first draft that is less probable."""

    def __post_init__(self) -> None:
        _check_number("mtp_window", self.mtp_window, int, 64, MAX_CONTEXT)
        if self.mtp_norm not in get_args(HiddenNorm):
            expected = ", ".join(get_args(HiddenNorm))
            raise UsageError(f"--mtp_norm={self.mtp_norm}: one of {expected} expected")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TierSettings:
    """Where experts and the n-gram table may lie, and how experts move (design.md, "Tiers").

    Fields are named after their flags. What contradicts itself is refused at once; what depends on
    the devices is refused by `check_devices`, what has no effect is named by `weights/idle_flags.py`.

    Raises:
        UsageError: for values out of range and for contradictions, with the names of both flags.

    Source: meanings and defaults of the reference engine (reference-engine.md, section 1.4), but
    for those design.md gives.
    """

    expert_cache: int | None = None
    """Trunk experts in the primary's slots, counted over all layers; None = auto, 0 = off."""
    expert_cache_fill_all: bool = False
    """Auto goes on behind the pairs that the profile ranks."""
    expert_profile: pathlib.Path | None = None
    """Ranking used for the first fill."""
    expert_profile_save: pathlib.Path | None = None
    """Where the learned ranking is written."""
    vram_reserve_mib: int = 700
    """Left free on the primary; unless `given` at most an eighth of its memory."""
    adapt_every: int = 4
    """Windows from one adaptive round to the next."""
    adapt_swaps: int = 96
    """Most swaps of a round on the primary, over all layers; 0 = frozen."""
    adapt_decay: float = 0.7
    """Factor on the usage after each round."""
    pcie_frac: float | None = None
    """Share of the misses that the primary computes from host memory; None = auto, see
    `stream_share`."""
    pool_workers: int = 0
    """Threads that compute host experts; 0 = on the CPU the ops' own, else one per physical core
    but one."""
    peer_device: int | Literal["loopback"] | None = None
    """Device of the peer tier; None (or -1, which becomes None) = no peer. `LOOPBACK` puts it on the
    primary's own device: all that a second one does, for tests on one."""
    peer_link: PeerLink | None = None
    """How rows reach the peer and come back: from card to card, or through the host's memory; None
    = the first where the driver allows it."""
    peer_reserve_mib: int = 600
    """Left free on the peer; unless `given` at most an eighth of its memory."""
    peer_slots: int = 0
    """Most experts on the peer; 0 = as many as fit."""
    peer_adapt_swaps: int = -1
    """Most swaps of a round on the peer; -1 = as `adapt_swaps`, 0 = frozen."""
    peer_stream: float | None = None
    """Share of the host's experts that a GPU's peer streams over its own link in prompts, and computes;
    None = `PEER_STREAM` of weights/peer_prompts.py, for a loopback peer no part in prompts at all."""
    peer_attention: float | None = None
    """Share of a tile's queries that a GPU's peer takes in sparse attention, the last ones; None = 0.5, for
    a loopback peer 0."""
    prefill_ring: int | None = None
    """Slots of a GPU that experts of the host pass through in prompts; None = auto, 0 = none: they are
    read over the link where they are used."""
    ple_io: NgramIo | None = None
    """How rows of the n-gram table are read; None = mmap for a small table, else direct."""
    host_ram_limit_gib: float | None = None
    """Bounds everything page-locked or copied in host memory; None = what is free."""
    resident_budget_gib: float | None = None
    """Expert bytes kept in RAM, the rest is the file tier; None = what is free."""
    device_memory_mib: int | None = None
    """Bounds the primary's memory; on the CPU it makes one. None = what is free."""
    peer_memory_mib: int | None = None
    """The same for the peer."""
    given: frozenset[str] = frozenset()
    """Names of fields that somebody chose; those that differ from their default are added."""

    def __post_init__(self) -> None:
        if self.peer_device == -1:
            object.__setattr__(self, "peer_device", None)
        changed = {name for name, value in _TIER_DEFAULTS.items() if getattr(self, name) != value}
        object.__setattr__(self, "given", self.given | changed)
        for name, kind, lower, upper in _TIER_RANGES:
            _check_number(name, getattr(self, name), kind, lower, upper)
        if self.ple_io is not None and self.ple_io not in get_args(NgramIo):
            raise UsageError(f"--ple_io={self.ple_io}: one of auto, direct, mmap, ram expected")
        if self.peer_link is not None and self.peer_link not in get_args(PeerLink):
            raise UsageError(f"--peer_link={self.peer_link}: one of auto, p2p, host expected")
        self._check_contradictions()

    def _check_contradictions(self) -> None:
        if self.peer_device == 0:
            raise UsageError(
                "--peer_device=0: device 0 is the primary, another one expected; loopback is a peer on "
                "the primary's device, -1 is no peer"
            )
        if self.peer_device is not None and self.expert_cache == 0:
            raise UsageError(
                f"--peer_device={self.peer_device} and --expert_cache=0 contradict each other: the "
                "peer holds experts that the primary's cache does not; leave out one of them"
            )
        for reserve, memory in (
            ("vram_reserve_mib", "device_memory_mib"),
            ("peer_reserve_mib", "peer_memory_mib"),
        ):
            left, have = getattr(self, reserve), getattr(self, memory)
            if have is not None and reserve in self.given and left >= have:
                raise UsageError(
                    f"--{reserve}={left} and --{memory}={have} contradict each other: nothing is "
                    "left to use; lower the first or raise the second"
                )

    def check_devices(self, platform: str, num_devices: int = 1) -> None:
        """Refuses a peer that this machine does not have.

        Args:
            platform: "cpu" or "cuda".
            num_devices: GPUs that are visible; of no meaning on the CPU.

        Raises:
            UsageError: with the flags' names and what would do.
        """
        if self.peer_device is None:
            return
        flag = f"--peer_device={self.peer_device}"
        if platform == "cpu" and self.peer_device not in (1, LOOPBACK):
            raise UsageError(
                f"{flag}: there is no such device; on the CPU 1 is an emulated peer and -1 is none"
            )
        number = 0 if self.peer_device == LOOPBACK else self.peer_device
        if platform != "cpu" and number >= num_devices:
            raise UsageError(
                f"{flag}: there is no such device, 0 to {num_devices - 1} are visible; "
                "CUDA_VISIBLE_DEVICES decides which are, loopback is a peer on the primary's device"
            )
        if not self.cache_is_on(platform):
            raise UsageError(
                f"{flag} needs the primary's cache, which --expert_cache=auto leaves off on the "
                "CPU; --expert_cache=N or --device_memory_mib=N turns it on"
            )

    def cache_is_on(self, platform: str) -> bool:
        """Whether the primary has slots for experts: on the CPU only where a size is given."""
        if self.expert_cache is None and platform == "cpu":
            return self.device_memory_mib is not None
        return self.expert_cache != 0

    def stream_share(self, platform: str) -> float:
        """Share of the missed experts that is streamed: auto is 0, for on the CPU a copy gains nothing."""
        return (self.pcie_frac or 0.0) if self.cache_is_on(platform) else 0.0

    def adapts(self) -> bool:
        """Whether experts move while the model runs, given that there is a cache."""
        peer_swaps = self.adapt_swaps if self.peer_adapt_swaps == -1 else self.peer_adapt_swaps
        return self.adapt_swaps > 0 or (self.peer_device is not None and peer_swaps > 0)


_TIER_DEFAULTS = {
    field.name: field.default for field in dataclasses.fields(TierSettings) if field.name != "given"
}
_MOST_COUNT = (1 << 31) - 1
"""More experts, windows or swaps than there are; native code counts them in 32 bits."""
_TIER_RANGES: tuple[tuple[str, type, float, float], ...] = (
    ("expert_cache", int, 0, _MOST_COUNT),
    ("vram_reserve_mib", int, 0, 1 << 40),
    ("adapt_every", int, 1, _MOST_COUNT),
    ("adapt_swaps", int, 0, _MOST_COUNT),
    ("adapt_decay", float, 0, 1),
    ("pcie_frac", float, 0, 1),
    ("pool_workers", int, 0, 1024),
    ("peer_device", int, 0, 1023),
    ("peer_reserve_mib", int, 0, 1 << 40),
    ("peer_slots", int, 0, _MOST_COUNT),
    ("peer_adapt_swaps", int, -1, _MOST_COUNT),
    ("peer_stream", float, 0, 1),
    ("peer_attention", float, 0, 0.5),
    ("prefill_ring", int, 0, 16384),
    ("host_ram_limit_gib", float, 0, 1 << 40),
    ("resident_budget_gib", float, 0, 1 << 40),
    ("device_memory_mib", int, 1, 1 << 40),
    ("peer_memory_mib", int, 1, 1 << 40),
)


def _check_number(name: str, value: Any, kind: type, lower: float, upper: float) -> None:
    if value is None or (name == "peer_device" and value == LOOPBACK):
        return
    is_kind = isinstance(value, int if kind is int else (int, float))
    if is_kind and not isinstance(value, bool) and lower <= value <= upper:
        return
    what = "a whole number" if kind is int else "a number"
    what = f"{LOOPBACK}, or {what}" if name == "peer_device" else what
    raise UsageError(f"--{name}={value}: {what} from {lower} to {upper} expected")
