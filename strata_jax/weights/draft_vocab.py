"""The ids that a drafter scores, as a file: a subset of the head's rows, for less work a draft.

Format: text, one id a line, ascending; empty lines and what follows a # do not count. What is not among
them is never drafted and comes out as always: answers do not depend on the file (reports.md, 79).
`tools/draft_vocab.py` writes one.
"""

import collections
import os
import pathlib
from collections.abc import Iterable

import numpy as np

from strata_jax.errors import BadFileError, UsageError

_MOST_BYTES = 1 << 26
_MOST_DIGITS = 18


def read_draft_vocab(path: str | os.PathLike[str], vocab_size: int) -> np.ndarray:
    """The ids of a file, int32 [n], ascending.

    Args:
        path: of the file.
        vocab_size: ids that the model has.

    Raises:
        BadFileError: if the file is missing, unreadable, empty, or has a line that is no id of the model
            or no larger than the one before: file and line are named.
    """
    path = pathlib.Path(path)
    if path.exists() and not path.is_file() and not path.is_dir():  # it might have no end
        raise BadFileError(f"{path}: is no regular file, a draft vocabulary expected")
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise BadFileError(
                f"{path}: {path.stat().st_size} bytes, at most {_MOST_BYTES} of ids expected"
            )
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is no text of ids"
        raise BadFileError(
            f"{path}: {reason}, a draft vocabulary expected; tools/draft_vocab.py writes one"
        ) from None
    ids: list[int] = []
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        if text:
            ids.append(_checked(f"{path}:{number}", text, vocab_size, ids[-1] if ids else -1))
    if not ids:
        raise BadFileError(f"{path}: names no id, at least one expected")
    return np.asarray(ids, np.int32)


def format_draft_vocab(ids: Iterable[int], comment: str) -> str:
    """The text of such a file; `comment` is its first line."""
    lines = [f"# {comment}", *(str(token) for token in sorted(set(ids)))]
    return "\n".join(lines) + "\n"


def most_frequent(ids: Iterable[int], always: Iterable[int], count: int) -> tuple[list[int], float]:
    """The ids that a text is made of for the most part.

    Args:
        ids: of the text.
        always: ids that are chosen whatever the text (ends of turns, ...).
        count: how many to choose.

    Returns:
        the ids, ascending, and the share of the text that they make up.

    Raises:
        UsageError: if that is no id at all.
    """
    if count < 1:
        raise UsageError(f"--count={count}: at least 1 expected, for a file of no ids is refused")
    counts = collections.Counter(ids)
    chosen = list(dict.fromkeys(always))[:count]
    taken = set(chosen)
    ranked = sorted(counts, key=lambda token: (-counts[token], token))
    chosen += [token for token in ranked if token not in taken][: count - len(chosen)]
    if not chosen:
        raise UsageError("the texts are empty, at least one id expected")
    covered = sum(counts[token] for token in chosen)
    return sorted(chosen), covered / max(counts.total(), 1)


def _checked(where: str, text: str, vocab_size: int, before: int) -> int:
    is_number = text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS
    if not (is_number and int(text) < vocab_size):
        raise BadFileError(
            f"{where}: {text[:40]!r}, an id from 0 to {vocab_size - 1} expected, as the model has"
        )
    token = int(text)
    if token <= before:
        raise BadFileError(f"{where}: id {token} after {before}, ascending ids expected")
    return token
