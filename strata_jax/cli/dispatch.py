"""From a command line to the command: picks it, reads its flags, prints usage.

Nothing heavy is imported before the flags are read: usage is there at once.
"""

import importlib
from typing import cast

from absl import flags

from strata_jax import __version__
from strata_jax.cli import flags as cli_flags
from strata_jax.cli.context import Command, Context
from strata_jax.cli.files import check_written
from strata_jax.errors import UsageError

COMMANDS = ("generate", "chat", "plan", "doctor", "gate", "profile")
"""In the order of the usage; each is a module of this package."""


def dispatch(args: list[str], context: Context) -> int:
    """Runs the command that a command line names; returns its exit code."""
    name, *rest = args or ["help"]
    if name in ("--version", "-version", "version"):
        context.output.text(f"strata-jax {__version__}\n")
        return 0
    if name in ("help", "--help", "-help", "-h", "--helpfull", "--helpshort", "-?"):
        context.output.text(_command_usage(_known(rest[0])) if rest else _usage())
        return 0
    command = _load(_known(name))
    values = _define(command)
    others = {other: _define(_load(other)) for other in COMMANDS if other != name}
    try:
        cli_flags.parse(name, values, rest, others)
    except cli_flags.HelpRequest:
        context.output.text(_command_usage(name))
        return 0
    check_written(values)
    return command.run(values, context)


def _known(name: str) -> str:
    if name in COMMANDS:
        return name
    if name.startswith("-"):
        raise UsageError(f"received {name} first, a command expected: {', '.join(COMMANDS)}")
    suggestion = cli_flags.nearest(name, COMMANDS)
    advice = (
        f"did you mean {suggestion}?" if suggestion else f"one of {', '.join(COMMANDS)} expected"
    )
    raise UsageError(f"unknown command {name!r}; {advice}")


def _load(name: str) -> Command:
    return cast(Command, importlib.import_module(f"strata_jax.cli.{name}"))


def _define(command: Command) -> flags.FlagValues:
    values = flags.FlagValues()
    command.define(values)
    return values


def _command_usage(name: str) -> str:
    command = _load(name)
    return cli_flags.usage(name, command.SUMMARY, _define(command))


def _usage() -> str:
    lines = [f"  {name:<10} {_load(name).SUMMARY}" for name in COMMANDS]
    return "\n".join(
        [
            "usage: strata-jax COMMAND [flags]",
            "",
            *lines,
            "",
            "'strata-jax help COMMAND' lists a command's flags. Without --model a small embedded",
            "model runs. Exit codes: 0 done, 1 failed, 2 usage, 3 does not fit, 4 bad file, 5 a gate",
            "did not exercise what it tests, 130 interrupted.",
            "",
        ]
    )
