"""A program at a pseudo-terminal that is its controlling one, so that typing Ctrl-C works."""

import os
import pty
import re
import select
import subprocess
import sys
import time
from typing import Self

CTRL_C, CTRL_D = "\x03", "\x04"
_LAUNCH = (
    "import fcntl, os, sys, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "os.execv(sys.argv[1], sys.argv[1:])"
)
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


class Program:
    """Types to a program and waits for what it shows."""

    def __init__(self, *args: str) -> None:
        self._terminal, program_side = pty.openpty()
        command = [sys.executable, "-c", _LAUNCH, sys.executable, "-m", *args]
        self._process = subprocess.Popen(
            command, stdin=program_side, stdout=program_side, stderr=program_side
        )
        os.close(program_side)
        self.raw = ""
        """Everything shown so far."""
        self._seen = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._terminal)

    def type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def wait_for(self, text: str, timeout_s: float = 20.0) -> None:
        """Reads until the text appears behind what was waited for before."""
        deadline = time.monotonic() + timeout_s
        while text not in self.raw[self._seen :]:
            left = deadline - time.monotonic()
            assert left > 0, f"{text!r} did not come; shown: {self.raw!r}"
            assert self._read(left), f"ended before {text!r}; shown: {self.raw!r}"
        self._seen = self.raw.index(text, self._seen) + len(text)

    def exit_code(self, timeout_s: float = 20.0) -> int:
        """Waits for the end."""
        deadline = time.monotonic() + timeout_s
        while self._read(max(0.0, deadline - time.monotonic())):
            assert time.monotonic() < deadline, f"still runs; shown: {self.raw!r}"
        return self._process.wait(max(0.1, deadline - time.monotonic()))

    @property
    def plain(self) -> str:
        """Everything shown so far without the terminal's control sequences."""
        return _ESCAPES.sub("", self.raw)

    def _read(self, timeout_s: float) -> bool:
        """Takes what is there; False once the program has closed its side."""
        if not select.select([self._terminal], [], [], timeout_s)[0]:
            return True
        try:
            piece = os.read(self._terminal, 4096)
        except OSError:  # Linux: the other side is closed
            return False
        self.raw += piece.decode(errors="replace")
        return bool(piece)
