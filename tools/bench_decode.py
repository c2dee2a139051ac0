#!/usr/bin/env python3
"""Times decoding of one sequence, token by token, at a depth and a residency of one's choice.

    tools/bench_decode.py MODEL [--platform=cuda] [--depth=32768] [--expert_cache=2048]

The cache before `depth` holds zeros: times do not depend on what it says. Prints tokens a second with the
id found on the device (what greedy decoding does), and the time of a window whose logits are fetched.
"""

import argparse
import time
from pathlib import Path

import numpy as np

from strata_jax.cli.devices import start_jax
from strata_jax.config import TierSettings

WARM_UP = 6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--platform", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--depth", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--rows", type=int, default=1, help="live rows of the windows with logits")
    parser.add_argument("--expert_cache", type=int, default=None)
    arguments = parser.parse_args()
    start_jax(arguments.platform, 8 << 30)
    from strata_jax.engine.runner import Runner, RunnerOptions
    from strata_jax.ops.native import Backend
    from strata_jax.weights.pack import open_pack

    with open_pack(arguments.model) as pack:
        options = RunnerOptions(
            max_context=arguments.depth + 4 * (arguments.steps + WARM_UP) * arguments.rows,
            backend=Backend(arguments.platform),
            tiers=TierSettings(expert_cache=arguments.expert_cache),
        )
        began = time.perf_counter()
        runner = Runner(pack, pack.config, options, lambda _: None)
        print(
            f"ready in {time.perf_counter() - began:.1f} s: loaded in {runner.load_s:.1f}, compiled in "
            f"{runner.compile_s:.1f}"
        )
        try:
            measure(runner, arguments)
        finally:
            runner.close()


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
