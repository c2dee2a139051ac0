"""From a file's metadata to `ModelConfig`, every value type- and range-checked.

Keys and their meaning: docs, gguf.md. Bounds are far above the released model and low enough that
nothing computed from them can be absurd; sizes are checked against the tensors in `pack.py`.
"""

import dataclasses
from typing import Any

from strata_jax.config import LayerKind, ModelConfig
from strata_jax.errors import BadFileError
from strata_jax.weights.gguf import GgufFile
from strata_jax.weights.meta_reader import PREFIX, MetaReader
from strata_jax.weights.metadata_ngram import read_ngram
from strata_jax.weights.tensor_names import split_block

ARCHITECTURE = PREFIX.rstrip(".")
MAX_LAYERS = 1024
MAX_DRAFT_LAYERS = 8
MAX_HIDDEN = 1 << 16
MAX_EXPERTS = 1 << 16
MAX_CONTEXT = 1 << 26
MAX_VOCAB = 1 << 22
BLOCK = 32
"""Values that share an activation scale (docs: numerics.md, "T"): widths are multiples of it."""


def read_config(
    file: GgufFile, draft_of: ModelConfig | None = None
) -> tuple[ModelConfig, tuple[str, ...]]:
    """Reads the settings of a model and what is odd about them.

    Args:
        file: the opened file.
        draft_of: the model whose draft layer the file is to hold; the rest of a model may be missing
            then, and an embedding that it lacks is the model's.

    Returns:
        The settings and warnings, one line each. `num_draft_layers` counts the draft layers whose
        tensors are in the file. Without sparse attention `index_budget` is 0, `index_ratio` 1.
        Without an end-of-answer id in the file `eos_id` is the n-gram table's, or -1 for none.

    Raises:
        BadFileError: for a file of something else, and for every value that is missing, of another
            type or out of range, by name.
    """
    meta = MetaReader(file)
    _check_architecture(meta)
    layers = _layers(meta, file, is_draft=draft_of is not None)
    _check_rope_scaling(meta)
    vocab_size = _vocab_size(meta, file, draft_of)
    config = ModelConfig(
        **layers,
        **_widths(meta),
        **_attention(meta),
        **_delta_net(meta),
        **_indexer(meta, layers["layer_kinds"], layers["num_draft_layers"]),
        vocab_size=vocab_size,
        ngram=None,
        eos_id=-1,
    )
    if config.index_budget and config.rope_dim > config.index_dim:
        raise meta.error("rope.dimension_count", f"at most the indexer's {config.index_dim}")
    if draft_of is not None:  # neither belongs to the draft layer
        config = dataclasses.replace(config, ngram=draft_of.ngram, eos_id=draft_of.eos_id)
        return config, tuple(meta.warnings)
    ngram = read_ngram(meta, file, config)
    eos_id = _eos_id(meta, vocab_size, ngram.eos_id if ngram else -1)
    return dataclasses.replace(config, ngram=ngram, eos_id=eos_id), tuple(meta.warnings)


def _check_architecture(meta: MetaReader) -> None:
    name = meta.text("general.architecture")
    if name == "clip":
        raise BadFileError(
            f"{meta.path}: a vision projector (mmproj), the language model's file expected"
        )
    if name != ARCHITECTURE:
        raise meta.error("general.architecture", repr(ARCHITECTURE))


def _layers(meta: MetaReader, file: GgufFile, *, is_draft: bool) -> dict[str, Any]:
    blocks = meta.integer("block_count", 1, MAX_LAYERS + MAX_DRAFT_LAYERS)
    drafts = meta.integer("nextn_predict_layers", 0, MAX_DRAFT_LAYERS, default=0)
    trunk = blocks - drafts
    if not 1 <= trunk <= MAX_LAYERS:
        raise meta.error("block_count", f"1 to {MAX_LAYERS} layers beside {drafts} draft layers")
    present = {split[0] for split in map(split_block, file.tensors) if split}
    has_draft = any(trunk <= block < blocks for block in present)
    if is_draft and not has_draft:
        raise BadFileError(
            f"{meta.path}: has no draft layer (MTP): metadata {PREFIX}nextn_predict_layers is {drafts}, "
            f"and no tensor of a block from {trunk} on is in the file"
        )
    if not is_draft and not any(block < trunk for block in present):
        if has_draft:
            raise BadFileError(
                f"{meta.path}: holds the draft layer (MTP) only, the main model's file expected; "
                "--mtp=FILE takes this one beside it"
            )
        raise BadFileError(f"{meta.path}: tensors of blk.0 to blk.{trunk - 1} are missing")
    if drafts and not has_draft:
        meta.warn(
            f"metadata {PREFIX}nextn_predict_layers is {drafts}, but no tensor of "
            f"blk.{trunk} is in the file: there are no drafts"
        )
        drafts = 0
    return {
        "num_layers": trunk,
        "num_draft_layers": drafts,
        "layer_kinds": _layer_kinds(meta, trunk, blocks),
    }


def _layer_kinds(meta: MetaReader, trunk: int, blocks: int) -> tuple[LayerKind, ...]:
    if meta.has("attention.recurrent_layers"):
        linear = meta.flags("attention.recurrent_layers", blocks)
        if any(linear[trunk:]):
            raise meta.error("attention.recurrent_layers", "false for draft layers")
    else:
        # Files from before the key: every interval-th layer attends.
        interval = meta.integer("full_attention_interval", 1, MAX_LAYERS, default=4)
        linear = tuple((layer + 1) % interval != 0 for layer in range(trunk))
    return tuple("linear" if flag else "attention" for flag in linear[:trunk])


def _widths(meta: MetaReader) -> dict[str, Any]:
    sizes = {
        "hidden": meta.integer("embedding_length", 1, MAX_HIDDEN),
        "expert_width": meta.integer("expert_feed_forward_length", 1, MAX_HIDDEN),
        "shared_width": meta.integer("expert_shared_feed_forward_length", 1, MAX_HIDDEN),
        "num_experts": meta.integer("expert_count", 1, MAX_EXPERTS),
        "num_streams": meta.integer("hyper_connection.count", 1, 16),
        "low_rank": meta.integer("hyper_connection.low_rank", 1, MAX_HIDDEN),
        "context_length": meta.integer("context_length", 1, MAX_CONTEXT),
        "eps": meta.number("attention.layer_norm_rms_epsilon", 1e-12, 0.1),
    }
    most = min(int(sizes["num_experts"]), 256)
    sizes["num_experts_active"] = meta.integer("expert_used_count", 1, most)
    for name, key in (
        ("hidden", "embedding_length"),
        ("expert_width", "expert_feed_forward_length"),
    ):
        if sizes[name] % BLOCK:
            raise meta.error(key, f"a multiple of {BLOCK}")
    return sizes


def _attention(meta: MetaReader) -> dict[str, Any]:
    num_heads = meta.integer("attention.head_count", 1, 1024)
    num_kv_heads = meta.integer("attention.head_count_kv", 1, num_heads)
    if num_heads % num_kv_heads:
        raise meta.error("attention.head_count_kv", f"a divisor of the {num_heads} query heads")
    head_dim = meta.integer("attention.key_length", 2, 4096)
    meta.integer("attention.value_length", head_dim, head_dim)
    rope_dim = meta.integer("rope.dimension_count", 2, head_dim)
    if rope_dim % 2:
        raise meta.error("rope.dimension_count", "an even number")
    sections = meta.integers("rope.dimension_sections", (3, 4), 0, rope_dim // 2)
    if sum(sections) > rope_dim // 2:
        raise meta.error("rope.dimension_sections", f"a sum of at most {rope_dim // 2}")
    return {
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "rope_dim": rope_dim,
        "rope_sections": sections,
        "rope_theta": meta.number("rope.freq_base", 1.0, 1e15),
    }


def _check_rope_scaling(meta: MetaReader) -> None:
    found = [key for key in ("rope.scaling.factor", "rope.scale_linear") if meta.has(key)]
    if meta.has("rope.scaling.type"):
        scaled = "rope.scaling.type" if meta.text("rope.scaling.type") != "none" else None
    else:
        # A factor without a type means linear scaling; 0 and 1 both stand for "not scaled".
        scaled = next((key for key in found if meta.number(key, 0.0, 1e9) not in (0.0, 1.0)), None)
    if scaled is not None:
        value = meta.metadata[PREFIX + scaled]
        raise BadFileError(
            f"{meta.path}: metadata {PREFIX}{scaled} is {value!r}: linear and yarn rope scaling "
            "are not supported, a file converted without them expected"
        )


def _delta_net(meta: MetaReader) -> dict[str, Any]:
    head_dim = meta.integer("ssm.state_size", 1, 1024)
    key_heads = meta.integer("ssm.group_count", 1, 1024)
    value_heads = meta.integer("ssm.time_step_rank", key_heads, 4096)
    if value_heads % key_heads:
        raise meta.error("ssm.time_step_rank", f"a multiple of the {key_heads} key heads")
    width = value_heads * head_dim
    meta.integer("ssm.inner_size", width, width)
    return {
        "gdn_head_dim": head_dim,
        "gdn_key_heads": key_heads,
        "gdn_value_heads": value_heads,
        "conv_kernel": meta.integer("ssm.conv_kernel", 2, 64),
    }


def _indexer(meta: MetaReader, kinds: tuple[LayerKind, ...], drafts: int) -> dict[str, Any]:
    blocks = meta.integer("block_count", 1, MAX_LAYERS + MAX_DRAFT_LAYERS)
    key = "attention.compress_ratios"
    ratios = meta.integers(key, (blocks,), 0, 4096) if meta.has(key) else (0,) * blocks
    trunk = {ratios[layer] for layer, kind in enumerate(kinds) if kind == "attention"}
    if any(ratios[layer] for layer, kind in enumerate(kinds) if kind == "linear"):
        meta.warn(f"metadata {PREFIX}{key} has ratios for linear layers, which are not used")
    if trunk <= {0}:
        return _dense(meta)
    ratio = max(trunk)
    if trunk != {ratio}:
        raise meta.error(key, "the same ratio for all attention layers")
    if set(ratios[len(kinds) : len(kinds) + drafts]) - {ratio}:
        meta.warn(f"metadata {PREFIX}{key}: draft layers use the ratio of the others, {ratio}")
    budget = meta.integer("attention.indexer.top_k", 1, MAX_CONTEXT)
    if ratio < 2 or budget % ratio:
        raise meta.error(key, f"0 or ratios above 1 that divide the budget of {budget} tokens")
    return {
        "index_heads": meta.integer("attention.indexer.head_count", 1, 256),
        "index_dim": meta.integer("attention.indexer.key_length", 2, 1024),
        "index_budget": budget,
        "index_ratio": ratio,
    }


def _dense(meta: MetaReader) -> dict[str, Any]:
    """Every query sees everything; the indexer's sizes are kept where the file has them."""
    return {
        "index_heads": meta.integer("attention.indexer.head_count", 0, 256, default=0),
        "index_dim": meta.integer("attention.indexer.key_length", 0, 1024, default=0),
        "index_budget": 0,
        "index_ratio": 1,
    }


def _vocab_size(meta: MetaReader, file: GgufFile, draft_of: ModelConfig | None) -> int:
    info = file.tensors.get("token_embd.weight")
    if info is None:
        if draft_of is not None:
            return draft_of.vocab_size
        raise BadFileError(f"{meta.path}: tensor token_embd.weight is missing")
    rows = info.num_elements // info.shape[0]
    if not 2 <= rows <= MAX_VOCAB:
        raise BadFileError(
            f"{meta.path}: tensor token_embd.weight has {rows} rows, 2 to {MAX_VOCAB} expected"
        )
    if "tokenizer.ggml.tokens" in meta.metadata:
        tokens = meta.string_count("tokenizer.ggml.tokens")
        if tokens > rows:
            raise BadFileError(
                f"{meta.path}: metadata tokenizer.ggml.tokens has {tokens} tokens, at most the "
                f"{rows} rows of token_embd.weight expected"
            )
        if tokens < rows:
            meta.warn(f"ids {tokens} to {rows - 1} have no token in tokenizer.ggml.tokens")
    return rows


def _eos_id(meta: MetaReader, vocab_size: int, otherwise: int) -> int:
    key = "tokenizer.ggml.eos_token_id"
    if meta.has(key):
        return meta.integer(key, 0, vocab_size - 1)
    ends = f"token {otherwise} of the n-gram table" if otherwise >= 0 else "the token limit only"
    meta.warn(f"metadata {key} is missing: answers end at {ends}")
    return otherwise
