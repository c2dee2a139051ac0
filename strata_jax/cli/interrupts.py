"""Ctrl-C: ends the command within `GRACE_S`, or stops an answer, whatever the main thread is doing.

Python runs signal handlers between two of the main thread's byte codes, so a compilation or a long
native call would hold them up. The system's handler writes a byte to a pipe at once, though; a
thread of ours reads it and ends the process if the main thread has not done so by itself.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Literal, Self

EXIT_CODE = 130
GRACE_S = 1.0
_NUDGE_S = 0.05
_RECENT_S = 0.5
_CLOSED = b"\0"  # no signal has number 0

Mode = Literal["fatal", "cancel", "harmless"]


class Interrupts:
    """A context in which SIGINT is ours. Only the main thread's: elsewhere it changes nothing."""

    def __init__(self, die: Callable[[int], None] = os._exit) -> None:
        """Takes what ends the process at once, for tests."""
        self.fatal = threading.Event()
        """Set when a Ctrl-C that ends the command has come, whatever error it surfaces as."""
        self._die = die
        self._ended = threading.Event()
        self._mode: Mode = "fatal"
        self._cancel: Callable[[], None] | None = None
        self._heard: Callable[[], None] | None = None
        self._handled = 0
        self._handled_at = -_RECENT_S
        self._seen = 0

    def __enter__(self) -> Self:
        self._ours = threading.current_thread() is threading.main_thread()
        if self._ours:
            self._main_thread = threading.get_ident()
            # Also where a shell has us ignore it: who sends SIGINT to this process means it.
            self._old_handler = signal.signal(signal.SIGINT, self._on_interrupt)
            self._read_end, self._write_end = os.pipe()
            os.set_blocking(self._write_end, False)
            self._old_wakeup = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
            self._watcher = threading.Thread(target=self._watch, name="interrupts", daemon=True)
            self._watcher.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        if self._ours:
            signal.set_wakeup_fd(self._old_wakeup)
            signal.signal(signal.SIGINT, self._old_handler)
            os.write(self._write_end, _CLOSED)
            self._watcher.join()
            os.close(self._read_end)
            os.close(self._write_end)

    @contextlib.contextmanager
    def cancelling(
        self, cancel: Callable[[], None], heard: Callable[[], None] | None = None
    ) -> Iterator[None]:
        """The first Ctrl-C calls `cancel`, from a signal handler; a second one ends the command.

        What `cancel` raises comes up wherever the main thread is. `heard` may take its time, and locks:
        it is called by a thread of ours, while the main thread may still be on its way to the end.
        """
        with self._switched("cancel", cancel, heard):
            yield

    @contextlib.contextmanager
    def harmless(self) -> Iterator[None]:
        """Ctrl-C only raises KeyboardInterrupt: the caller goes on, unless `fatal` is set."""
        with self._switched("harmless"):
            yield

    @contextlib.contextmanager
    def _switched(
        self,
        mode: Mode,
        cancel: Callable[[], None] | None = None,
        heard: Callable[[], None] | None = None,
    ) -> Iterator[None]:
        before = self._mode, self._cancel, self._heard
        self._handled = self._seen = 0
        self._mode, self._cancel, self._heard = mode, cancel, heard
        try:
            yield
        finally:
            self._mode, self._cancel, self._heard = before

    def _on_interrupt(self, _signal: int, _frame: FrameType | None) -> None:
        self._handled += 1
        self._handled_at = time.monotonic()
        if self._mode == "cancel" and self._handled == 1 and self._cancel is not None:
            self._cancel()
            return
        if self._mode != "harmless":
            self.fatal.set()
        raise KeyboardInterrupt

    def _watch(self) -> None:
        while (received := os.read(self._read_end, 1)) != _CLOSED:
            if received[0] != signal.SIGINT:
                continue
            self._seen += 1
            if self._mode == "harmless":
                self._nudge()
                continue
            if self._mode == "cancel" and self._seen == 1:
                if (heard := self._heard) is not None:
                    heard()
                continue
            if not self._ended.wait(GRACE_S):
                with contextlib.suppress(OSError):
                    os.write(2, b"\nstrata-jax: interrupted\n")
                self._die(EXIT_CODE)
            return

    def _nudge(self) -> None:
        """Sends the signal again until its handler runs.

        One that comes just before line editing waits for a key would be heard of at the next key.
        """
        recent = time.monotonic() - _RECENT_S
        while self._handled_at < recent and not self._ended.wait(_NUDGE_S):
            signal.pthread_kill(self._main_thread, signal.SIGINT)
