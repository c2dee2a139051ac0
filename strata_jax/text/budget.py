"""Time and memory that a chat template may use."""

import sys
import time
from collections.abc import Callable, Mapping

_SECONDS = 5.0
_MAX_BYTES = 512 << 20


class TemplateLimitError(Exception):
    """The template used up its time or memory."""


class Budget:
    """Time and memory of one run."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        seconds: float = _SECONDS,
        max_bytes: int = _MAX_BYTES,
    ) -> None:
        self._clock = clock
        self._seconds = seconds
        self._deadline = clock() + seconds
        self._left = self._max_bytes = max_bytes

    def tick(self) -> None:
        """Looks at the clock.

        Raises:
            TemplateLimitError: if the time is used up.
        """
        if self._clock() > self._deadline:
            raise TemplateLimitError(f"it ran for more than {self._seconds:g} s")

    def pay(self, num_bytes: int) -> None:
        """Takes memory from the budget, never to be given back.

        Raises:
            TemplateLimitError: if there is not so much left, or the time is used up.
        """
        self.tick()
        self._left -= num_bytes
        if self._left < 0:
            raise TemplateLimitError(f"it made more than {self._max_bytes >> 20} MiB of text")

    def pay_for(self, value: object) -> None:
        """Pays for a value just made; nested ones are not looked into."""
        if isinstance(value, str):
            self.pay(sys.getsizeof(value))
        elif isinstance(value, list | tuple | dict | set):
            self.pay(8 * len(value))

    def pay_to_print(self, value: object) -> None:
        """Pays for what `str` of a value will take, counting shared parts as often as they print."""
        if isinstance(value, str):
            return
        todo = [value]
        while todo:
            item = todo.pop()
            self.pay(len(item) + 4 if isinstance(item, str) else 4)
            if isinstance(item, Mapping):
                todo += item.keys()
                todo += item.values()
            elif isinstance(item, list | tuple | set | frozenset):
                todo += item
