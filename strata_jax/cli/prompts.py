"""Where a prompt comes from: a flag, a file, stdin, or ids that never were text."""

import json
import re
from typing import BinaryIO, TextIO

from absl import flags

from strata_jax.cli.files import user_path
from strata_jax.config import ModelConfig
from strata_jax.errors import BadFileError, UsageError
from strata_jax.text.answer import THINK_CLOSE, THINK_OPEN
from strata_jax.text.tokenizer import Tokenizer
from strata_jax.weights.plan import DEFAULT_CONTEXT

FLAGS = ("prompt", "prompt_file", "prompt_ids")
MAX_BYTES = 1 << 28
"""More than any context holds; also what ends the reading of /dev/zero."""
_MAX_SHOWN = 60
_ID_LIST = re.compile(r"\s*[+-]?\d{1,18}\s*(,\s*[+-]?\d{1,18}\s*)*", re.ASCII)


class PlainTokenizer(Tokenizer):
    """For prompts without chat template: the marks of reasoning are text like any other."""

    def special_id(self, text: str) -> int | None:
        """The id of a special token; none for the marks, so that nothing is set apart."""
        return None if text in (THINK_OPEN, THINK_CLOSE) else super().special_id(text)


def read_prompt(values: flags.FlagValues, stdin: TextIO | None) -> str | tuple[int, ...]:
    """The prompt as text, or as ids where ids were given.

    Raises:
        UsageError: if there is none, more than one, or one that cannot be used.
        BadFileError: if its file cannot be read.
    """
    given = [name for name in FLAGS if values[name].value is not None]
    if len(given) > 1:
        raise UsageError(f"generate: received --{' and --'.join(given)}, one prompt expected")
    if values.prompt_ids is not None:
        return _read_ids(values.prompt_ids)
    if values.prompt_file is not None:
        path = values.prompt_file
        return _as_text(_read_file("prompt_file", path), f"--prompt_file={path}")
    if values.prompt is not None:
        return values.prompt
    return _read_stdin(stdin)


def encode_plain(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """Ids of a prompt without chat template, special tokens by their texts."""
    ids = tokenizer.encode(text, special=True)
    leading = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    return tuple(ids if ids[:1] == leading else leading + ids)


def check_ids(ids: tuple[int, ...], config: ModelConfig, max_context: int | None) -> None:
    """Refuses before the model is loaded what the engine would refuse afterwards.

    Raises:
        UsageError: for an empty or too long prompt and for unknown ids.
    """
    if not ids:
        raise UsageError("generate: the prompt is empty, at least one token expected")
    for index, token_id in enumerate(ids):
        if not 0 <= token_id < config.vocab_size:
            raise UsageError(
                f"generate: id {token_id} at position {index} is outside the vocabulary "
                f"[0, {config.vocab_size})"
            )
    limit = max_context or min(config.context_length, DEFAULT_CONTEXT)
    if len(ids) > limit:
        raise UsageError(
            f"generate: the prompt has {len(ids)} tokens, at most {limit} expected; shorten it or "
            f"raise --max_context"
        )


def _read_stdin(stdin: TextIO | None) -> str:
    if stdin is None or stdin.isatty():
        raise UsageError(f"generate: no prompt; give --{', --'.join(FLAGS)} or pipe text to stdin")
    text = _as_text(_read_bounded(stdin.buffer, "stdin"), "stdin")
    if not text:
        raise UsageError(f"generate: stdin is empty, a prompt expected there or by --{FLAGS[0]}")
    return text


def _read_ids(value: str) -> tuple[int, ...]:
    if _ID_LIST.fullmatch(value):
        return tuple(int(item) for item in value.split(","))
    if not value.endswith(".json") and not _is_there(value):
        shown = value if len(value) <= _MAX_SHOWN else f"{value[:_MAX_SHOWN]}..."
        raise UsageError(
            f"--prompt_ids={shown}: ids like 5,6,7 or a file of a JSON list of ids expected"
        )
    try:
        found = json.loads(_read_file("prompt_ids", value))
    except (ValueError, RecursionError) as error:
        raise BadFileError(f"{value}: no JSON ({error}), a list of ids expected") from None
    if not isinstance(found, list):
        raise BadFileError(f"{value}: a {type(found).__name__}, a flat list of ids expected")
    for index, item in enumerate(found):
        if type(item) is not int:  # a bool is an int to isinstance
            shown = json.dumps(item)[:_MAX_SHOWN]
            raise BadFileError(f"{value}: item {index} is {shown}, a whole number expected")
    return tuple(found)


def _is_there(path: str) -> bool:
    try:
        return user_path("prompt_ids", path).exists()
    except (OSError, UsageError):  # a name too long for a file, or none
        return False


def _read_file(flag: str, path: str) -> bytes:
    try:
        with user_path(flag, path).open("rb") as file:
            return _read_bounded(file, path)
    except OSError as error:
        raise BadFileError(f"{path}: cannot be read: {error.strerror}") from None


def _read_bounded(file: BinaryIO, where: str) -> bytes:
    content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise BadFileError(f"{where}: more than {MAX_BYTES >> 20} MiB, a prompt expected")
    return content


def _as_text(content: bytes, where: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{where}: byte {error.start} is not UTF-8, text expected") from None
