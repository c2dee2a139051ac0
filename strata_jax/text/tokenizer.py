"""Text to token ids and back: byte-level BPE with special tokens kept apart."""

import functools
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from tokenizers import Regex
from tokenizers import Tokenizer as BpeTokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

from strata_jax.errors import UsageError
from strata_jax.text import vocabulary
from strata_jax.text.vocabulary import Vocabulary

_BYTE_OF_CHAR = {ord(char): byte for byte, char in enumerate(vocabulary.BYTE_TO_CHAR)}
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class SpecialSpan(NamedTuple):
    """A special token's text found at `text[start:end]`."""

    start: int
    end: int
    token_id: int


class Tokenizer:
    """Encodes and decodes with the vocabulary of a model file. Immutable, safe to share.

    No Unicode normalisation takes place, so every text that UTF-8 can hold comes back as it was.
    """

    def __init__(self, words: Vocabulary) -> None:
        self._words = words
        self._special = {
            text: token_id
            for token_id, (text, kind) in enumerate(zip(words.tokens, words.kinds, strict=True))
            if kind in (vocabulary.CONTROL, vocabulary.USER_DEFINED)
        }
        self._first_chars = re.compile(
            "[" + "".join(sorted({re.escape(text[0]) for text in self._special})) + "]"
            if self._special
            else r"(?!)"
        )
        self._lengths = _lengths_by_head(self._special)
        # The BPE never hears of the special tokens: they are found here, so that a text can be
        # encoded with or without them at the same time in several threads.
        self._bpe = BpeTokenizer(BPE(vocab=dict(words.ids), merges=list(words.merges)))
        split = Split(Regex(words.pattern), behavior="isolated")
        byte_level = ByteLevel(add_prefix_space=False, use_regex=False)
        self._bpe.pre_tokenizer = Sequence([split, byte_level])  # pyright: ignore[reportAttributeAccessIssue]  (stubs lack the setter)

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, object]) -> "Tokenizer":
        """Builds the tokenizer a model file describes.

        Raises:
            BadFileError: if its `tokenizer.ggml.*` entries do not make one.
        """
        return cls(Vocabulary.from_metadata(metadata))

    @property
    def vocab_size(self) -> int:
        """Number of ids."""
        return len(self._words.tokens)

    @property
    def eos_ids(self) -> frozenset[int]:
        """Ids that end an answer; empty if the file names none."""
        return self._words.eos_ids

    @property
    def bos_id(self) -> int | None:
        """Id to put before every prompt, if the file asks for one."""
        return self._words.bos_id

    @property
    def named_ids(self) -> Mapping[str, int]:
        """Ids with a role in the file: `eos`, `eot`, `eom`, `bos`, as far as it has them."""
        return self._words.named_ids

    @functools.cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that text cannot reach unless `special` is asked for: control and user-defined."""
        return frozenset(self._special.values())

    @functools.cached_property
    def hidden_ids(self) -> frozenset[int]:
        """Ids whose text is no part of an answer: control and unknown tokens, and all that end it."""
        kinds = (vocabulary.CONTROL, vocabulary.UNKNOWN)
        hidden = frozenset(i for i, kind in enumerate(self._words.kinds) if kind in kinds)
        return hidden | self.eos_ids

    @property
    def special_texts(self) -> Iterable[str]:
        """The texts of `special_ids`."""
        return self._special.keys()

    def special_id(self, text: str) -> int | None:
        """The id of the special token with exactly this text, if there is one."""
        return self._special.get(text)

    def token_text(self, token_id: int) -> str:
        """The text of one token; U+FFFD where its bytes alone are no UTF-8."""
        return self.token_bytes(token_id).decode(errors="replace")

    def find_special(self, text: str) -> list[SpecialSpan]:
        """Special tokens in a text, from left to right, the longest where several fit."""
        spans: list[SpecialSpan] = []
        at = 0
        while match := self._first_chars.search(text, at):
            start = match.start()
            at = start + 1
            heads = text[start : start + 2], text[start]
            for length in (n for head in heads for n in self._lengths.get(head, ())):
                token_id = self._special.get(text[start : start + length])
                if token_id is not None:
                    at = min(start + length, len(text))
                    spans.append(SpecialSpan(start, at, token_id))
                    break
        return spans

    def encode(self, text: str, special: bool) -> list[int]:
        """Ids of a text, without a leading or closing id.

        Args:
            text: any text that UTF-8 can hold.
            special: whether the texts of special tokens become those tokens. False for what people
                type: it then stays plain text.

        Raises:
            UsageError: if the text holds a lone surrogate.
        """
        return self.encode_spans(text, self.find_special(text) if special else ())

    def encode_spans(self, text: str, spans: Iterable[SpecialSpan]) -> list[int]:
        """Ids of a text in which the given spans, in order, are special tokens and no others."""
        ids: list[int] = []
        at = 0
        for span in spans:
            ids += self._plain(text[at : span.start])
            ids.append(span.token_id)
            at = span.end
        return ids + self._plain(text[at:])

    def decode(self, ids: Iterable[int], special: bool = True) -> str:
        """Text of some ids; bytes that are no UTF-8 become U+FFFD.

        Args:
            ids: token ids.
            special: whether control tokens are shown as their text or left out.

        Raises:
            UsageError: if an id is outside the vocabulary.
        """
        parts: list[str] = []
        run = bytearray()
        for token_id in ids:
            if not self.breaks_bytes(token_id):
                run += self.token_bytes(token_id)
                continue
            parts.append(run.decode(errors="replace"))
            run.clear()
            if special or token_id not in self.hidden_ids:
                parts.append(self.token_text(token_id))
        parts.append(run.decode(errors="replace"))
        return "".join(parts)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for; a special token's are its text.

        Raises:
            UsageError: if the id is outside the vocabulary.
        """
        self._check(token_id)
        text, kind = self._words.tokens[token_id], self._words.kinds[token_id]
        if kind == vocabulary.BYTE and (match := _BYTE_TOKEN.fullmatch(text)):
            return bytes.fromhex(match[1])
        if kind == vocabulary.NORMAL:
            octets = [_BYTE_OF_CHAR.get(ord(char)) for char in text]
            known = [octet for octet in octets if octet is not None]
            if len(known) == len(octets):
                return bytes(known)
        return text.encode()

    def breaks_bytes(self, token_id: int) -> bool:
        """Whether no character can begin before this token and end behind it.

        Raises:
            UsageError: if the id is outside the vocabulary.
        """
        self._check(token_id)
        plain = self._words.kinds[token_id] in (vocabulary.NORMAL, vocabulary.BYTE)
        return not plain or token_id in self.hidden_ids

    def _plain(self, text: str) -> list[int]:
        if not text:
            return []
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UsageError(
                f"text: character {error.start} is the lone surrogate "
                f"U+{ord(text[error.start]):04X}, expected text that UTF-8 can hold"
            ) from error
        return self._bpe.encode(text, add_special_tokens=False).ids

    def _check(self, token_id: int) -> None:
        if not 0 <= token_id < len(self._words.tokens):
            raise UsageError(
                f"tokenizer: id {token_id} is outside the vocabulary [0, {len(self._words.tokens)})"
            )


def _lengths_by_head(texts: Iterable[str]) -> dict[str, list[int]]:
    """Lengths of the texts, descending, by their first two characters (one if there is no more)."""
    found: dict[str, set[int]] = {}
    for text in texts:
        found.setdefault(text[:2], set()).add(len(text))
    return {head: sorted(lengths, reverse=True) for head, lengths in found.items()}
