"""The process that a gate asks: `generate` again and again, with one engine.

Run as `python -m strata_jax.cli.gate_worker`; `strata_jax/gate/runs.py` describes what goes in and out.
Every request is a whole command line that goes the way of `strata-jax generate`; only the engine it
opens stays open for the next one, so that experts go on adapting from prompt to prompt.
"""

import contextlib
import io
import json
import sys
from collections.abc import Callable
from typing import IO, TYPE_CHECKING, Any, cast

from strata_jax.cli.context import Engine, OpenEngine, open_engine
from strata_jax.cli.interrupts import EXIT_CODE as INTERRUPTED
from strata_jax.cli.main import main
from strata_jax.errors import UsageError

if TYPE_CHECKING:
    from strata_jax.engine.options import EngineOptions
    from strata_jax.weights.pack import Pack


class _Kept:
    """An engine whose user may close it without an effect."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def close(self) -> None:
        """Leaves it open."""


class Keeper:
    """Opens an engine once and hands it out again for the same model and options."""

    def __init__(self, opener: OpenEngine) -> None:
        """Takes what opens the real one."""
        self._opener = opener
        self._engine: Engine | None = None
        self._pack: Pack | None = None
        self._key: object = None

    def open(self, pack: "Pack", options: "EngineOptions", report: Callable[[str], None]) -> Engine:
        """The engine; see `OpenEngine`.

        Raises:
            UsageError: if another one is open.
        """
        from strata_jax.weights.pack import open_pack

        key = (pack.file.paths, options)
        if self._engine is None:
            # Not the caller's pack, which it closes after its answer.
            self._pack = open_pack(pack.file.paths[0])
            self._engine = self._opener(self._pack, options, report)
            self._key = key
        elif key != self._key:
            raise UsageError(
                f"gate_worker: received {key}, {self._key} expected, which the engine was opened with"
            )
        # All of the engine but for `close`, so that nothing that is added to it is missed here.
        return cast(Engine, _Kept(self._engine))

    def close(self) -> None:
        """Closes what was opened."""
        if self._engine is not None:
            self._engine.close()
        if self._pack is not None:
            self._pack.close()


def serve(requests: IO[str], replies: IO[str], opener: OpenEngine) -> int:
    """Answers requests until they end; returns the exit code."""
    keeper = Keeper(opener)
    try:
        for line in requests:
            code, reply = _answer(json.loads(line)["args"], keeper)
            replies.write(json.dumps(reply) + "\n")
            replies.flush()
            if code == INTERRUPTED:
                return code
    finally:
        keeper.close()
    return 0


def _answer(args: list[str], keeper: Keeper) -> tuple[int, dict[str, Any]]:
    out, err = io.StringIO(), io.StringIO()
    code = main(["generate", *args], None, out, err, keeper.open)
    result = None
    with contextlib.suppress(ValueError):  # without --json, or with none after an error
        result = json.loads(out.getvalue())
    return code, {"code": code, "result": result, "lines": err.getvalue().splitlines()}


if __name__ == "__main__":
    try:
        sys.exit(serve(sys.stdin, sys.stdout, open_engine))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
