"""Fresh processes that answer requests: one a side, all prompts in it.

The process reads one JSON object a line from stdin, `{"args": [...]}` (the flags of one `generate`),
and writes one a line to stdout: `{"code": exit code, "result": what generate --json prints or null,
"lines": [what it wrote to stderr]}`. It ends when its stdin does.
"""

import contextlib
import dataclasses
import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Self

from strata_jax.errors import StrataError

# -P: another checkout in the current folder must not be what is run.
WORKER = (sys.executable, "-P", "-m", "strata_jax.cli.gate_worker")
"""Command of the real process."""
_END_S = 10.0
_MAX_LINES = 6


class RunError(StrataError):
    """A run that gave no answer: it failed, died or took too long."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reply:
    """What a process said to one request."""

    result: dict[str, Any]
    """The object of `generate --json`."""
    lines: tuple[str, ...]
    """What it said beside it."""
    seconds: float
    """From the request to the reply; the first one of a process includes start and loading."""


def to_args(flags: Mapping[str, str]) -> list[str]:
    """Flags as arguments of a command line."""
    return [f"--{name}={value}" for name, value in flags.items()]


class Worker:
    """A process that answers requests. A context manager; leaving it ends the process."""

    def __init__(self, command: Sequence[str], log: Path, timeout_s: float) -> None:
        """Starts it.

        Args:
            command: what to run.
            log: file that takes what it writes to stderr outside of replies.
            timeout_s: longest wait for a reply.
        """
        self.command = tuple(command)
        self._log = log
        self._timeout_s = timeout_s
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                encoding="utf-8",
                errors="backslashreplace",
            )
        self._replies: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name="gate-replies", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def ask(self, args: Sequence[str]) -> Reply:
        """Has one request answered.

        Raises:
            RunError: if that fails, with what the process said last.
        """
        began = time.monotonic()
        with contextlib.suppress(OSError):  # it has died: the reader knows, and its log says why
            stdin = _open(self._process.stdin)
            stdin.write(json.dumps({"args": list(args)}) + "\n")
            stdin.flush()
        try:
            line = self._replies.get(timeout=self._timeout_s)
        except queue.Empty:
            self._process.kill()
            raise RunError(
                f"no answer within {self._timeout_s:g} s; --timeout_s=N waits longer"
            ) from None
        if line is None:
            raise RunError(f"the process died ({self._exit_status()}): {self._last_words()}")
        return self._parse(line, time.monotonic() - began)

    def finish(self) -> None:
        """Has the process end by itself, which it does when nothing more is asked.

        Raises:
            RunError: if it does not, or ends badly: closing an engine is part of running it.
        """
        with contextlib.suppress(OSError):  # it has died: its status says how
            _open(self._process.stdin).close()
        try:
            status = self._process.wait(self._timeout_s)
        except subprocess.TimeoutExpired:
            raise RunError(
                f"it did not end within {self._timeout_s:g} s of its last answer"
            ) from None
        if status != 0:
            raise RunError(f"it died at its end ({_ended(status)}): {self._last_words()}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            with contextlib.suppress(OSError):
                _open(self._process.stdin).close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)
        self._process.kill()  # of no effect on one that has ended
        self._process.wait()
        self._reader.join(_END_S)
        for stream in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):  # what was not flushed goes nowhere
                _open(stream).close()

    def _read(self) -> None:
        for line in _open(self._process.stdout):
            self._replies.put(line)
        self._replies.put(None)

    def _parse(self, line: str, seconds: float) -> Reply:
        try:
            reply = json.loads(line)
            code, result, lines = reply["code"], reply["result"], tuple(reply["lines"])
        except (ValueError, TypeError, KeyError):
            raise RunError(f"received {line.strip()[:200]!r}, a reply expected") from None
        if code != 0 or not isinstance(result, dict):
            said = " | ".join(lines[-_MAX_LINES:]) or self._last_words()
            raise RunError(f"generate ended with exit code {code}: {said}")
        return Reply(result=result, lines=lines, seconds=seconds)

    def _exit_status(self) -> str:
        try:
            status = self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            return "its output is closed"
        return _ended(status)

    def _last_words(self) -> str:
        text = self._log.read_text(encoding="utf-8", errors="backslashreplace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return " | ".join(lines[-_MAX_LINES:]) or "it said nothing"


def _ended(status: int) -> str:
    return f"signal {-status}" if status < 0 else f"exit code {status}"


def _open(stream: IO[str] | None) -> IO[str]:
    assert stream is not None, "the process was started with pipes"
    return stream
