#!/usr/bin/env python3
"""Times decoding of one sequence, token by token, at a depth and a residency of one's choice.

    tools/bench_decode.py MODEL [--platform=cuda] [--depth=32768] [--expert_cache=2048] [--layers=48]

The cache before `depth` holds zeros: times do not depend on what it says. Prints how long each part of the start
took, tokens a second with the id found on the device (what greedy decoding does), the time of a window
whose logits are fetched, and on a GPU the memory in use beside the plan's. `--layers` makes a longer model of
a file with fewer (repeated_pack.py).
"""

import argparse
import importlib
import time
from pathlib import Path
from typing import get_args

import numpy as np
from repeated_pack import repeated_pack

from strata_jax.cli.devices import start_jax
from strata_jax.cli.plan import plan_here
from strata_jax.config import TILE_ROWS, KvType, TierSettings
from strata_jax.weights.budget import StepSizes
from strata_jax.weights.plan import make_plan

WARM_UP = 6


def parse_flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--platform", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--depth", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--rows", type=int, default=1, help="live rows of the windows with logits")
    parser.add_argument("--expert_cache", type=int, default=None)
    parser.add_argument("--kv", choices=get_args(KvType), default="fp16")
    parser.add_argument("--layers", type=int, default=None, help="a multiple of the file's")
    return parser.parse_args()


def main() -> None:
    from strata_jax.weights.pack import open_pack

    arguments = parse_flags()
    with open_pack(arguments.model) as file:
        pack = file if arguments.layers is None else repeated_pack(file, arguments.layers)
        settings = TierSettings(expert_cache=arguments.expert_cache)
        context = arguments.depth + 4 * (arguments.steps + WARM_UP) * arguments.rows
        free_before = free_bytes(arguments.platform)
        plan = plan_here(
            pack,
            make_plan(pack, context, arguments.kv),
            settings,
            StepSizes(tile_rows=TILE_ROWS[arguments.platform], chunk_tiles=None),
            arguments.platform,
        )
        plan.check()
        start_jax(arguments.platform, plan.xla_bytes)
        from strata_jax.engine.runner import Runner, RunnerOptions
        from strata_jax.ops.native import Backend

        options = RunnerOptions(
            max_context=context,
            chunk_tiles=plan.steps.chunk_tiles,
            chunk_lends=plan.steps.lends,
            kv=arguments.kv,
            backend=Backend(arguments.platform),
            tiers=settings,
        )
        began = time.perf_counter()
        runner = Runner(pack, pack.config, options, Stages(began))
        print(
            f"ready in {time.perf_counter() - began:.1f} s: loaded in {runner.load_s:.1f}, compiled in "
            f"{runner.compile_s:.1f}"
        )
        try:
            measure(runner, arguments)
            if free_before is not None:
                used = free_before - (free_bytes(arguments.platform) or 0)
                show_memory(runner, used)
        finally:
            runner.close()


class Stages:
    """Prints when each kind of progress line came for the first and for the last time."""

    def __init__(self, began: float):
        self._began = began
        self._last = ""

    def __call__(self, line: str) -> None:
        at = time.perf_counter() - self._began
        kind = line.split(":")[0]
        if kind != self._last:
            print(f"  {at:6.1f} s  {line}")
        self._last = kind


def free_bytes(platform: str) -> int | None:
    """Of the device, its context not counted; None on the CPU."""
    if platform == "cpu":
        return None
    return importlib.import_module("strata_jax._native_cuda").memory(0)[0]


def show_memory(runner, used: int) -> None:
    """The plan's table for the device beside what is in use; the reserve is there to stay free."""
    need = next(need for need in runner.tiers.plan.needs if need.name == "primary")
    planned = need.need_bytes - need.parts["reserve"]
    print(need.line())
    print(
        f"in use {used / 2**20:.0f} MiB, planned {planned / 2**20:.0f} MiB: "
        f"{100 * used / planned - 100:+.2f} %"
    )


def measure(runner, arguments: argparse.Namespace) -> None:
    """Prints the figures."""
    runner.reset()
    runner.position = arguments.depth
    list(runner.best_ids(17, WARM_UP))
    began = time.perf_counter()
    list(runner.best_ids(17, arguments.steps))
    taken = time.perf_counter() - began
    print(
        f"decode at depth {arguments.depth}: {arguments.steps / taken:.1f} tok/s, "
        f"{1e3 * taken / arguments.steps:.3f} ms a token"
    )
    ids, times = np.arange(arguments.rows, dtype=np.int32) + 17, []
    for _ in range(arguments.steps):
        began = time.perf_counter()
        runner.read_window(ids)
        times.append(1e3 * (time.perf_counter() - began))
    print(
        f"window of {arguments.rows} rows with logits: median {np.median(times):.3f} ms "
        f"({min(times):.3f} to {max(times):.3f})"
    )
    counters = runner.tiers.counters()
    print(f"experts: {counters['shares']}")


if __name__ == "__main__":
    main()
