"""From a checked pack to what programs take: the vectors as arrays on the primary mesh."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from strata_jax.config import Platform, TierSettings
from strata_jax.model.params import (
    AttentionParams,
    DraftParams,
    LayerParams,
    LinearParams,
    MixerParams,
    NgramParams,
    Params,
)
from strata_jax.ops.native import Backend
from strata_jax.weights.budget import host_memory
from strata_jax.weights.device_table import DeviceNgramTable
from strata_jax.weights.draft_layer import DraftLayer
from strata_jax.weights.ngram_table import TENSOR, NgramTable
from strata_jax.weights.pack import Pack


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placing:
    """Where arrays go, and how programs are compiled."""

    backend: Backend
    sharding: NamedSharding
    result_sharding: jax.sharding.Sharding
    """Of what the host reads."""
    compiler_options: dict[str, Any] | None


def primary_sharding(platform: Platform) -> NamedSharding:
    """Everything dense is replicated over the primary mesh: one device for now."""
    mesh = Mesh(np.asarray(jax.devices(platform)[:1]), ("primary",))
    return NamedSharding(mesh, PartitionSpec())


def load_params(pack: Pack, sharding: NamedSharding) -> Params:
    """The model's vectors on the mesh."""
    config = pack.config
    layers = tuple(
        _layer(pack, layer, linear=kind == "linear")
        for layer, kind in enumerate(config.layer_kinds)
    )
    ngram = None
    if config.ngram is not None:
        ngram = _ngram(pack, f"blk.{config.ngram.layer}.")
    params = Params(layers=layers, ngram=ngram, output_mixer=_mixer(pack, "output_hc"))
    return jax.device_put(params, sharding)


def load_draft_params(
    draft: DraftLayer, head_ids: np.ndarray | None, sharding: NamedSharding
) -> DraftParams:
    """The draft layer's vectors on the mesh.

    Args:
        draft: the layer.
        head_ids: the ids it scores, int32 [V'], ascending; None = all.
        sharding: where to.
    """
    pack, prefix = draft.pack, draft.prefix
    params = DraftParams(
        token_norm=_vector(pack, prefix + "nextn.enorm.weight"),
        hidden_norm=_streams(pack, prefix + "nextn.hnorm.weight"),
        layer=_layer(pack, draft.block, linear=False),
        output_mixer=_mixer(pack, prefix + "nextn.hc_head"),
        head_ids=None if head_ids is None else jnp.asarray(head_ids),
    )
    return jax.device_put(params, sharding)


def _vector(pack: Pack, name: str) -> jax.Array:
    return jnp.asarray(pack.vector(name))


def _taps(pack: Pack, name: str) -> jax.Array:
    return jnp.asarray(np.ascontiguousarray(pack.vector(name).T))  # the file has the taps last


def _streams(pack: Pack, name: str) -> jax.Array:
    values = pack.vector(name).reshape(pack.config.num_streams, pack.config.hidden)
    return jnp.asarray(values)


def _mixer(pack: Pack, prefix: str) -> MixerParams:
    return MixerParams(norm=_streams(pack, f"{prefix}_norm.weight"))


def _layer(pack: Pack, layer: int, *, linear: bool) -> LayerParams:
    prefix = f"blk.{layer}."
    return LayerParams(
        attn_mixer=_mixer(pack, prefix + "hc_attn"),
        ffn_mixer=_mixer(pack, prefix + "hc_ffn"),
        mixer=_linear(pack, prefix) if linear else _attention(pack, prefix),
    )


def _linear(pack: Pack, prefix: str) -> LinearParams:
    return LinearParams(
        conv_weight=_taps(pack, prefix + "ssm_conv1d.weight"),
        decay=_vector(pack, prefix + "ssm_a"),
        dt_bias=_vector(pack, prefix + "ssm_dt.bias"),
        norm=_vector(pack, prefix + "ssm_norm.weight"),
    )


def _attention(pack: Pack, prefix: str) -> AttentionParams:
    config = pack.config
    index_norms = [jnp.ones(max(config.index_dim, 2), jnp.float32)] * 2
    if config.index_budget > 0:
        index_norms = [_vector(pack, f"{prefix}indexer.{x}_norm.weight") for x in "qk"]
    # The rotation's frequencies in float32 step by step, as the reference computes them.
    exponents = np.arange(0, config.rope_dim, 2, dtype=np.float32) / np.float32(config.rope_dim)
    return AttentionParams(
        q_norm=_vector(pack, prefix + "attn_q_norm.weight"),
        k_norm=_vector(pack, prefix + "attn_k_norm.weight"),
        index_q_norm=index_norms[0],
        index_k_norm=index_norms[1],
        inv_freq=jnp.asarray(np.float32(1.0) / np.float32(config.rope_theta) ** exponents),
    )


def _ngram(pack: Pack, prefix: str) -> NgramParams:
    return NgramParams(
        norm_key=_streams(pack, prefix + "ple_norm_key.weight"),
        norm_query=_streams(pack, prefix + "ple_norm_query.weight"),
        norm_conv=_streams(pack, prefix + "ple_norm_conv.weight"),
        conv_weight=_taps(pack, prefix + "ple_conv1d.weight"),
    )


def compiler_options(backend: Backend) -> dict[str, Any] | None:
    """Contract R: on a GPU nothing is chosen by timing it."""
    return {"xla_gpu_autotune_level": 0} if backend.name == "cuda" else None


def open_table(
    pack: Pack, settings: TierSettings, backend: Backend, report: Callable[[str], None]
) -> NgramTable | DeviceNgramTable | None:
    """The n-gram table of a model; None if it has none."""
    if pack.config.ngram is None:
        return None
    if backend.is_device:
        return DeviceNgramTable(pack, settings.ple_io, backend, report)
    mode = settings.ple_io
    if mode is None:
        # A table that the page cache will hold anyway is not worth a disk read a row.
        table_bytes = pack.tensor(TENSOR).nbytes
        mode = "mmap" if 8 * table_bytes <= host_memory().available_bytes else "direct"
    return NgramTable(pack, mode, report)
