"""Frozen settings of a model, and what the environment says: nothing else reads its variables.

The settings are parsed from a file's metadata by `weights/metadata.py`.
"""

import dataclasses
import os
import pathlib
from typing import Literal

LayerKind = Literal["linear", "attention"]


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


def environment_notes() -> tuple[str, ...]:
    """One line for every environment variable that is set although it decides nothing here."""
    notes = []
    if os.environ.get("STRATA_MMQ_NO_STREAMK", "0") not in ("", "0"):
        notes.append("STRATA_MMQ_NO_STREAMK: always on here, sums have one order")
    for name in ("JAX_PLATFORMS", "JAX_PLATFORM_NAME"):
        value = os.environ.get(name, "")
        if value not in ("", "cpu"):
            notes.append(f"{name}={value} has no effect: --platform decides")
    return tuple(notes)


def user_cache_dir() -> pathlib.Path | None:
    """Where this user's caches live (XDG base directory specification); None without a home."""
    base = pathlib.Path(os.environ.get("XDG_CACHE_HOME", ""))
    if base.is_absolute():  # the specification: relative paths are to be ignored
        return base / "strata_jax"
    try:
        return pathlib.Path.home() / ".cache" / "strata_jax"
    except RuntimeError:
        return None


def loader_environment() -> dict[str, str]:
    """Variables that decide which shared libraries and devices a process sees, as far as set."""
    names = (
        "LD_LIBRARY_PATH",
        "LD_PRELOAD",
        "CUDA_VISIBLE_DEVICES",
        "JAX_PLATFORMS",
        "XLA_FLAGS",
        "PYTHONPATH",
    )
    return {name: os.environ[name] for name in names if os.environ.get(name)}
