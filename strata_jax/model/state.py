"""Everything that changes from window to window: one donated pytree.

Its positional part is valid for any prefix of what was read (a cell belongs to a position); its recurrent
part stands for exactly the ids read so far and must be saved to be resumed (contract C). A window's drafts
are not among those: what they would put into the recurrent part waits in the `pending` leaves, and the next
window is told how many of them came true (`Drafts`).
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

from strata_jax.config import KvType, ModelConfig
from strata_jax.ops.cells import Cells, scale_groups
from strata_jax.ops.qsa_append import GROUP
from strata_jax.types import pytree

_DTYPES = {"fp16": jnp.float16, "int8": jnp.int8, "f32": jnp.float32}


@pytree
class AttentionCells:
    """Positional state of one attention layer; written by `qsa_append`."""

    keys: Cells
    values: Cells
    index_raw: Float32[Array, "S IC"]
    index_keys: Float32[Array, "M/16 IC 16"]
    scales: Float32[Array, "S K 2G"]
    """Of int8 keys and values; one cell of no meaning otherwise."""


@pytree
class LinearState:
    """Recurrent state of one delta-net layer; written by `gdn_window`."""

    conv: Float32[Array, "K-1 N"]
    """Inputs of the convolution before the next row, oldest first."""
    delta: Float32[Array, "Vh C C"]
    pending: Float32[Array, "R N+2*Vh"]
    """Inputs of the last window's drafts: channels of the convolution, alpha and beta."""


@pytree
class NgramState:
    """Recurrent state of the n-gram embedding."""

    tokens: Int32[Array, " N-1+R"]
    """The last N-1 ids, oldest first, EOS before the start; then the last window's drafts."""
    conv: Float32[Array, "taps J*D"]
    """Normed inputs of the dilated convolution before the next row, oldest first."""
    pending: Float32[Array, "R J*D"]
    """Those of the last window's drafts."""


@pytree
class RecurrentState:
    """What must be saved to resume at this point."""

    linear: tuple[LinearState, ...]
    ngram: NgramState | None


@pytree
class Drafts:
    """Which rows of a window are drafts, and what became of those of the window before."""

    kept: Int32[Array, ""]
    """Drafts of the window before that came true, from its first draft on: read before this window's rows."""
    certain: Int32[Array, ""]
    """Rows that are no drafts, from the first on; `live` and more: all of them."""


@pytree
class DecodeState:
    """Donated to every step: never read a state after passing it on."""

    cells: tuple[AttentionCells, ...]
    recurrent: RecurrentState


def num_cells(max_context: int, tile_rows: int) -> int:
    """Cells that a cache of `max_context` positions needs: padded tiles may reach past the end."""
    grain = GROUP * 8
    return -(-(max_context + tile_rows) // grain) * grain


def empty_cells(config: ModelConfig, cells: int, kv: KvType) -> AttentionCells:
    """One attention layer's cells before the first token."""
    indexed = config.index_budget > 0
    groups = cells // config.index_ratio // GROUP + 1 if indexed else 1
    heads, dim = config.num_kv_heads, config.head_dim
    index_dim = max(config.index_dim, 2)
    return AttentionCells(
        keys=jnp.zeros((cells, heads, dim), _DTYPES[kv]),
        values=jnp.zeros((cells, heads, dim), _DTYPES[kv]),
        index_raw=jnp.zeros((cells if indexed else 1, index_dim), jnp.float32),
        index_keys=jnp.zeros((groups, index_dim, GROUP), jnp.float32),
        scales=jnp.zeros((cells if kv == "int8" else 1, heads, 2 * scale_groups(dim)), jnp.float32),
    )


def empty_state(config: ModelConfig, cells: int, kv: KvType, drafts: int) -> DecodeState:
    """The state before the first token.

    Args:
        config: sizes.
        cells: of an attention layer's cache.
        kv: their type.
        drafts: the most that a window has (R).
    """
    attention = [
        empty_cells(config, cells, kv) for kind in config.layer_kinds if kind == "attention"
    ]
    dim = config.gdn_head_dim
    channels = (2 * config.gdn_key_heads + config.gdn_value_heads) * dim
    linear = [
        LinearState(
            conv=jnp.zeros((config.conv_kernel - 1, channels), jnp.float32),
            delta=jnp.zeros((config.gdn_value_heads, dim, dim), jnp.float32),
            pending=jnp.zeros((drafts, channels + 2 * config.gdn_value_heads), jnp.float32),
        )
        for kind in config.layer_kinds
        if kind == "linear"
    ]
    ngram = None
    if config.ngram is not None:
        taps = (config.ngram.conv_kernel - 1) * config.ngram.ngram_size
        ngram = NgramState(
            tokens=jnp.full((config.ngram.ngram_size - 1 + drafts,), config.ngram.eos_id, np.int32),
            conv=jnp.zeros((taps, config.num_streams * config.hidden), jnp.float32),
            pending=jnp.zeros((drafts, config.num_streams * config.hidden), jnp.float32),
        )
    recurrent = RecurrentState(linear=tuple(linear), ngram=ngram)
    return DecodeState(cells=tuple(attention), recurrent=recurrent)
