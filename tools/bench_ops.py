#!/usr/bin/env python3
"""Checks every native op at its named shapes (strata_jax/ops/cases.py), then times it.

  tools/bench_ops.py [--op REGEX] [--case REGEX] [--threads N] [--seconds 0.2]
  tools/bench_ops.py --op quant_matmul --case 'released/.*/window_1'
  tools/bench_ops.py --platform=cuda --op expert_ffn --case 'released/window_[14]'
  tools/bench_ops.py --platform=cuda --op 'matmul|ffn' --case 'released/.*tile_256' --rows 2048

A time is that of one more call in a loop of the compiled program, the best of five loops: no dispatch from
Python. GB/s counts the bytes that must move at least once, against a memory copy measured in the same run;
what fits in a cache may go beyond it. GMAC/s counts the multiply-adds of the products, against chains of
dot products in registers: int8 ones for quantised weights, float32 ones for the rest. On a GPU (device_ops.py) a
time is that of one call in a captured graph of many, results are compared with the CPU's kernels, and the
peaks are those of XLA's copy and of its bfloat16 product, twice that for int8.
"""

import argparse
import ctypes
import dataclasses
import functools
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from device_ops import DeviceMatrices, device_peaks, results_on_device, seconds_on_device

from strata_jax import _native
from strata_jax.cli.devices import start_jax
from strata_jax.ops.case_inputs import Call, make_call
from strata_jax.ops.case_matrices import Matrix, open_store
from strata_jax.ops.cases import CASES, IN_PLACE_ROWS, ROW_OPERANDS, STATES, TOLERANCES, Case
from strata_jax.ops.native import CPU, Backend
from strata_jax.ops.roles import Role
from strata_jax.ops.sets import OpSet, native_ops, plain_ops
from strata_jax.ops.unpack_ref import layout_of

COPY_BYTES = 64 << 20
LOOPS = 5
WINDOW_ROWS = 64  # calls with more are a prompt's tiles (ffi/cuda/tile_rows.h)
Bench = Callable[[Call, str], str]
EXACT = {"quant_matmul", "expert_ffn", "hyper_read"}
"""Ops that are made of contract T's products: the scalar kernels specify their bits."""


@dataclasses.dataclass(frozen=True)
class Peaks:
    """What this machine does at most, all threads together; 0 where it was not measured."""

    copy_bytes: float
    int8_macs: float
    float_macs: float


def on_threads(count: int, work: Callable[[], float]) -> float:
    """The sum of `work`'s results on that many threads at once; the best of five times."""
    best = 0.0
    for _ in range(LOOPS):
        results: list[float] = []
        workers = [threading.Thread(target=lambda: results.append(work())) for _ in range(count)]  # noqa: B023
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        best = max(best, sum(results))
    return best


def copy_rate(seconds: float) -> float:
    """Bytes read plus bytes written per second by copies of blocks no cache holds."""
    source, target = np.ones(COPY_BYTES, np.uint8), np.ones(COPY_BYTES, np.uint8)
    begin, copied = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds:
        np.copyto(target, source)
        copied += 2 * COPY_BYTES
    return copied / (time.perf_counter() - begin)


def measure_peaks(threads: int, seconds: float) -> Peaks:
    """Compiles dot_peak.cc for this machine and runs it and a copy on every thread."""
    copy = on_threads(threads, functools.partial(copy_rate, seconds))
    source = Path(__file__).with_name("dot_peak.cc")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "dot_peak.so"
        command = ["c++", "-O2", "-march=native", "-shared", "-fPIC", source, "-o", library]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"dot-product peak: not measured, c++ failed ({error})")
            return Peaks(copy, 0.0, 0.0)
        peaks = ctypes.CDLL(str(library))
        rates = []
        for name in ("Int8MacsPerSecond", "FloatMacsPerSecond"):
            function = getattr(peaks, name)
            function.argtypes, function.restype = [ctypes.c_double], ctypes.c_double
            rates.append(on_threads(threads, functools.partial(function, seconds)))
    return Peaks(copy, *rates)


def run(ops: OpSet, call: Call) -> list[np.ndarray]:
    program = jax.jit(functools.partial(getattr(ops, call.op), **call.attributes))
    return [np.array(leaf) for leaf in jax.tree.leaves(program(*call.operands))]


def run_twin(call: Call) -> list[np.ndarray]:
    def twin(matrices, operands):
        return getattr(plain_ops(matrices), call.op)(*operands, **call.attributes)

    matrices = {(role, 0): matrix.values() for role, matrix in call.matrices.items()}
    program = twin if call.op == "ngram_rows" else jax.jit(twin)  # that twin is numpy
    return [np.array(leaf) for leaf in jax.tree.leaves(program(matrices, call.operands))]


def some_rows(call: Call) -> tuple[Call, np.ndarray]:
    """The call with its first, middle and last row only: a row's bits depend on no other."""
    count = len(call.operands[0])
    rows = np.unique([0, count // 2, count - 1])
    operands = list(call.operands)
    for place in ROW_OPERANDS[call.op]:
        operands[place] = operands[place][rows]
    operands[-1] = np.int32(len(rows))
    return dataclasses.replace(call, operands=tuple(operands)), rows


def open_table(m: Matrix | None) -> _native.NgramTable | None:
    """The n-gram table in memory that is no file's; None without one."""
    if m is None:
        return None
    return _native.NgramTable(
        mode="mmap",
        type=m.type_id,
        num_rows=m.rows,
        num_cols=m.cols,
        address=m.data.ctypes.data,
        path="",
        offset=0,
    )


def verify(call: Call, ops: OpSet) -> str:
    """What the op was found equal to; raises AssertionError where it differs."""
    got = run(ops, call)
    if call.op in EXACT:
        few, rows = some_rows(call)
        before = _native.kernels()
        _native.select_kernels("scalar")
        try:
            expected = run(ops, few)
        finally:
            _native.select_kernels(before)
        for g, e in zip(got, expected):
            np.testing.assert_array_equal(g[rows], e)
        return "bits"
    tolerance = TOLERANCES.get(call.op, 0.0)
    for g, e in zip(got, run_twin(call)):
        np.testing.assert_allclose(g, e, rtol=0, atol=tolerance * np.abs(e).max(initial=0.0))
    return f"{tolerance:g}" if tolerance else "equal"


def exact_on_device(call: Call) -> bool:
    """Whether a GPU owes the CPU's bits."""
    if call.op == "quant_matmul" and len(call.operands[0]) > WINDOW_ROWS:
        # Tiles multiply unquantised matrices on other units than windows do.
        return all(layout_of(m.type_id).form != "float" for m in call.matrices.values())
    return call.op in EXACT - {"hyper_read"}  # whose norms are sums in another order there


def verify_on_device(call: Call, held: DeviceMatrices) -> str:
    """`verify` for a GPU: against the CPU's op, or against the twin where the CPU has none of the kind."""
    got = results_on_device(call, held)
    if exact_on_device(call):
        store = open_store(call.matrices)
        try:
            few, rows = some_rows(call)
            with jax.default_device(jax.devices("cpu")[0]):
                expected = run(native_ops(store.slot), few)
        finally:
            store.close()
        for g, e in zip(got, expected):
            np.testing.assert_array_equal(g[rows], e)
        return "bits"
    tolerance = TOLERANCES.get(call.op, 0.0)
    with jax.default_device(jax.devices("cpu")[0]):
        expected = run_twin(call)
    for g, e in zip(got, expected):
        np.testing.assert_allclose(g, e, rtol=0, atol=tolerance * np.abs(e).max(initial=0.0))
    return f"{tolerance:g}" if tolerance else "equal"


def looped(call: Call, ops: OpSet) -> Callable[[int], float]:
    """Seconds of n calls in one program, each fed by the one before so that none is left out."""
    op = functools.partial(getattr(ops, call.op), **call.attributes)
    in_place = STATES.get(call.op, {}) | IN_PLACE_ROWS.get(call.op, {})

    def program(n, state, operands):
        def body(_, carry):
            live, state = carry
            filled = list(operands)
            for place, value in zip(in_place, state):
                filled[place] = value
            results = jax.tree.leaves(op(*filled[:-1], live))
            first = results[0].reshape(-1)[0]
            # Never true, but the compiler cannot know: without it equal calls would be made once.
            live = live - (first == -77).astype(jnp.int32)
            return live, [results[place] for place in in_place.values()]

        return jax.lax.fori_loop(0, n, body, (operands[-1], state))

    compiled = jax.jit(program, donate_argnums=1)

    def seconds_of(n: int) -> float:
        state = [jnp.array(call.operands[place], copy=True) for place in in_place]
        jax.block_until_ready(state)
        start = time.perf_counter()
        jax.block_until_ready(compiled(n, state, call.operands))
        return time.perf_counter() - start

    return seconds_of


def time_call(call: Call, ops: OpSet, seconds: float) -> float:
    """Seconds of one call: what n calls more cost a program, best of five, n taking `seconds`."""
    seconds_of = looped(call, ops)
    seconds_of(1)  # compiles
    # A program copies operands that it was not given for good, whatever it does with them.
    once = min(seconds_of(1) for _ in range(LOOPS))
    n, more = 1, 0.0
    while more < seconds / 4 and n < 1 << 20:
        n *= 4
        more = seconds_of(n + 1) - once
    n = max(1, int(n * seconds / more))
    return max(min(seconds_of(n + 1) for _ in range(LOOPS)) - once, 1e-9) / n


def share(value: float, peak: float) -> str:
    return f"{100 * value / peak:4.0f}%" if peak and value else "    -"


def line(call: Call, case: str, seconds: float, check: str, peaks: Peaks) -> str:
    quantised = any(layout_of(m.type_id).form != "float" for m in call.matrices.values())
    peak = peaks.int8_macs if quantised else peaks.float_macs
    moved, macs = call.num_bytes / seconds, call.macs / seconds
    return (
        f"{call.op:13s}{case:27s}{seconds * 1e6:11.1f}{moved / 1e9:8.2f}"
        f" {share(moved, peaks.copy_bytes)}{macs / 1e9:9.2f} {share(macs, peak)}  {check}"
    )


def parse_flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--op", default="", help="regular expression that an op's name must hold")
    parser.add_argument("--case", default="", help="likewise for the case's name")
    parser.add_argument("--rows", type=int, help="rows of a call, whatever the case says")
    parser.add_argument("--threads", type=int, default=_native.num_threads())
    parser.add_argument("--platform", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--seconds", type=float, default=0.2, help="of each of the five loops")
    return parser.parse_args()


def main() -> int:
    flags = parse_flags()
    chosen = [
        (op, case)
        for op, cases in CASES.items()
        for case in cases
        if re.search(flags.op, op) and re.search(flags.case, case.name)
    ]
    if not chosen:
        print(f"bench_ops: no case matches --op={flags.op} --case={flags.case}", file=sys.stderr)
        return 2
    failed = 0
    for op, case, bench in benches(flags, chosen):
        if flags.rows:
            case = dataclasses.replace(case, rows=flags.rows)
        call = make_call(op, case)
        try:
            print(bench(call, case.name), flush=True)
        except AssertionError as error:
            failed += 1
            print(f"{op:13s}{case.name:27s} DIFFERS: {error}", flush=True)
    return 1 if failed else 0


def benches(flags: argparse.Namespace, chosen: list) -> Iterator[tuple[str, Case, Bench]]:
    """Prints the head of the table, then yields what is to be done for every case."""
    _native.set_threads(flags.threads)
    if flags.platform == "cpu":
        peaks = measure_peaks(flags.threads, 0.1)
        print(
            f"kernels {_native.kernels()}, {flags.threads} threads; memory copy "
            f"{peaks.copy_bytes / 1e9:.1f} GB/s, int8 dot products {peaks.int8_macs / 1e9:.0f} "
            f"GMAC/s, float32 {peaks.float_macs / 1e9:.0f} GMAC/s"
        )
        bench = functools.partial(bench_on_cpu, flags.seconds, peaks)
    else:
        start_jax("cuda", 24 << 30)
        copy, macs = device_peaks()
        peaks = Peaks(copy, 2 * macs, macs)
        print(f"{jax.devices()[0]}: copy {copy / 1e9:.0f} GB/s, bfloat16 {macs / 1e9:.0f} GMAC/s")
        bench = functools.partial(bench_on_device, Backend(flags.platform), peaks)
    print(
        f"{'op':13s}{'case':27s}{'us':>11s}{'GB/s':>8s} {'copy':>5s}{'GMAC/s':>9s} {'peak':>5s}  check"
    )
    for op, case in chosen:
        yield op, case, bench


def bench_on_cpu(seconds: float, peaks: Peaks, call: Call, name: str) -> str:
    """A line of the table. AssertionError where the op is wrong."""
    store = open_store(call.matrices)
    table = open_table(call.matrices.get(Role.NGRAM_TABLE))
    ops = native_ops(store.slot, table=table.slot if table else -1, backend=CPU)
    try:
        check = verify(call, ops)
        return line(call, name, time_call(call, ops, seconds), check, peaks)
    finally:
        store.close()
        if table:
            table.close()


def bench_on_device(backend: Backend, peaks: Peaks, call: Call, name: str) -> str:
    """The same on a GPU."""
    held = DeviceMatrices(backend, call.matrices)
    try:
        check = verify_on_device(call, held)
        return line(call, name, seconds_on_device(call, held), check, peaks)
    finally:
        held.close()


if __name__ == "__main__":
    sys.exit(main())
