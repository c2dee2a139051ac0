"""A small vocabulary in the shape of a model file's metadata, and the embedded model's."""

import functools
import pathlib

from strata_jax.text.tokenizer import Tokenizer
from strata_jax.text.vocabulary import BYTE_TO_CHAR
from strata_jax.weights.gguf import GgufFile

ROOT = pathlib.Path(__file__).parents[2]
EMBEDDED_MODEL = ROOT / "strata_jax" / "models" / "strata-small" / "model-IQ3_S.gguf"

MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "Ġw o", "r l", "Ġwo rl", "Ġworl d", "Ċ Ċ", "Ã ©"]
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|im"]
USER_DEFINED = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>"]


WORDS = [merge.replace(" ", "") for merge in MERGES]
TOKENS = [*BYTE_TO_CHAR, *WORDS, *CONTROL, *USER_DEFINED]
KINDS = [1] * (256 + len(WORDS)) + [3] * len(CONTROL) + [4] * len(USER_DEFINED)


def small_metadata(**changes: object) -> dict[str, object]:
    """Metadata of a vocabulary with all bytes, a few words and special tokens.

    Args:
        changes: entries of `tokenizer.ggml.` to replace; None takes one out.
    """
    entries: dict[str, object] = {
        "model": "gpt2",
        "pre": "qwen35",
        "tokens": list(TOKENS),
        "token_type": list(KINDS),
        "merges": list(MERGES),
        "eos_token_id": TOKENS.index("<|im_end|>"),
    }
    entries |= changes
    return {f"tokenizer.ggml.{key}": value for key, value in entries.items() if value is not None}


@functools.cache
def small_tokenizer() -> Tokenizer:
    """The tokenizer of `small_metadata`."""
    return Tokenizer.from_metadata(small_metadata())


@functools.cache
def embedded_metadata() -> dict[str, object]:
    """Metadata of the model that comes with the package."""
    with GgufFile.open(EMBEDDED_MODEL) as file:
        return {key: file.metadata[key] for key in file.metadata if key.startswith("tokenizer.")}


@functools.cache
def embedded_tokenizer() -> Tokenizer:
    """The tokenizer of the model that comes with the package."""
    return Tokenizer.from_metadata(embedded_metadata())
