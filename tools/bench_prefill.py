#!/usr/bin/env python3
"""Times the reading of prompts: 512, 2,048 and 8,192 ids, and 4,096 ids at a depth of 32,768.

    tools/bench_prefill.py MODEL [--platform=cuda] [--prompts=8192,4096@32768] [--kv=int8] [--profile]

Ids are random; the cache before a depth holds zeros, which selection breaks ties among: times at a depth are
those of any text only as far as selection does not depend on scores. Each prompt is read `--repeat` times after
a warm-up; the median counts. On a GPU the memory in use stands beside the plan's. The matrix limit is the time of the multiply-adds of all weight matrices (a
token's experts, the head once) at the card's rates for int8 (quantised matrices) and bfloat16 (the rest).
"""

import argparse
import collections
import gzip
import json
import os
import re
import tempfile
import time
from pathlib import Path
from typing import get_args

import numpy as np
from bench_decode import free_bytes, show_memory

from strata_jax.cli.devices import start_jax
from strata_jax.cli.plan import plan_here
from strata_jax.config import TILE_ROWS, KvType, TierSettings
from strata_jax.ops.roles import EXPERT_ROLES, Role
from strata_jax.weights.budget import StepSizes
from strata_jax.weights.plan import make_plan

PROMPTS = "512,2048,8192,4096@32768"
_ROW_ROLES = {Role.TOKEN_EMBD, Role.NGRAM_TABLE}
"""Matrices of which rows are read, not multiplied."""
_UNQUANTISED = {"F32", "F16", "BF16"}


def main() -> None:
    """Reads the flags and prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--platform", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--prompts", default=PROMPTS, help="lengths, with @depth where not 0")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--expert_cache", type=int, default=None)
    parser.add_argument("--kv", choices=get_args(KvType), default="fp16")
    parser.add_argument("--prefill", type=int, default=None, help="tiles of a chunk")
    parser.add_argument("--int8_tops", type=float, default=1580.0)
    parser.add_argument("--bf16_tops", type=float, default=790.0)
    parser.add_argument("--profile", action="store_true", help="time by kernel (without graphs)")
    arguments = parser.parse_args()
    if arguments.profile:  # a graph is one event to the profiler
        os.environ["XLA_FLAGS"] = "--xla_gpu_enable_command_buffer="
    from strata_jax.weights.pack import open_pack

    prompts = [tuple(map(int, each.split("@"))) for each in arguments.prompts.split(",")]
    prompts = [(length, depth[0] if depth else 0) for length, *depth in prompts]
    context = max(length + depth for length, depth in prompts)
    with open_pack(arguments.model) as pack:
        settings = TierSettings(expert_cache=arguments.expert_cache)
        sizes = StepSizes(tile_rows=TILE_ROWS[arguments.platform], chunk_tiles=arguments.prefill)
        free_before = free_bytes(arguments.platform)
        files = make_plan(pack, context, arguments.kv)
        plan = plan_here(pack, files, settings, sizes, arguments.platform)
        plan.check()
        start_jax(arguments.platform, plan.xla_bytes)
        from strata_jax.engine.runner import Runner, RunnerOptions
        from strata_jax.ops.native import Backend

        options = RunnerOptions(
            max_context=context,
            kv=arguments.kv,
            chunk_tiles=plan.steps.chunk_tiles,
            chunk_lends=plan.steps.lends,
            backend=Backend(arguments.platform),
            tiers=settings,
        )
        limit_s = matrix_seconds(pack, arguments.int8_tops, arguments.bf16_tops)
        runner = Runner(pack, pack.config, options, lambda _: None)
        print(f"loaded in {runner.load_s:.1f} s, compiled in {runner.compile_s:.1f} s", flush=True)
        try:
            for length, depth in prompts:
                measure(runner, length, depth, limit_s, arguments)
            if free_before is not None:
                show_memory(runner, free_before - (free_bytes(arguments.platform) or 0))
        finally:
            runner.close()


def measure(runner, length: int, depth: int, limit_s: float, arguments) -> None:
    """Prints a prompt's figures, and the time of its kernels where that was asked for."""
    ids = np.random.default_rng(length).integers(0, runner.config.vocab_size, length, np.int32)
    read(runner, ids, depth)
    times = []
    for _ in range(arguments.repeat):
        began = time.perf_counter()
        read(runner, ids, depth)
        times.append(time.perf_counter() - began)
    taken = float(np.median(times))
    print(
        f"prompt of {length} at depth {depth}: {length / taken:.0f} tok/s, {1e3 * taken:.2f} ms "
        f"({1e3 * min(times):.2f} to {1e3 * max(times):.2f}); {100 * length * limit_s / taken:.1f} % of "
        "the matrix limit",
        flush=True,
    )
    if arguments.profile:
        show_kernels(lambda: read(runner, ids, depth), length)


def read(runner, ids: np.ndarray, depth: int) -> None:
    """Reads a prompt as the engine does."""
    runner.reset()
    runner.position = depth
    rows, logits = runner.chunk_rows, np.zeros(1)
    for begin in range(0, len(ids), rows):
        end = min(begin + rows, len(ids))
        logits = runner.read_tile(ids[begin:end], want_logits=end == len(ids))
    assert np.isfinite(logits).all()


def matrix_seconds(pack, int8_tops: float, bf16_tops: float) -> float:
    """The least time of a token's products, in seconds; the head's are left out."""
    from strata_jax.weights.gguf_types import GgmlType
    from strata_jax.weights.matrices import matrices_of

    config = pack.config
    operations = {False: 0.0, True: 0.0}
    for matrix in matrices_of(pack):
        if matrix.role in _ROW_ROLES | {Role.OUTPUT}:
            continue
        share = 1.0
        if matrix.role in EXPERT_ROLES:
            share = config.num_experts_active / config.num_experts
        is_float = GgmlType(matrix.type).name in _UNQUANTISED
        operations[is_float] += 2 * share * matrix.count * matrix.rows * matrix.cols
    return operations[False] / (int8_tops * 1e12) + operations[True] / (bf16_tops * 1e12)


def show_kernels(run, length: int) -> None:
    """Prints the device's time by kernel."""
    import jax

    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        (path,) = Path(folder).rglob("*.trace.json.gz")
        with gzip.open(path) as file:
            events = json.load(file)["traceEvents"]
    names = {
        (e["pid"], e.get("tid") if e["name"] == "thread_name" else None): e["args"]["name"]
        for e in events
        if e.get("name") in ("process_name", "thread_name")
    }
    times, counts = collections.Counter(), collections.Counter()
    for e in events:
        on_device = "GPU" in names.get((e.get("pid"), None), "")
        on_stream = "Stream" in names.get((e.get("pid"), e.get("tid")), "")
        if e.get("ph") == "X" and on_device and on_stream:
            kernel = short(e["name"])
            times[kernel] += e["dur"]
            counts[kernel] += 1
    print(f"  kernels: {sum(times.values()) / 1e3:.2f} ms, {sum(counts.values())} launches")
    for kernel, taken in times.most_common(30):
        print(
            f"  {taken / 1e3:9.3f} ms {counts[kernel]:6d} x {taken / counts[kernel]:9.1f} us  {kernel}"
            f"  ({1e3 * taken / length:.1f} ns a token)"
        )


def short(kernel: str) -> str:
    """A kernel's name without its namespaces and arguments."""
    found = re.search(r"(\w+Kernel)(?:I?(L?[\w]*)E+)?", kernel.split("GLOBAL__N__")[-1])
    return re.sub(r"^.*?\d+(?=[A-Z])", "", found[0])[:60] if found else kernel[:60]


if __name__ == "__main__":
    main()
