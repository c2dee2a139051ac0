"""The vocabulary of a model file (`tokenizer.ggml.*`), checked before any library sees it.

The BPE of the `tokenizers` package aborts with a panic, not an exception, on a merge whose parts or
product it does not know. So everything that a file can get wrong is looked for here, and each
finding names its place.
"""

import dataclasses
import operator
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn

from strata_jax.errors import BadFileError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Values of `tokenizer.ggml.token_type`."""

PRE_TOKENIZERS = {
    "qwen35": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
        r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
}
"""Regular expression that cuts text into words, by `tokenizer.ggml.pre`.

Source: the released tokenizer.json of Qwen3.5, as quoted in llama.cpp's llama-vocab.cpp beside
LLAMA_VOCAB_PRE_TYPE_QWEN35. llama.cpp itself spells the contractions without case folding, which
differs only after an apostrophe followed by a long s (U+017F).
"""

END_TEXTS = frozenset({"<|endoftext|>", "<|im_end|>"})
"""Control tokens that end an answer although a file names only one of them as its eos.

Source: generation_config.json of the Qwen releases lists both; llama.cpp adds them by their text.
"""

_ADVICE = "token ids still work (--prompt_ids)"


def _byte_alphabet() -> tuple[str, ...]:
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return tuple(chr(byte if byte in printable else next(spare)) for byte in range(256))


BYTE_TO_CHAR = _byte_alphabet()
"""The character that stands for each byte in a byte-level vocabulary.

Printable Latin-1 bytes stand for themselves, the others, in ascending order, take the characters
from U+0100 on. Source: Radford et al. 2019 (GPT-2), section 2.2 and its released encoder.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """Tokens, their kinds and the merges, in file order; every check has been made."""

    tokens: tuple[str, ...]
    """Text by id: normal tokens in the byte alphabet, the others as they are. All distinct."""
    kinds: tuple[int, ...]
    """Kind by id, `NORMAL` to `BYTE`."""
    merges: tuple[tuple[str, str], ...]
    """Pairs in descending priority; parts and products are normal tokens."""
    ids: Mapping[str, int]
    """Id by text."""
    eos_ids: frozenset[int]
    """Ids that end an answer."""
    bos_id: int | None
    """Id that has to begin every prompt, if the file asks for one (`add_bos_token`)."""
    named_ids: Mapping[str, int]
    """Ids the file gives a role; keys `eos`, `eot`, `eom`, `bos`, as far as it has them."""
    pattern: str
    """Regular expression of the pre-tokenizer."""

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, object]) -> "Vocabulary":
        """Reads and checks the `tokenizer.ggml.*` entries of a file.

        Raises:
            BadFileError: if a tokenizer cannot be built from them; one line that says why.
        """
        pattern = _pre_tokenizer(metadata)
        tokens = _strings(metadata, "tokens")
        kinds = _integers(metadata, "token_type")
        ids = _check_tokens(tokens, kinds)
        normal = frozenset(t for t, kind in zip(tokens, kinds, strict=True) if kind == NORMAL)
        merges = _read_merges(_strings(metadata, "merges"), normal)
        named = _named_ids(metadata, len(tokens))
        ends = {named[key] for key in ("eos", "eot", "eom") if key in named}
        ends |= {ids[text] for text in END_TEXTS if text in ids and kinds[ids[text]] == CONTROL}
        return cls(
            tokens=tuple(tokens),
            kinds=tuple(kinds),
            merges=tuple(merges),
            ids=ids,
            eos_ids=frozenset(ends),
            bos_id=_leading_id(metadata, named),
            named_ids=named,
            pattern=pattern,
        )


def _fail(what: str) -> NoReturn:
    raise BadFileError(f"tokenizer: {what}; {_ADVICE}")


def _key(name: str) -> str:
    return f"tokenizer.ggml.{name}"


def _pre_tokenizer(metadata: Mapping[str, object]) -> str:
    model = metadata.get(_key("model"))
    if model is None:
        _fail(f"the file has no {_key('model')}, expected 'gpt2'")
    if model != "gpt2":
        _fail(f"{_key('model')} is {reprlib.repr(model)}, expected 'gpt2' (byte-level BPE)")
    pre = metadata.get(_key("pre"))
    if not isinstance(pre, str) or pre not in PRE_TOKENIZERS:
        _fail(f"{_key('pre')} is {reprlib.repr(pre)}, expected {' or '.join(PRE_TOKENIZERS)}")
    return PRE_TOKENIZERS[pre]


def _array(metadata: Mapping[str, object], name: str) -> list[object]:
    value = metadata.get(_key(name))
    if value is None:
        _fail(f"the file has no {_key(name)}")
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        _fail(f"{_key(name)} is {reprlib.repr(value)}, expected an array")
    return list(value)


def _strings(metadata: Mapping[str, object], name: str) -> list[str]:
    values = _array(metadata, name)
    strings = [value for value in values if isinstance(value, str)]
    if len(strings) < len(values):
        index, value = next((i, v) for i, v in enumerate(values) if not isinstance(v, str))
        _fail(f"{_key(name)}[{index}] is {reprlib.repr(value)}, expected a string")
    return strings


def _integer(value: object, where: str) -> int:
    if isinstance(value, bool):
        _fail(f"{where} is {value}, expected an integer")
    try:
        return operator.index(value)  # pyright: ignore[reportArgumentType]  (the TypeError is the check)
    except TypeError:
        _fail(f"{where} is {reprlib.repr(value)}, expected an integer")


def _integers(metadata: Mapping[str, object], name: str) -> list[int]:
    return [
        value if type(value) is int else _integer(value, f"{_key(name)}[{index}]")
        for index, value in enumerate(_array(metadata, name))
    ]


def _check_tokens(tokens: Sequence[str], kinds: Sequence[int]) -> dict[str, int]:
    """Returns id by text after checking lengths, kinds, duplicates and the byte tokens."""
    if len(kinds) != len(tokens):
        _fail(f"{len(kinds)} token types for {len(tokens)} tokens, expected one for each")
    for index, kind in enumerate(kinds):
        if not NORMAL <= kind <= BYTE:
            _fail(f"token {index} has type {kind}, expected {NORMAL} to {BYTE}")
    ids = {token: index for index, token in enumerate(tokens)}
    if "" in ids:
        _fail(f"token {ids['']} is empty")
    if len(ids) < len(tokens):
        index = next(i for i, token in enumerate(tokens) if ids[token] != i)
        _fail(f"tokens {index} and {ids[tokens[index]]} are both {reprlib.repr(tokens[index])}")
    if not _is_unicode("".join(tokens)):
        index = next(i for i, token in enumerate(tokens) if not _is_unicode(token))
        _fail(f"token {index} is {reprlib.repr(tokens[index])}, expected valid UTF-8")
    missing = [
        byte
        for byte, char in enumerate(BYTE_TO_CHAR)
        if char not in ids or kinds[ids[char]] != NORMAL
    ]
    if missing:
        _fail(
            f"{len(missing)} of the 256 byte tokens are missing, the first for byte "
            f"0x{missing[0]:02x}; expected all of them among {len(tokens)} tokens"
        )
    return ids


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _read_merges(merges: Sequence[str], normal: frozenset[str]) -> dict[tuple[str, str], int]:
    """Ranks of the merges. A product that is not a normal token would let text forge it."""
    ranks: dict[tuple[str, str], int] = {}
    for rank, merge in enumerate(merges):
        left, _, right = merge.partition(" ")
        if not left or not right or " " in right:
            _fail(f"merge {rank} is {reprlib.repr(merge)}, expected two tokens and one space")
        product = left + right
        if left not in normal or right not in normal or product not in normal:
            token = next(t for t in (left, right, product) if t not in normal)
            _fail(
                f"merge {rank} is {reprlib.repr(merge)}, but {reprlib.repr(token)} is no normal "
                "token of the vocabulary"
            )
        if ranks.setdefault((left, right), rank) != rank:
            _fail(f"merges {ranks[left, right]} and {rank} are both {reprlib.repr(merge)}")
    return ranks


def _named_ids(metadata: Mapping[str, object], num_tokens: int) -> dict[str, int]:
    """Ids with a role; each has to exist."""
    named: dict[str, int] = {}
    for name in ("eos", "eot", "eom", "bos"):
        key = f"{name}_token_id"
        value = metadata.get(_key(key))
        if value is None:
            continue
        token_id = _integer(value, _key(key))
        if not 0 <= token_id < num_tokens:
            _fail(f"{_key(key)} is {token_id}, outside [0, {num_tokens})")
        named[name] = token_id
    return named


def _leading_id(metadata: Mapping[str, object], named: Mapping[str, int]) -> int | None:
    wanted = metadata.get(_key("add_bos_token"), False)
    if not isinstance(wanted, bool):
        _fail(f"{_key('add_bos_token')} is {reprlib.repr(wanted)}, expected true or false")
    if wanted and "bos" not in named:
        _fail(f"{_key('add_bos_token')} is set, but the file has no {_key('bos_token_id')}")
    return named["bos"] if wanted else None
