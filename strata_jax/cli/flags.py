"""Flags: parsing into one `FlagValues` per command, and the definitions that commands share.

absl parses, prints nothing and exits nowhere: every mistake becomes a UsageError in one line. The
process-wide `flags.FLAGS` is left alone, so that commands do not see each other's flags.
"""

import difflib
import math
import textwrap
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from absl import flags

from strata_jax.cli.unsupported import INSTEAD
from strata_jax.config import MAX_CONTEXT
from strata_jax.errors import UsageError

AUTO = "auto"
MAX_REPEATS = 256
"""More than rulers and tables of text have; a reply that is stuck would go on for the whole context."""
_HELP_NAMES = frozenset({"help", "h", "?", "helpfull", "helpshort"})
_HELP_WIDTH = 98
_ABSL_REPEAT = ";\n    repeat"
_BY_FILE = "; the file's value if not given, else"
_SAMPLING = (
    ("temperature", float, f"0 takes the likeliest id{_BY_FILE} 1", 0, None),
    ("top_k", int, f"draws from the k likeliest ids, 0 from all{_BY_FILE} 0", 0, None),
    ("top_p", float, f"draws from the likeliest ids that make up p{_BY_FILE} 1", 0, 1),
    ("min_p", float, f"leaves out ids below p times the likeliest{_BY_FILE} 0", 0, 1),
    ("repetition_penalty", float, f"lowers ids that occurred, 1 is off{_BY_FILE} 1", 0, None),
    ("presence_penalty", float, f"lowers ids the answer has{_BY_FILE} 0", None, None),
    ("frequency_penalty", float, f"the same, for each time it has them{_BY_FILE} 0", None, None),
)


class HelpRequest(Exception):  # noqa: N818  (nothing went wrong)
    """The user asked for the command's usage."""


class Number(flags.ArgumentParser):
    """A finite number in bounds; says what it expected in whole words."""

    def __init__(self, kind: type, lower: float | None = None, upper: float | None = None) -> None:
        """Takes the type and the bounds, both inclusive."""
        self.kind = kind
        self.lower = -math.inf if lower is None else lower
        self.upper = math.inf if upper is None else upper
        what = "a whole number" if kind is int else "a number"
        if lower is not None and upper is not None:
            what += f" from {lower} to {upper}"
        elif lower is not None:
            what += f" of at least {lower}"
        self.syntactic_help = what

    def parse(self, argument: Any) -> Any:
        """See the base class."""
        try:
            value = self.kind(argument)
            if math.isfinite(value) and self.lower <= value <= self.upper:
                return value
        except (ValueError, OverflowError):
            pass  # the same answer as for a number out of bounds
        raise ValueError(f"{self.syntactic_help} expected")

    def flag_type(self) -> str:
        """See the base class."""
        return "number"


class NumberOrAuto(Number):
    """A finite number in bounds, or the word auto."""

    def __init__(self, kind: type, lower: float | None = None, upper: float | None = None) -> None:
        """See the base class."""
        super().__init__(kind, lower, upper)
        self.syntactic_help += f" or {AUTO}"

    def parse(self, argument: Any) -> Any:
        """See the base class."""
        return AUTO if argument == AUTO else super().parse(argument)


def define_number(
    values: flags.FlagValues,
    name: str,
    kind: type,
    text: str,
    default: float | None = None,
    lower: float | None = None,
    upper: float | None = None,
) -> None:
    """Defines a flag that takes a number."""
    parser = Number(kind, lower, upper)
    flags.DEFINE(parser, name, default, text, values, flags.ArgumentSerializer())


def define_choice(values: flags.FlagValues, name: str, choices: list[str], text: str) -> None:
    """Defines a flag that takes one of some words, the first by default."""
    parser = flags.EnumParser(choices)
    flags.DEFINE(parser, name, choices[0], text, values, flags.ArgumentSerializer())


def define_model(values: flags.FlagValues) -> None:
    """Defines which model file is meant."""
    flags.DEFINE_string(
        "model",
        None,
        "GGUF file, the first shard of several; without it the small embedded model runs",
        flag_values=values,
    )


def define_max_context(values: flags.FlagValues) -> None:
    """Defines how long a conversation may be."""
    define_number(
        values,
        "max_context",
        int,
        "tokens of prompt and answer together; the smaller of the file's and 8192 if not given",
        lower=1,
        upper=MAX_CONTEXT,
    )


def define_prefill(values: flags.FlagValues) -> None:
    """Defines how much of a prompt is read at once."""
    flags.DEFINE(
        NumberOrAuto(int, 1),
        "prefill",
        AUTO,
        "tiles of a chunk, the most of a prompt that is read at once: experts that the GPU does not hold "
        "are fetched once for each; auto is up to 8192 rows on a GPU with the memory, one tile on a CPU",
        values,
        flags.ArgumentSerializer(),
    )


def define_kv(values: flags.FlagValues) -> None:
    """Defines how keys and values are cached."""
    define_choice(
        values,
        "kv",
        ["fp16", "int8", "f32"],
        "how keys and values of attention are cached; int8 takes half of fp16's memory and is coarser",
    )


def define_engine(values: flags.FlagValues) -> None:
    """Defines how the model runs."""
    define_choice(
        values,
        "platform",
        ["auto", "cpu", "cuda"],
        "auto takes an NVIDIA device if there is one, else the CPU with one line",
    )
    define_max_context(values)
    define_kv(values)
    define_number(
        values, "threads", int, "threads of the host ops; one per usable core if not given", lower=1
    )
    define_number(
        values,
        "window_rows",
        int,
        "rows of a decoding window; the engine's choice if not given",
        lower=1,
    )
    define_prefill(values)
    define_number(
        values,
        "indexer_budget",
        int,
        "tokens that sparse attention selects, a multiple of the file's block; the file's if not given",
        lower=1,
        upper=MAX_CONTEXT,
    )
    flags.DEFINE_boolean(
        "prefill_timing",
        False,
        "tells where the time of a prompt went, by phase of a GPU (STRATA_PREFILL_TIMING=1 does, too)",
        flag_values=values,
    )
    flags.DEFINE_string(
        "routing_out",
        None,
        "file for the routed ids of every step, of which a GPU tells nobody: on the CPU only",
        flag_values=values,
    )
    flags.DEFINE_string(
        "compile_cache",
        None,
        "folder that keeps compiled programs, or off; ~/.cache/strata_jax if not given",
        flag_values=values,
    )
    flags.DEFINE_boolean(
        "deterministic", False, "accepted; answers are always reproducible here", flag_values=values
    )


def define_sampling(values: flags.FlagValues) -> None:
    """Defines how ids are drawn. Without a flag the file decides (general.sampling.*)."""
    for name, kind, text, lower, upper in _SAMPLING:
        define_number(values, name, kind, text, lower=lower, upper=upper)
    flags.DEFINE_string(
        "logit_bias",
        None,
        "ID:BIAS,...: what is added to the logits of some ids, -1000 to 1000",
        flag_values=values,
    )
    define_number(values, "seed", int, "decides the draws, with the position", default=0, lower=0)
    define_number(
        values,
        "max_repeats",
        int,
        "ends an answer that says one id so often in a row; 0: never; if not given "
        f"{MAX_REPEATS}, and 0 with --ignore_eos",
        lower=0,
    )


def define_answer(values: flags.FlagValues) -> None:
    """Defines how an answer to messages is written."""
    define_choice(
        values,
        "thinking",
        ["auto", "on", "off"],
        "whether the model thinks first, as far as its chat template offers that",
    )
    flags.DEFINE_string(
        "effort", None, "how much it thinks, in the words of the chat template", flag_values=values
    )


def parse(
    command: str,
    values: flags.FlagValues,
    args: list[str],
    others: Mapping[str, Iterable[str]],
) -> None:
    """Reads a command's arguments into `values`.

    Args:
        command: its name, for messages.
        values: what it defines.
        args: what follows the command's name.
        others: flags of the other commands, by command, for messages.

    Raises:
        HelpRequest: if the usage is asked for.
        UsageError: for everything that cannot be used.
    """
    try:
        # Names first, or absl would take a value for an argument and stop looking for flag files.
        expanded = values.read_flags_from_files(_normalise(values, args))
        rest = values([command, *_normalise(values, expanded)])
    except flags.UnrecognizedFlagError as error:
        _refuse(command, error.flagname, values, others)
    except flags.Error as error:
        raise UsageError(f"{command}: {_tidy(str(error))}") from None
    except (ValueError, OSError) as error:  # a flag file that is no text, --noflag=value
        raise UsageError(f"{command}: {error}") from None
    if len(rest) > 1:
        raise UsageError(
            f"{command}: received {rest[1]!r}, flags only expected (--NAME=VALUE); "
            f"'strata-jax help {command}' lists them"
        )


def given(values: flags.FlagValues) -> list[tuple[str, str]]:
    """Names and values of the flags that were given, as they are written on a command line."""
    return [
        (name, written)
        for name in values
        if not values[name].using_default_value
        for written in _written(values[name])
    ]


def usage(command: str, summary: str, values: flags.FlagValues) -> str:
    """A command's usage, one paragraph a flag, in the order of definition."""
    lines = [f"strata-jax {command} [flags]: {summary}", ""]
    # absl keeps no order of its own; its dictionary does.
    for name in values:
        flag = values[name]
        lines.append(f"  --{'[no]' if flag.boolean else ''}{name}{_value_hint(flag)}")
        text = (flag.help or "").partition(_ABSL_REPEAT)[0]
        if flag.default not in (None, []) and not flag.boolean:
            text += f" (default {flag.default})"
        lines += textwrap.wrap(text, _HELP_WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
    lines += [
        "  --flagfile=FILE",
        "      reads flags from a file, one a line; # begins a comment",
        "",
        "Dashes and underscores are the same in flag names.",
    ]
    return "\n".join(lines) + "\n"


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that `word` was probably meant to be."""
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return found[0] if found else None


def _normalise(values: flags.FlagValues, args: list[str]) -> list[str]:
    """Writes flag names with underscores; leaves values alone, wherever they stand."""
    out: list[str] = []
    rest = iter(args)
    for arg in rest:
        name, equals, value = arg.lstrip("-").partition("=")
        if not arg.startswith("-") or not name:
            return [*out, arg, *rest]
        name = name.replace("-", "_")
        if name.startswith("no_") and name[3:] in values and values[name[3:]].boolean:
            name = f"no{name[3:]}"  # absl's spelling
        if name in _HELP_NAMES:
            raise HelpRequest
        out.append(f"--{name}{equals}{value}")
        if name == "undefok":  # absl's way to hide mistakes
            raise flags.UnrecognizedFlagError(name)
        takes_value = name == "flagfile" or (name in values and not values[name].boolean)
        if takes_value and not equals:
            out += [each for each in (next(rest, None),) if each is not None]
    return out


def _refuse(
    command: str, name: str, values: flags.FlagValues, others: Mapping[str, Iterable[str]]
) -> NoReturn:
    owners = [other for other, names in others.items() if name in names]
    if owners:
        raise UsageError(
            f"{command}: --{name} is a flag of {' and '.join(owners)}, not of {command}"
        )
    if name in INSTEAD:
        raise UsageError(f"{command}: --{name} is not supported; {INSTEAD[name]}")
    suggestion = nearest(name, [*values, "flagfile", "help"])
    advice = f"did you mean --{suggestion}?" if suggestion else "no flag has a name like it"
    raise UsageError(
        f"{command}: unknown flag --{name}; {advice} ('strata-jax help {command}' lists all)"
    )


def _tidy(message: str) -> str:
    """What absl says, in our words."""
    message = message.removeprefix("flag ").removeprefix("ERROR:: Unable to open ")
    where, colon, problem = message.partition(": ")
    if "Non-boolean" in problem:
        problem = "true or false expected"
    return f"{where[:1].lower()}{where[1:]}{colon}{problem}"


def _written(flag: flags.Flag) -> list[str]:
    """A flag's value as text; several values of one that may be given again."""
    if flag.boolean:
        return ["true" if flag.value else "false"]
    if isinstance(flag, flags.MultiFlag):
        return [str(value) for value in flag.value or ()]
    assert flag.serializer is not None, flag.name
    return [flag.serializer.serialize(flag.value)]


def _value_hint(flag: flags.Flag) -> str:
    if flag.boolean:
        return ""
    choices = getattr(flag.parser, "enum_values", None)
    if choices:
        return f"={'|'.join(choices)}"
    return "=N" if flag.flag_type() == "number" else "=TEXT"
