"""The model on the primary device: owns parameters, state and store, and puts steps into the queue."""

import contextlib
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from strata_jax.config import ModelConfig
from strata_jax.engine.compiler import Compiler, place_programs
from strata_jax.engine.device_sampling import DeviceSampling
from strata_jax.engine.loader import load_params, num_tokens
from strata_jax.engine.parts import Parts
from strata_jax.engine.places import small_places
from strata_jax.engine.prefill_timing import CAPACITY
from strata_jax.engine.programs import Numbers, Results, packed_operand
from strata_jax.engine.queued import Queued, Window
from strata_jax.engine.runner_options import RunnerOptions
from strata_jax.engine.xla_errors import in_a_sentence
from strata_jax.errors import StrataError
from strata_jax.model.state import DecodeState, num_cells
from strata_jax.ops.timed import timed_ops
from strata_jax.weights.device_experts import DeviceExperts
from strata_jax.weights.pack import Pack

GRAIN = 64
"""Tiles start at multiples of this; a prompt's last `n mod GRAIN` tokens go through windows."""


class Runner:
    """Reads ids through tiles and windows. Every program is compiled by the constructor."""

    def __init__(
        self,
        pack: Pack,
        config: ModelConfig,
        options: RunnerOptions,
        report: Callable[[str], None],
    ):
        """`config` is the pack's, or the pack's with another `index_budget`."""
        start = time.perf_counter()
        self.config = config
        self.options = options
        self.drawable = num_tokens(pack)
        """Ids that an answer may have: those of the file's tokens. Spare rows of the head never win."""
        self._state: DecodeState | None = None
        self._results: Results | None = None
        self._best: jax.Array | None = None
        self._queued: jax.Array | None = None
        self.position = 0
        """Tokens read so far, for good."""
        self.left: np.ndarray | None = None
        """Ids that tiles alone have read, nothing since, and the id behind them; for `resume`."""
        self.residual = jnp.zeros(0)
        """The model's last residual of the rows of the step that was waited for last [T, J, D], on the
        device (in a ring: of the newest windows); empty unless asked for."""
        self._place = 0  # where the next window's rows go in a ring
        self._certain_end = 0  # position behind the newest step's certain rows
        self._drafted = self._kept = 0  # its drafts, and those of them that came true
        self._parts = Parts(pack, options, report)
        self.tiers = self._parts.tiers
        """Where the experts are."""
        self.notes = self._parts.notes
        """What the n-gram table is like, and what about it is not as asked for; one line each."""
        try:
            self._load(pack, start, report)
        except BaseException as error:
            self._parts.close()
            if isinstance(error, jax.errors.JaxRuntimeError):
                raise in_a_sentence(error, self.tiers.plan) from error
            raise

    def _load(self, pack: Pack, start: float, report: Callable[[str], None]) -> None:
        """Everything over what was opened, loading having begun at `start`."""
        self.ops = self._parts.ops()
        """Over the model's matrices."""
        self.placing = place_programs(self.options.backend)
        """Where arrays go, and how programs are compiled, that work beside these."""
        self.tile_rows = self.tiers.plan.steps.tile_rows
        """Rows of a tile."""
        self.chunk_rows = self.tiers.plan.steps.chunk_rows
        """Rows of the largest program, a whole number of tiles."""
        # Flat, for a step takes them apart again every time it is called.
        self._params, self._params_tree = jax.tree.flatten(load_params(pack, self.placing.sharding))
        self.load_s = time.perf_counter() - start
        self._compile_programs(report)

    def _compile_programs(self, report: Callable[[str], None]) -> None:
        start = time.perf_counter()
        compiler = Compiler(
            config=self.config,
            options=self.options,
            placing=self.placing,
            cells=num_cells(self.options.max_context, self.chunk_rows),
            params=self._params,
            params_tree=self._params_tree,
            drawable=self.drawable,
            report=report,
        )
        ops, experts = self.ops, self.tiers.experts
        if self.options.prefill_timing and isinstance(experts, DeviceExperts):
            experts.open_timeline(CAPACITY)
            ops = timed_ops(ops, experts.store, self.options.backend)
        self._programs = compiler.compile(self.ops, ops, self.tiers.plan.steps.tile_widths)
        is_gpu = self.options.backend.name == "cuda"
        self._between = small_places(self.placing.sharding) if is_gpu else []
        if self.tiers.plan.streams:
            self._warm_up()
        self.compile_s = time.perf_counter() - start

    def _warm_up(self) -> None:
        """Runs every program without a live row, twice: the second time as a graph.

        While a step waits for a copy nothing may need the whole device, as loading a kernel's code does at
        its first launch, or making a graph.
        """
        self.reset()
        for width in (self.options.window_rows, *self._programs.tiles):
            if width in self._programs.tiles:
                self.tiers.experts.borrow_slots()
            for _ in range(2):
                nothing = packed_operand(width, np.zeros(0, np.int32), Numbers(0, 0, 0))
                self._wait(self._dispatch(self._programs.tiles.get(width), nothing))

    def reset(self) -> None:
        """Forgets everything that was read."""
        self._queued = None
        for tier in self._parts.answering():
            tier.recover()
        self.tiers.experts.before_prompt()
        # In place: a captured graph knows its addresses, and two caches at once may not fit. Behind a
        # failed step there is no state, and results may be errors, as the best id may be in any case.
        state, self._state = self._state, None
        results, self._results = self._results, None
        is_first = state is None or results is None
        self._state = self._programs.empty() if state is None else self._programs.cleared(state)
        self._results = (
            self._programs.no_results() if is_first else self._programs.cleared_results(results)
        )
        self._best = jax.device_put(np.int32(0), self.placing.sharding)
        self.residual = self._newest.residual
        self.position = self._certain_end = self._drafted = self._kept = 0
        self.left = None

    def resume(self, ids: np.ndarray) -> int:
        """Where to go on with a whole prompt: behind the tiles of `left` if it begins so, else at 0, reset.

        Tiles may be cut anywhere on the grain (contract C), so what follows has the bits of a cold read.
        """
        left, self.left = self.left, None
        if left is not None and np.array_equal(left, ids[: len(left)]):
            # What fails was told of the stopped one.
            with contextlib.suppress(StrataError, ValueError, RuntimeError):
                if self._queued is not None:
                    self._wait(self._queued)
                self._check()
                return len(left) - 1
        self.reset()
        return 0

    def read_tile(self, ids: np.ndarray, *, want_logits: bool) -> np.ndarray:
        """Reads up to `chunk_rows` ids from a multiple of GRAIN on.

        A device has a chunk whose logits nobody wants in its queue while it works on the one before,
        which is waited for here; what is wrong with the newest comes up in the next call.

        Returns:
            logits [1, V] of the last id ([n, V] of all with `all_logits`), valid until the next call;
            of no meaning unless `want_logits`.
        """
        assert self.position % GRAIN == 0, self.position
        self._settle()
        width = next(width for width in self._programs.tiles if width >= len(ids))
        program = self._programs.tiles[width]
        self.tiers.experts.before_tile(len(ids))
        if self.options.backend.is_device and not want_logits:
            packed = self._operand(width, ids, 0)
            before, self._queued = self._queued, self._start(program, packed)
            if before is not None:
                self._wait(before)
                self._check()
            return np.zeros((1, 1), np.float32)
        rows = len(ids) if self.options.all_logits else 1
        return self._run(program, width, ids, rows if want_logits else 0)[:rows]

    def read_window(self, ids: np.ndarray, *, want_logits: bool = True) -> np.ndarray:
        """Reads up to `window_rows` ids; returns their logits [n, V], valid until the next call."""
        rows = len(ids) if want_logits else 0
        position = self.position
        logits = self._run(None, self.options.window_rows, ids, rows)[: len(ids)]
        self._after_window(position)
        return logits

    def read_drafts(self, ids: np.ndarray) -> np.ndarray:
        """Reads a certain id and the drafts after it in one window; returns their logits [n, V].

        The drafts are not part of what was read until `keep` says so.
        """
        position = self.position
        logits = self._run(None, self.options.window_rows, ids, len(ids), certain=1)
        self._after_window(position)
        return logits[: len(ids)]

    def draw_drafts(self, ids: np.ndarray, sampling: DeviceSampling | None) -> np.ndarray:
        """`read_drafts` on a device that draws, too; without `sampling` the largest logits win.

        Returns:
            ids [n]; -1 for a row whose logits are not finite, of no meaning behind the first draft that
            did not come true.
        """
        position = self.position
        packed = self._operand(self.options.window_rows, ids, len(ids), certain=1)
        self._start(None, packed)
        logits = self._newest.logits
        if sampling is None:
            assert self._programs.best_ids is not None, "the runner was made without drafts"
            found = self._programs.best_ids(logits)
        else:
            found, _ = sampling.draw_rows(logits, packed, position + 1)
        try:
            drawn = np.asarray(found)[: len(ids)]
        except (ValueError, RuntimeError):
            self._state, self.position = None, position
            raise
        self._after_window(position)
        return drawn

    def keep(self, count: int) -> None:
        """Says how many drafts of the newest window came true; the last word before the next step counts."""
        assert 0 <= count <= self._drafted, (count, self._drafted)
        self._kept = count
        self.position = self._certain_end + count

    def _settle(self) -> None:
        """Puts drafts that came true into the recurrent state, for a step that replays none."""
        if self._kept > 0:
            self._run(None, self.options.window_rows, np.zeros(0, np.int32), 0)

    def _after_window(self, position: int) -> None:
        """Lets the tiers adapt; where they say that the window means nothing, so does the state."""
        try:
            self._check()
            self.tiers.experts.after_window()
        except StrataError:
            self._state, self.position = None, position
            raise

    def _check(self) -> None:
        """StrataError if a tier says that steps mean nothing; then the state does not, either."""
        try:
            for tier in self._parts.answering():
                tier.check()
        except StrataError:
            self._state = None
            raise

    def best_ids(
        self, token: int, count: int, sampling: DeviceSampling | None = None
    ) -> Iterator[int]:
        """Reads `token`, then every id it yields but the last: those of the largest logits.

        An id is -1 if a logit is not finite. With `sampling`, on a device, every id is drawn instead. A device has the next step in its queue
        while the host looks at the id of this one. Who stops early leaves a step behind that was read for
        nothing: reset before the next prompt.
        """
        if not self.options.backend.is_device:
            for _ in range(count):
                logits = self.read_window(np.asarray([token], np.int32))[0]
                best = int(np.argmax(logits[: self.drawable]))
                token = best if np.isfinite(logits).all() else -1
                yield token
            return
        ahead = self.queue_one(token, sampling) if count else None
        for done in range(1, count + 1):
            queued, ahead = ahead, self.queue_one(None, sampling) if done < count else None
            assert queued is not None
            yield self.wait_one(queued)

    def queue_one(self, token: int | None, sampling: DeviceSampling | None) -> Queued:
        """Queues a step of one row on a device, and the draw after it, if `sampling` shall draw.

        Args:
            token: to read; None: the id that the step before finds.
            sampling: see `best_ids`.
        """
        ids, follows = np.asarray([token or 0], np.int32), token is None
        place, rows = self._place, self.options.window_rows
        packed = self._operand(rows, ids, 1, follows=follows, place=place)
        found = self._start(None, packed)
        if self.options.ring:
            self._place = (place + 1) % self.residual.shape[0]
        if sampling is not None:
            found, self._best = sampling.draw(self._newest.first, self.position, self._best)
        return Queued(found=found, residual=self.residual, place=place)

    def wait_one(self, queued: Queued) -> int:
        """The id that a queued step found, the oldest first; -1 if a logit is not finite."""
        # A ring is newer than its array was: that is the next window's by now.
        self.residual = self._newest.residual if self.options.ring else queued.residual
        try:
            token = int(np.asarray(queued.found))
        except (ValueError, RuntimeError):
            self._state = None
            raise
        self._after_window(self.position)
        return token

    def read_ahead(self, before: np.ndarray, ids: np.ndarray) -> None:
        """Starts reading the n-gram rows of `ids`, which will follow `before`; returns at once."""
        table = self._parts.table
        if table is not None and self.config.ngram is not None and len(ids):
            table.read_ahead(self.config.ngram, before, ids)

    def table_report(self) -> dict[str, object] | None:
        """See `Parts.table_report`."""
        return self._parts.table_report()

    def operand(self, token: int) -> np.ndarray:
        """That of a window which reads one id, for `queue_window`."""
        return self._operand(self.options.window_rows, np.asarray([token], np.int32), 1)

    def queue_window(self, packed: jax.Array | np.ndarray) -> Window:
        """Queues a window on a device, which may be the only one to know the operand.

        What it reads counts when `found` says so, for every window in turn.
        """
        self._queue(None, packed)
        newest = self._newest
        return Window(packed=packed, logits=newest.logits, residual=newest.residual)

    def found(self, *, live: int, kept: int) -> None:
        """Says how many rows the oldest queued window had, and how many of its drafts came true."""
        position = self.position
        self._certain_end, self._drafted = position + min(live, 1), max(live - 1, 0)
        self.keep(kept)
        self._after_window(position)

    def lose(self) -> None:
        """Says that a queued window failed: the state means nothing, those of windows behind it neither."""
        self._state = None

    def _operand(
        self,
        width: int,
        ids: np.ndarray,
        head_rows: int,
        *,
        follows: bool = False,
        certain: int | None = None,
        place: int = 0,
    ) -> np.ndarray:
        """What a step is told: ids and `Numbers`.

        Args:
            width: rows of the program.
            ids: to read.
            head_rows: rows that get logits.
            follows: the first id is the best of the step before, whatever `ids` says.
            certain: ids from this one on are drafts; None: there are none.
            place: in a ring of residuals.
        """
        self.left = None
        certain = len(ids) if certain is None else certain
        assert len(ids) <= width
        assert 0 <= len(ids) - certain <= self.options.most_drafts
        assert self.position + len(ids) <= self.options.max_context
        numbers = Numbers(
            pos=self.position,
            live=len(ids),
            head_rows=head_rows,
            follows=follows,
            kept=self._kept,
            certain=certain,
            place=place,
        )
        return packed_operand(width, ids, numbers)

    @property
    def _newest(self) -> Results:
        assert self._results is not None, "reset before reading"
        return self._results

    def _start(self, program, packed: np.ndarray) -> jax.Array:
        """Puts a step into the queue; the position is behind its certain rows from now on.

        Args:
            program: of a tile; None: a window.
            packed: the operand.

        Returns:
            its best id.
        """
        best = self._queue(program, packed)
        numbers = Numbers(*packed[-len(Numbers._fields) :].tolist())
        self.position = self._certain_end = self.position + int(numbers.certain)
        self._drafted, self._kept = int(numbers.live) - int(numbers.certain), 0
        return best

    def _queue(self, program, packed: jax.Array | np.ndarray) -> jax.Array:
        assert self._state is not None, "reset before reading"
        self._check()  # of steps before this one, in whose state it would go on
        if program is None:
            self.tiers.experts.give_slots_back()
        for tier in self._parts.answering():
            tier.before_window()
        return self._dispatch(program, packed)

    def _dispatch(self, program, packed: jax.Array | np.ndarray) -> jax.Array:
        assert self._state is not None
        state, self._state = self._state, None  # donated: a failed step leaves no state behind
        if program is None:
            results, self._results = self._newest, None
            self._results, self._state, self._best, best = self._programs.window(
                self._params, state, results, self._best, packed
            )
            self.residual = self._newest.residual
        else:
            best, self._tile_logits, self.residual, self._state = program(
                self._params, state, packed
            )
        return best

    def _wait(self, best: jax.Array) -> None:
        """For a step, by its best id; raises what the step raised."""
        try:
            best.block_until_ready()
        except (ValueError, RuntimeError):
            self._state = None
            raise

    def _run(
        self, program, width: int, ids: np.ndarray, head_rows: int, certain: int | None = None
    ) -> np.ndarray:
        position = self.position
        self._queued = None  # its error is this step's, too
        try:
            packed = self._operand(width, ids, head_rows, certain=certain)
            self._start(program, packed)
            if program is not None:
                logits = self._tile_logits
            else:
                logits = self._newest.logits if head_rows > 1 else self._newest.first
            found = np.asarray(logits)  # waits, and raises what the step raised
        except (ValueError, RuntimeError):  # which one is JAX's whim
            self._state, self.position = None, position
            self._check()  # says it in a sentence, if a tier's worker is to blame
            raise
        self._check()
        return found

    def close(self) -> None:
        """Lets go of the native stores and the device's memory; close before the pack.

        Raises:
            StrataError: as `EngineTiers.close` does; all is closed then, too.
        """
        self._state = None
        self._parts.close()
