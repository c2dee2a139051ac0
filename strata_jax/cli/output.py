"""Where commands write: results to stdout, everything else to stderr, a line each.

Both are flushed at once, so that a reader of a pipe sees what a person at a terminal sees.
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

BEAT_S = 10.0
"""Longest silence of a phase whose end nobody knows."""
_REPEAT_S = 5.0
"""Shortest time between two lines of one phase where lines cannot be overwritten."""
_CLEAR = "\r\x1b[K"
_DIM, _PLAIN = "\x1b[2m", "\x1b[22m"
# What a model writes must not steer the terminal it is shown on.
_CONTROLS = {
    code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if code not in (9, 10)
}

Report = Callable[[str], None]
"""Takes a line that says what goes on: `PHASE` or `PHASE: how far`."""


class Output:
    """The two streams of a command. Safe to use from several threads."""

    def __init__(
        self,
        out: TextIO | None,
        err: TextIO | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Takes the streams; None is one that the caller's caller has closed."""
        self._out = out
        self._err = err
        self._clock = clock
        self._lock = threading.RLock()
        self._progress: _Progress | None = None
        self._line_is_open = False
        """Whether the cursor stands behind text of the result."""
        self.out_is_terminal = out is not None and out.isatty()
        self.err_is_terminal = err is not None and err.isatty()

    def text(self, piece: str, dim: bool = False) -> None:
        """Writes a piece of the result."""
        self._line_is_open = self.out_is_terminal and not piece.endswith("\n")
        if self.out_is_terminal:
            piece = piece.translate(_CONTROLS)
            piece = f"{_DIM}{piece}{_PLAIN}" if dim else piece
        self._write(self._out, piece)

    def json(self, value: dict[str, Any]) -> None:
        """Writes the result as one JSON object, in ASCII so that no locale can break it."""
        self._write(self._out, json.dumps(value, allow_nan=False) + "\n")

    def note(self, line: str) -> None:
        """Tells what the user should know beside the result."""
        self._line(f"note: {line}")

    def error(self, line: str) -> None:
        """Tells why the command ends. A stderr that is gone is no reason for a second error."""
        with contextlib.suppress(OSError):
            self._line(f"strata-jax: {line}")

    def aside(self, piece: str) -> None:
        """Writes text to stderr as it is, dimmed on a terminal: reasoning, prompts."""
        if self.err_is_terminal:
            piece = f"{_DIM}{piece.translate(_CONTROLS)}{_PLAIN}"
        self._write(self._err, piece)

    @contextlib.contextmanager
    def progress(self, at_once: bool = True) -> Iterator[Report]:
        """Shows what goes on until the block ends; never silent for longer than `BEAT_S`.

        With `at_once` False a block that ends sooner than the next beat leaves no trace.
        """
        progress = _Progress(self._raw, self.err_is_terminal, at_once, self._clock)
        ended = threading.Event()

        def beat() -> None:
            interval = 1.0 if self.err_is_terminal else BEAT_S
            # A stderr that broke is the main thread's to notice.
            with contextlib.suppress(OSError):
                while not ended.wait(interval):
                    with self._lock:
                        progress.beat()

        def report(line: str) -> None:
            with self._lock:
                progress.report(line)

        thread = threading.Thread(target=beat, name="progress", daemon=True)
        self._progress = progress
        thread.start()
        try:
            yield report
        finally:
            ended.set()
            with self._lock:
                progress.clear()
                self._progress = None
            thread.join()

    def _line(self, line: str) -> None:
        shown = " ".join(line.splitlines()).translate(_CONTROLS)
        begin = "\n" if self._line_is_open and self.err_is_terminal else ""
        self._line_is_open = False
        self._write(self._err, f"{begin}{shown}\n")

    def _write(self, stream: TextIO | None, text: str) -> None:
        with self._lock:
            if self._progress is not None:
                self._progress.clear()
            if stream is not None:
                stream.write(text)
                stream.flush()

    def _raw(self, text: str) -> None:
        if self._err is not None:
            self._err.write(text)
            self._err.flush()


class _Progress:
    """Decides which progress lines are written: all of them where they can be overwritten."""

    def __init__(
        self,
        write: Callable[[str], None],
        overwrites: bool,
        at_once: bool,
        clock: Callable[[], float],
    ) -> None:
        self._write = write
        self._overwrites = overwrites
        self._at_once = at_once
        self._clock = clock
        self._line = ""
        self._phase = ""
        self._began = 0.0
        self._written = 0.0
        self._visible = False

    def report(self, line: str) -> None:
        """Takes the newest line."""
        now = self._clock()
        phase = line.partition(":")[0]
        is_new = phase != self._phase
        if is_new:
            self._phase, self._began = phase, now
        self._line = line
        is_due = self._overwrites or is_new or now - self._written >= _REPEAT_S
        if self._at_once and is_due:
            self._show(line)

    def beat(self) -> None:
        """Says that the phase still goes on, if nothing else has."""
        now = self._clock()
        # Half a beat of slack: a report just after a beat must not cost the next one.
        if self._line and (self._overwrites or now - self._written >= BEAT_S / 2):
            self._show(f"{self._line} ({now - self._began:.0f} s)")

    def clear(self) -> None:
        """Makes room for other output."""
        if self._visible:
            self._write(_CLEAR)
            self._visible = False

    def _show(self, line: str) -> None:
        self._written = self._clock()
        self._visible = self._overwrites
        self._write(f"{_CLEAR}{line}" if self._overwrites else f"{line}\n")
