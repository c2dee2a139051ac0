"""What a model file of this architecture holds: metadata, and tensors by name and shape.

Written down here a second time on purpose (docs, gguf.md): a test that took names and shapes from
the package would agree with any mistake in it.
"""

import dataclasses
import itertools
from collections.abc import Iterator

from tests.gguf_writer import Pair


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of a model to make; 8 n-gram heads, every fourth layer attends."""

    hidden: int = 64
    layers: int = 4
    streams: int = 4
    low_rank: int = 32
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    rope_dim: int = 16
    rope_sections: tuple[int, ...] = (3, 3, 2, 0)
    experts: int = 4
    experts_active: int = 2
    width: int = 64
    shared: int = 64
    gdn_dim: int = 32
    gdn_keys: int = 2
    gdn_values: int = 4
    conv: int = 4
    index_heads: int = 4
    index_dim: int = 32
    index_budget: int = 32
    index_ratio: int = 4
    vocab: int = 512
    context: int = 512
    heads_per_ngram: int = 4
    ngram_base: int = 100
    drafts: int = 1


def model_tensors(s: Sizes, fused: bool = False) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes (ggml order) of all tensors, in file order."""
    wide = s.hidden * s.streams
    yield "token_embd.weight", (s.hidden, s.vocab)
    yield "output.weight", (s.hidden, s.vocab)
    yield from _mixer(s, "output_hc")
    yield "per_layer_token_embd.weight", (s.hidden // (2 * s.heads_per_ngram), ngram_rows(s))
    for block in range(s.layers + s.drafts):
        b = f"blk.{block}."
        yield from _every_block(s, b, fused)
        if block % 4 == 3 or block >= s.layers:
            yield from _attention(s, b)
        else:
            yield from _linear(s, b)
        if block == 1:
            yield b + "ple_key.weight", (s.hidden, wide)
            yield b + "ple_value.weight", (s.hidden, s.hidden)
            for name in ("key", "query", "conv"):
                yield f"{b}ple_norm_{name}.weight", (wide,)
            yield b + "ple_conv1d.weight", (s.conv, wide)
        if block >= s.layers:
            yield b + "nextn.eh_proj.weight", (2 * s.hidden, s.hidden)
            yield b + "nextn.enorm.weight", (s.hidden,)
            yield b + "nextn.hnorm.weight", (wide,)
            yield from _mixer(s, b + "nextn.hc_head")


def _mixer(s: Sizes, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    wide = s.hidden * s.streams
    yield prefix + "_norm.weight", (wide,)
    yield prefix + "_down.weight", (wide, s.low_rank)
    yield prefix + "_up.weight", (s.low_rank, wide)


def _every_block(s: Sizes, b: str, fused: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    for part in ("hc_attn", "hc_ffn"):
        yield from _mixer(s, b + part)
        yield f"{b}{part}_inject.weight", (s.hidden * s.streams, s.streams)
    yield b + "ffn_gate_inp.weight", (s.hidden, s.experts)
    if fused:
        yield b + "ffn_gate_up_exps.weight", (s.hidden, 2 * s.width, s.experts)
    else:
        yield b + "ffn_gate_exps.weight", (s.hidden, s.width, s.experts)
        yield b + "ffn_up_exps.weight", (s.hidden, s.width, s.experts)
    yield b + "ffn_down_exps.weight", (s.width, s.hidden, s.experts)
    yield b + "ffn_gate_inp_shexp.weight", (s.hidden,)
    yield b + "ffn_gate_shexp.weight", (s.hidden, s.shared)
    yield b + "ffn_up_shexp.weight", (s.hidden, s.shared)
    yield b + "ffn_down_shexp.weight", (s.shared, s.hidden)


def _attention(s: Sizes, b: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield b + "attn_q.weight", (s.hidden, 2 * s.heads * s.head_dim)
    yield b + "attn_k.weight", (s.hidden, s.kv_heads * s.head_dim)
    yield b + "attn_v.weight", (s.hidden, s.kv_heads * s.head_dim)
    yield b + "attn_output.weight", (s.heads * s.head_dim, s.hidden)
    yield b + "attn_q_norm.weight", (s.head_dim,)
    yield b + "attn_k_norm.weight", (s.head_dim,)
    yield b + "indexer.q_proj.weight", (s.hidden, s.index_heads * s.index_dim)
    yield b + "indexer.k_proj.weight", (s.hidden, s.index_dim)
    yield b + "indexer.q_norm.weight", (s.index_dim,)
    yield b + "indexer.k_norm.weight", (s.index_dim,)


def _linear(s: Sizes, b: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    values = s.gdn_values * s.gdn_dim
    channels = 2 * s.gdn_keys * s.gdn_dim + values
    yield b + "attn_qkv.weight", (s.hidden, channels)
    yield b + "attn_gate.weight", (s.hidden, values)
    yield b + "ssm_beta.weight", (s.hidden, s.gdn_values)
    yield b + "ssm_alpha.weight", (s.hidden, s.gdn_values)
    yield b + "ssm_conv1d.weight", (s.conv, channels)
    yield b + "ssm_dt.bias", (s.gdn_values,)
    yield b + "ssm_a", (s.gdn_values,)
    yield b + "ssm_norm.weight", (s.gdn_dim,)
    yield b + "ssm_out.weight", (values, s.hidden)


def model_pairs(s: Sizes) -> list[Pair]:
    """The metadata of a model, tokenizer included."""
    blocks = s.layers + s.drafts
    attends = [block % 4 == 3 or block >= s.layers for block in range(blocks)]
    sizes = head_sizes(s)
    numbers = {
        "block_count": blocks,
        "nextn_predict_layers": s.drafts,
        "context_length": s.context,
        "embedding_length": s.hidden,
        "attention.head_count": s.heads,
        "attention.head_count_kv": s.kv_heads,
        "attention.key_length": s.head_dim,
        "attention.value_length": s.head_dim,
        "rope.dimension_count": s.rope_dim,
        "expert_count": s.experts,
        "expert_used_count": s.experts_active,
        "expert_feed_forward_length": s.width,
        "expert_shared_feed_forward_length": s.shared,
        "ssm.conv_kernel": s.conv,
        "ssm.state_size": s.gdn_dim,
        "ssm.group_count": s.gdn_keys,
        "ssm.time_step_rank": s.gdn_values,
        "ssm.inner_size": s.gdn_values * s.gdn_dim,
        "full_attention_interval": 4,
        "hyper_connection.count": s.streams,
        "hyper_connection.low_rank": s.low_rank,
        "attention.indexer.head_count": s.index_heads,
        "attention.indexer.key_length": s.index_dim,
        "attention.indexer.top_k": s.index_budget,
        "ple.ngram_size": 3,
        "ple.heads_per_ngram": s.heads_per_ngram,
        "ple.conv_kernel": 4,
        "ple.eos_token_id": s.vocab - 3,
        "ple.image_token_id": s.vocab - 4,
        "embedding_length_per_layer_input": s.hidden // (2 * s.heads_per_ngram),
    }
    if not s.drafts:
        del numbers["nextn_predict_layers"]
    others = [
        ("rope.freq_base", "f32", 1e7),
        ("attention.layer_norm_rms_epsilon", "f32", 1e-6),
        ("rope.dimension_sections", "i32[]", s.rope_sections),
        ("attention.recurrent_layers", "bool[]", [not flag for flag in attends]),
        ("attention.compress_ratios", "i32[]", [s.index_ratio * flag for flag in attends]),
        ("ple.layers", "i32[]", [1]),
        ("ple.head_vocab_sizes", "u64[]", sizes),
        ("ple.head_offsets", "u64[]", [0, *itertools.accumulate(sizes[:-1])]),
        ("ple.layer_multipliers", "u64[]", multipliers(s.vocab)),
    ]
    own = [Pair(f"qwen4exp.{key}", "u32", value) for key, value in numbers.items()]
    own += [Pair(f"qwen4exp.{key}", kind, value) for key, kind, value in others]
    return [Pair("general.architecture", "string", "qwen4exp"), *own, *_tokenizer_pairs(s.vocab)]


def _tokenizer_pairs(vocab: int) -> list[Pair]:
    """Byte-level BPE: 256 bytes, then words of letters, one merge each, and four special tokens."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    tokens = [chr(byte) for byte in visible] + [chr(256 + n) for n in range(256 - len(visible))]
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = itertools.chain(*(itertools.product(letters, repeat=n) for n in (2, 3, 4)))
    merges = []
    for word in itertools.islice(words, vocab - 260):
        merges.append(f"{''.join(word[:-1])} {word[-1]}")
        tokens.append("".join(word))
    special = ["<|image_pad|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    kinds = [1] * len(tokens) + [3] * len(special)  # 1 normal, 3 control
    return [
        Pair("tokenizer.ggml.model", "string", "gpt2"),
        Pair("tokenizer.ggml.pre", "string", "qwen35"),
        Pair("tokenizer.ggml.tokens", "string[]", tokens + special),
        Pair("tokenizer.ggml.token_type", "i32[]", kinds),
        Pair("tokenizer.ggml.merges", "string[]", merges),
        Pair("tokenizer.ggml.eos_token_id", "u32", vocab - 1),
    ]


def head_sizes(s: Sizes) -> list[int]:
    """Prime modulus of each n-gram head: consecutive primes from the base on."""
    primes, number = [], s.ngram_base
    while len(primes) < 2 * s.heads_per_ngram:
        if all(number % divisor for divisor in range(2, int(number**0.5) + 1)):
            primes.append(number)
        number += 1
    return primes


def ngram_rows(s: Sizes) -> int:
    """Rows of the table, padded to a multiple of 128."""
    return -(-sum(head_sizes(s)) // 128) * 128


def multipliers(vocab: int, seed: int = 1234) -> list[int]:
    """Hash multipliers of the first n-gram layer (docs, model.md section 7)."""
    gamma, mask = 0x9E3779B97F4A7C15, (1 << 64) - 1
    half = max(1, ((1 << 63) - 1) // vocab // 2)
    values = []
    for place in range(3):
        v = (seed + gamma * (place + 1) + gamma) & mask
        v = (v ^ v >> 30) * 0xBF58476D1CE4E5B9 & mask
        v = (v ^ v >> 27) * 0x94D049BB133111EB & mask
        values.append(2 * ((v ^ v >> 31) % half) + 1)
    return values
