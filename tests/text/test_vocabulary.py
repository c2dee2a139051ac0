"""Checks of `tokenizer.ggml.*`: every way a file can be wrong is one clear line."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_jax.errors import BadFileError
from strata_jax.text.tokenizer import Tokenizer
from strata_jax.text.vocabulary import BYTE_TO_CHAR, Vocabulary
from tests.text.small import KINDS, MERGES, TOKENS, embedded_metadata, small_metadata


def test_reads_a_good_vocabulary():
    words = Vocabulary.from_metadata(small_metadata())

    assert list(words.tokens) == TOKENS
    assert words.merges[0] == ("h", "e")
    assert words.ids["hello"] == TOKENS.index("hello")
    assert words.bos_id is None


def test_ends_answers_at_eos_eot_eom_and_the_end_of_text():
    words = Vocabulary.from_metadata(small_metadata(eot_token_id=5, eom_token_id=6))

    ends = {TOKENS.index("<|im_end|>"), TOKENS.index("<|endoftext|>"), 5, 6}
    assert words.eos_ids == ends


def test_needs_no_eos():
    kinds = [1 if token.startswith("<|") else kind for token, kind in zip(TOKENS, KINDS)]

    words = Vocabulary.from_metadata(small_metadata(eos_token_id=None, token_type=kinds))

    assert words.eos_ids == frozenset()


def test_gives_the_leading_id_a_file_asks_for():
    words = Vocabulary.from_metadata(small_metadata(bos_token_id=7, add_bos_token=True))

    assert words.bos_id == 7


def test_takes_integers_of_any_kind():
    words = Vocabulary.from_metadata(small_metadata(token_type=np.array(KINDS, np.int32)))

    assert list(words.kinds) == KINDS


def test_maps_bytes_as_gpt2_does():
    assert len(set(BYTE_TO_CHAR)) == 256
    assert BYTE_TO_CHAR[ord(" ")] == "Ġ"
    assert BYTE_TO_CHAR[ord("\n")] == "Ċ"
    assert BYTE_TO_CHAR[ord("a")] == "a"
    assert BYTE_TO_CHAR[0xAD] == "Ń"


def replaced(index, token):
    return [*TOKENS[:index], token, *TOKENS[index + 1 :]]


WRONG = {
    "no model": ({"model": None}, "no tokenizer.ggml.model"),
    "another model": ({"model": "llama"}, "model is 'llama', expected 'gpt2'"),
    "no pre": ({"pre": None}, "pre is None, expected qwen35"),
    "another pre": ({"pre": "llama-bpe"}, "pre is 'llama-bpe', expected qwen35"),
    "a pre that is a list": ({"pre": ["qwen35"]}, "pre is "),
    "no tokens": ({"tokens": None}, "no tokenizer.ggml.tokens"),
    "tokens that are a text": ({"tokens": "abc"}, "tokens is 'abc', expected an array"),
    "a number among tokens": ({"tokens": replaced(3, 7)}, "tokens[3] is 7, expected a string"),
    "an empty token": ({"tokens": replaced(3, "")}, "token 3 is empty"),
    "a duplicate": ({"tokens": replaced(270, "a")}, "tokens 97 and 270 are both 'a'"),
    "a lone surrogate": ({"tokens": replaced(265, "\ud800")}, "token 265"),
    "no types": ({"token_type": None}, "no tokenizer.ggml.token_type"),
    "too few types": ({"token_type": KINDS[:-1]}, f"{len(KINDS) - 1} token types for"),
    "a type out of range": ({"token_type": [9, *KINDS[1:]]}, "token 0 has type 9"),
    "a type that is a float": ({"token_type": [1.0, *KINDS[1:]]}, "token_type[0] is 1.0"),
    "a type that is a bool": ({"token_type": [True, *KINDS[1:]]}, "token_type[0] is True"),
    "a missing byte": ({"tokens": replaced(65, "missing")}, "1 of the 256 byte tokens"),
    "a byte that is special": ({"token_type": [3, *KINDS[1:]]}, "the first for byte 0x00"),
    "no merges": ({"merges": None}, "no tokenizer.ggml.merges"),
    "a merge without space": ({"merges": ["he"]}, "merge 0 is 'he', expected two tokens"),
    "a merge with two spaces": ({"merges": ["h e l"]}, "merge 0 is 'h e l'"),
    "half a merge": ({"merges": ["h "]}, "merge 0 is 'h '"),
    "an unknown part": ({"merges": ["zz e"]}, "'zz' is no normal token"),
    "an unknown product": ({"merges": ["q q"]}, "'qq' is no normal token"),
    "a merge into a special token": (
        {"merges": [*MERGES, "<| im"], "tokens": replaced(258, "<|")},
        "is no normal token",
    ),
    "a duplicate merge": ({"merges": ["h e", "h e"]}, "merges 0 and 1 are both 'h e'"),
    "an eos out of range": ({"eos_token_id": 10**6}, "eos_token_id is 1000000, outside [0, "),
    "a negative eos": ({"eos_token_id": -1}, "eos_token_id is -1, outside"),
    "an eos that is a text": ({"eos_token_id": "2"}, "eos_token_id is '2', expected an integer"),
    "a bos that is missing": ({"add_bos_token": True}, "no tokenizer.ggml.bos_token_id"),
    "a flag that is none": ({"add_bos_token": 3}, "add_bos_token is 3, expected true or false"),
}


@pytest.mark.parametrize(("changes", "text"), WRONG.values(), ids=WRONG.keys())
def test_refuses(changes, text):
    with pytest.raises(BadFileError) as caught:
        Tokenizer.from_metadata(small_metadata(**changes))

    message = str(caught.value)
    assert text in message
    assert message.startswith("tokenizer: ")
    assert "\n" not in message
    assert len(message) < 400


def test_refuses_a_vocabulary_without_bytes_as_speed_slices_have():
    tokens = [f"<t{index}>" for index in range(8192)]
    tokens[2] = tokens[0] + tokens[1]
    metadata = small_metadata(
        tokens=tokens, token_type=[1] * 8192, merges=["<t0> <t1>"], eos_token_id=8190
    )

    with pytest.raises(BadFileError, match=r"256 of the 256 byte tokens are missing.*--prompt_ids"):
        Tokenizer.from_metadata(metadata)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_never_lets_the_library_panic(data):
    """Whatever is changed in the lists: a tokenizer that works, or one of our errors."""
    metadata = dict(embedded_metadata())
    key = data.draw(st.sampled_from(["tokens", "merges", "token_type"]))
    values = list(metadata[f"tokenizer.ggml.{key}"])  # pyright: ignore[reportArgumentType]
    index = data.draw(st.integers(0, len(values) - 1))
    other = data.draw(st.integers(0, len(values) - 1))
    change = data.draw(st.sampled_from(["swap", "drop", "repeat", "replace"]))
    if change == "swap":
        values[index], values[other] = values[other], values[index]
    elif change == "drop":
        del values[index]
    elif change == "repeat":
        values.insert(index, values[other])
    else:
        values[index] = data.draw(st.text(max_size=3) if key != "token_type" else st.integers(0, 7))
    metadata[f"tokenizer.ggml.{key}"] = values

    try:
        tokenizer = Tokenizer.from_metadata(metadata)
    except BadFileError:
        return

    assert tokenizer.decode(tokenizer.encode("hello world <|im_end|>", special=True))
