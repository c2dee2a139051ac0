"""Paths that flags name: which model file a command is about, what is read and what is written."""

import contextlib
import importlib.resources
import os
from pathlib import Path

from absl import flags

from strata_jax.errors import UsageError

EMBEDDED = ("models", "strata-small", "model-IQ3_S.gguf")
"""Path of the model that runs without --model, inside the package."""
_GGUF = b"GGUF"
"""How every file of a model begins, each part of several too."""
_READ = (
    *("model", "mtp", "draft_vocab", "draft_script", "expert_profile", "prompt_file", "prompt_ids"),
    *("profile", "routing"),
)
_WRITTEN = ("out", "record", "logits_out", "routing_out", "expert_profile_save")
_CARRIED_ON = (("expert_profile_save", "expert_profile"), ("out", "profile"))
"""What is written may take the place of what it was made from: rankings, which are replaced at once."""
_MOST_CHARACTERS = 4096
_SHOWN = 60


def user_path(flag: str, text: str) -> Path:
    """The path that the value of --`flag` is, with ~ for a home folder.

    Raises:
        UsageError: if it can be none.
    """
    problem = None
    if not text:
        problem = "is empty"
    elif "\0" in text:
        problem = "has a zero byte"
    elif len(text) > _MOST_CHARACTERS:
        problem = f"has {len(text)} characters"
    else:
        try:
            return Path(text).expanduser()
        except RuntimeError:
            problem = "is in the home folder of nobody here"
    shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
    raise UsageError(f"--{flag}={shown}: {problem}, a path expected")


def output_path(flag: str, text: str | None) -> Path | None:
    """Where --`flag` lets something be written; None if it was not given.

    Checked before the work is done: afterwards it would be a pity. A pipe that nobody reads would hold
    the work up.

    Raises:
        UsageError: if no file can be written there, or a model's would be lost.
    """
    if text is None:
        return None
    path = user_path(flag, text)
    if path.is_dir() or path.is_fifo() or not path.parent.is_dir():
        raise UsageError(f"--{flag}={text}: a file in an existing folder expected")
    if _is_gguf(path):
        raise UsageError(f"--{flag}={text}: is a GGUF file, which would be lost; name another file")
    return path


def check_written(values: flags.FlagValues) -> None:
    """Refuses a command that would write over a file that it reads, or write two things into one.

    Raises:
        UsageError: with the names of both flags.
    """
    taken = [(flag, path) for flag in _READ for path in _paths_of(values, flag)]
    for flag in _WRITTEN:
        for path in _paths_of(values, flag):
            for other, known in taken:
                if (flag, other) not in _CARRIED_ON and _is_one_file(path, known):
                    raise UsageError(
                        f"--{flag}={path} and --{other}={known} are one file, whose content would be "
                        "lost; name another one"
                    )
            taken.append((flag, path))


def model_path(values: flags.FlagValues) -> Path:
    """The file that --model names, or the embedded one.

    Raises:
        UsageError: if it names none.
    """
    given = values.model
    if given is not None:
        return user_path("model", given)
    return embedded_model()


def embedded_model() -> Path:
    """The file inside the package."""
    return Path(str(importlib.resources.files("strata_jax").joinpath(*EMBEDDED)))


def _paths_of(values: flags.FlagValues, flag: str) -> list[Path]:
    """What a flag names, if the command has it and it was given; no path is refused elsewhere."""
    value = values[flag].value if flag in values else None
    texts = [value] if isinstance(value, str) else value or []
    paths = []
    for text in texts:
        name = text.partition(":")[2] if flag == "draft_script" else text
        with contextlib.suppress(UsageError):
            paths.append(user_path(flag, name))
    return paths


def _is_one_file(path: Path, other: Path) -> bool:
    """Whether what is written to a path replaces the other; a device takes whatever comes."""
    if not path.exists():
        return os.path.realpath(path) == os.path.realpath(other)
    with contextlib.suppress(OSError):
        return path.is_file() and path.samefile(other)
    return False


def _is_gguf(path: Path) -> bool:
    with contextlib.suppress(OSError):
        if path.is_file():
            with path.open("rb") as file:
                return file.read(len(_GGUF)) == _GGUF
    return False
