"""The console script `strata-jax`: runs a command and turns errors into exit codes.

What takes longer to import than a person to press Ctrl-C is imported when Ctrl-C is ours.
"""

import io
import os
import sys
from typing import TYPE_CHECKING, TextIO, cast

from strata_jax.cli.interrupts import EXIT_CODE as INTERRUPTED
from strata_jax.cli.interrupts import Interrupts
from strata_jax.cli.output import Output
from strata_jax.errors import CapacityError, StrataError

if TYPE_CHECKING:
    from strata_jax.cli.context import OpenEngine


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
    open_engine: "OpenEngine | None" = None,
) -> int:
    """Runs one command.

    Args:
        args: the command line behind the program's name.
        stdin: where a prompt or a chat may come from; this and the next are None if closed.
        stdout: for the result.
        stderr: for everything else.
        open_engine: makes the engine; the real one if None.

    Returns:
        The exit code of design.md.
    """
    output = Output(stdout, stderr)
    interrupts = Interrupts()
    try:
        with interrupts:
            from strata_jax.cli import context, dispatch

            surroundings = context.Context(
                output=output,
                interrupts=interrupts,
                stdin=stdin,
                open_engine=open_engine or context.open_engine,
            )
            return dispatch.dispatch(args, surroundings)
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
