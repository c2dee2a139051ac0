"""Threads of the engine that stand still, and how it goes on once they do not."""

from strata_jax.engine.runner import Runner
from strata_jax.errors import StrataError

FOR_GOOD_MS = 600_000
"""Of a thread that stands still: until the test lets it go on, for no test goes by the clock."""


def reset_at_last(runner: Runner) -> None:
    """A reset, however long a machine with other work takes to let a thread come back."""
    for _ in range(60):
        try:
            return runner.reset()
        except StrataError as error:
            if "still lost" not in str(error):
                raise
    raise AssertionError("the thread is still lost")
