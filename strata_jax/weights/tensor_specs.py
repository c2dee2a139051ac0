"""What tensors a model with given settings is made of: names, shapes, uses.

Shapes are in ggml order, contiguous axis first. Source: docs, gguf.md, "Tensors".
"""

import dataclasses
from collections.abc import Container, Iterator
from typing import Literal

from strata_jax.config import ModelConfig

Tier = Literal["experts", "ngram", "dense", "embedding", "draft"]
"""Which budget of `plan.py` a tensor's bytes fall under."""

Use = Literal["matrix", "vector", "router"]
"""How a tensor is read: as a product of any supported type, as plain floats, or as a matrix that
decides something (which expert, which block) and suffers when quantised."""


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """One tensor the settings imply."""

    name: str
    shape: tuple[int, ...]
    tier: Tier
    use: Use = "matrix"
    optional: bool = False


def expected_tensors(config: ModelConfig, names: Container[str]) -> tuple[TensorSpec, ...]:
    """Lists every tensor of a model.

    Args:
        config: its settings. Draft layers are listed if `num_draft_layers` says so, as blocks
            after the trunk's.
        names: tensors of the file, asked only where it has a choice (gate and up fused or not).
    """
    specs = list(_globals(config))
    for block in range(config.num_layers + config.num_draft_layers):
        draft = block >= config.num_layers
        layer = _every_block(config, f"blk.{block}.ffn_gate_up_exps.weight" in names)
        attention = draft or config.layer_kinds[block] == "attention"
        layer += _attention(config) if attention else _linear(config)
        if config.ngram is not None and block == config.ngram.layer:
            layer += _ngram_block(config)
        if draft:
            layer += _draft_block(config)
        for spec in layer:
            tier = "draft" if draft else spec.tier
            specs.append(dataclasses.replace(spec, name=f"blk.{block}.{spec.name}", tier=tier))
    return tuple(specs)


def draft_tensors(config: ModelConfig, names: Container[str]) -> tuple[TensorSpec, ...]:
    """Lists the tensors of the first draft layer, as `expected_tensors` does all of a model."""
    prefix = f"blk.{config.num_layers}."
    return tuple(spec for spec in expected_tensors(config, names) if spec.name.startswith(prefix))


def _globals(config: ModelConfig) -> Iterator[TensorSpec]:
    table = (config.hidden, config.vocab_size)
    yield TensorSpec("token_embd.weight", table, "embedding")
    # Absent where the head shares the embedding's rows.
    yield TensorSpec("output.weight", table, "embedding", optional=True)
    yield from _mixer(config, "output_hc")
    if config.ngram is not None:
        rows = (config.ngram.row_width, config.ngram.num_rows)
        yield TensorSpec("per_layer_token_embd.weight", rows, "ngram")


def _mixer(config: ModelConfig, prefix: str) -> list[TensorSpec]:
    width = config.num_streams * config.hidden
    return [
        TensorSpec(f"{prefix}_norm.weight", (width,), "dense", "vector"),
        TensorSpec(f"{prefix}_down.weight", (width, config.low_rank), "dense"),
        TensorSpec(f"{prefix}_up.weight", (config.low_rank, width), "dense"),
    ]


def _every_block(config: ModelConfig, fused: bool) -> list[TensorSpec]:
    hidden, width, experts = config.hidden, config.expert_width, config.num_experts
    streams = config.num_streams
    specs = []
    for prefix in ("hc_attn", "hc_ffn"):
        specs += _mixer(config, prefix)
        inject = (streams * hidden, streams)
        specs.append(TensorSpec(f"{prefix}_inject.weight", inject, "dense"))
    if fused:
        both = (hidden, 2 * width, experts)
        specs.append(TensorSpec("ffn_gate_up_exps.weight", both, "experts"))
    else:
        one = (hidden, width, experts)
        specs.append(TensorSpec("ffn_gate_exps.weight", one, "experts"))
        specs.append(TensorSpec("ffn_up_exps.weight", one, "experts"))
    return [
        *specs,
        TensorSpec("ffn_down_exps.weight", (width, hidden, experts), "experts"),
        TensorSpec("ffn_gate_inp.weight", (hidden, experts), "dense", "router"),
        TensorSpec("ffn_gate_inp_shexp.weight", (hidden,), "dense", "router"),
        TensorSpec("ffn_gate_shexp.weight", (hidden, config.shared_width), "dense"),
        TensorSpec("ffn_up_shexp.weight", (hidden, config.shared_width), "dense"),
        TensorSpec("ffn_down_shexp.weight", (config.shared_width, hidden), "dense"),
    ]


def _attention(config: ModelConfig) -> list[TensorSpec]:
    hidden, head_dim = config.hidden, config.head_dim
    queries, keys = config.num_heads * head_dim, config.num_kv_heads * head_dim
    specs = [
        TensorSpec("attn_q.weight", (hidden, 2 * queries), "dense"),
        TensorSpec("attn_k.weight", (hidden, keys), "dense"),
        TensorSpec("attn_v.weight", (hidden, keys), "dense"),
        TensorSpec("attn_output.weight", (queries, hidden), "dense"),
        TensorSpec("attn_q_norm.weight", (head_dim,), "dense", "vector"),
        TensorSpec("attn_k_norm.weight", (head_dim,), "dense", "vector"),
    ]
    if not (config.index_heads and config.index_dim):
        return specs
    dim, queries = config.index_dim, config.index_heads * config.index_dim
    dense = config.index_budget == 0  # then the indexer is not used, but files may have it
    return [
        *specs,
        TensorSpec("indexer.q_proj.weight", (hidden, queries), "dense", "router", dense),
        TensorSpec("indexer.k_proj.weight", (hidden, dim), "dense", "router", dense),
        TensorSpec("indexer.q_norm.weight", (dim,), "dense", "vector", dense),
        TensorSpec("indexer.k_norm.weight", (dim,), "dense", "vector", dense),
    ]


def _linear(config: ModelConfig) -> list[TensorSpec]:
    hidden, heads, dim = config.hidden, config.gdn_value_heads, config.gdn_head_dim
    values = heads * dim
    channels = 2 * config.gdn_key_heads * dim + values
    return [
        TensorSpec("attn_qkv.weight", (hidden, channels), "dense"),
        TensorSpec("attn_gate.weight", (hidden, values), "dense"),
        TensorSpec("ssm_beta.weight", (hidden, heads), "dense"),
        TensorSpec("ssm_alpha.weight", (hidden, heads), "dense"),
        TensorSpec("ssm_conv1d.weight", (config.conv_kernel, channels), "dense", "vector"),
        TensorSpec("ssm_dt.bias", (heads,), "dense", "vector"),
        TensorSpec("ssm_a", (heads,), "dense", "vector"),
        TensorSpec("ssm_norm.weight", (dim,), "dense", "vector"),
        TensorSpec("ssm_out.weight", (values, hidden), "dense"),
    ]


def _ngram_block(config: ModelConfig) -> list[TensorSpec]:
    assert config.ngram is not None
    hidden, width = config.hidden, config.num_streams * config.hidden
    return [
        TensorSpec("ple_key.weight", (hidden, width), "dense"),
        TensorSpec("ple_value.weight", (hidden, hidden), "dense"),
        TensorSpec("ple_norm_key.weight", (width,), "dense", "vector"),
        TensorSpec("ple_norm_query.weight", (width,), "dense", "vector"),
        TensorSpec("ple_norm_conv.weight", (width,), "dense", "vector"),
        TensorSpec("ple_conv1d.weight", (config.ngram.conv_kernel, width), "dense", "vector"),
    ]


def _draft_block(config: ModelConfig) -> list[TensorSpec]:
    hidden, table = config.hidden, (config.hidden, config.vocab_size)
    return [
        TensorSpec("nextn.eh_proj.weight", (2 * hidden, hidden), "draft"),
        TensorSpec("nextn.enorm.weight", (hidden,), "draft", "vector"),
        TensorSpec("nextn.hnorm.weight", (config.num_streams * hidden,), "draft", "vector"),
        *_mixer(config, "nextn.hc_head"),
        # Forks give the draft layer an embedding, a head or a last norm of its own.
        TensorSpec("nextn.embed_tokens.weight", table, "draft", optional=True),
        TensorSpec("nextn.shared_head_head.weight", table, "draft", optional=True),
        TensorSpec("nextn.shared_head_norm.weight", (hidden,), "draft", "vector", optional=True),
    ]
