"""The console script `strata-jax`: picks the command, reads its flags, turns errors into exit codes.

Nothing heavy is imported before the flags are read: usage is there at once.
"""

import importlib
import io
import os
import sys
from typing import TextIO, cast

from absl import flags

from strata_jax import __version__
from strata_jax.cli import flags as cli_flags
from strata_jax.cli.context import Command, Context, OpenEngine, open_engine
from strata_jax.cli.interrupts import EXIT_CODE as INTERRUPTED
from strata_jax.cli.interrupts import Interrupts
from strata_jax.cli.output import Output
from strata_jax.errors import CapacityError, StrataError, UsageError

COMMANDS = ("generate", "chat", "plan", "doctor")
"""In the order of the usage; each is a module of this package."""


def run() -> int:
    """Entry point of the console script; returns the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # results are UTF-8 whatever the locale says
            cast("io.TextIOWrapper", stream).reconfigure(
                encoding="utf-8", errors="backslashreplace"
            )
    code = main(sys.argv[1:], sys.stdin, sys.stdout, sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        _finish(stream)
    if code == INTERRUPTED:
        # Not through Python's and the libraries' exit handlers: they may wait for a compilation.
        os._exit(code)
    return code


def main(
    args: list[str],
    stdin: TextIO | None,
    stdout: TextIO | None,
    stderr: TextIO | None,
    open_engine: OpenEngine = open_engine,
) -> int:
    """Runs one command.

    Args:
        args: the command line behind the program's name.
        stdin: where a prompt or a chat may come from; this and the next are None if closed.
        stdout: for the result.
        stderr: for everything else.
        open_engine: makes the engine.

    Returns:
        The exit code of design.md.
    """
    output = Output(stdout, stderr)
    interrupts = Interrupts()
    try:
        with interrupts:
            context = Context(
                output=output, interrupts=interrupts, stdin=stdin, open_engine=open_engine
            )
            return _dispatch(args, context)
    except (StrataError, OSError, MemoryError) as error:
        line, code = _explain(error)
        if line:
            output.error(line)
        return code
    except KeyboardInterrupt:
        output.error("interrupted")
        return INTERRUPTED
    except Exception:
        if interrupts.fatal.is_set():  # the interrupt surfaced as a library's own error
            output.error("interrupted")
            return INTERRUPTED
        raise


def _explain(error: StrataError | OSError | MemoryError) -> tuple[str, int]:
    """What to tell about an error, perhaps nothing, and the exit code."""
    if isinstance(error, StrataError):
        return str(error), error.exit_code
    if isinstance(error, MemoryError):
        return "memory: no more to be had; --max_context=N takes less", CapacityError.exit_code
    if isinstance(error, BrokenPipeError):  # the reader has gone and knows it
        return "", StrataError.exit_code
    return f"{error.filename or 'system'}: {error.strerror or error}", StrataError.exit_code


def _dispatch(args: list[str], context: Context) -> int:
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
            "model runs. Exit codes: 0 done, 1 failed, 2 usage, 3 does not fit, 4 bad file,",
            "130 interrupted.",
            "",
        ]
    )


def _finish(stream: TextIO | None) -> None:
    """Flushes; a reader that has gone must not make Python complain when it flushes once more."""
    try:
        if stream is not None:
            stream.flush()
    except OSError:
        assert stream is not None, "only a stream can fail"
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
