#!/usr/bin/env python3
"""Times prompts with several sets of tier flags, one after the other, and compares their last logits.

    tools/bench_peer_prompts.py MODEL --platform=cuda --prompts=8192,32768 --side='--expert_cache=3686' \\
        --side='--expert_cache=3686 --peer_device=1 --peer_memory_mib=9000 --peer_stream=0.35'

Ids are random. A prompt is read `--repeat` times after a warm-up; the median counts. With --timing every side
is opened once more with marks, and tells where the time of each prompt went, on the peer too.
"""

import argparse
import functools
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import numpy as np
from bench_pair import settings_of

from strata_jax.cli.devices import start_jax
from strata_jax.cli.plan import plan_here
from strata_jax.config import TILE_ROWS, KvType, TierSettings
from strata_jax.weights.budget import StepSizes
from strata_jax.weights.plan import make_plan


def main() -> None:
    """Reads the flags and prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--platform", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--prompts", default="8192,32768", help="lengths, multiples of 64")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--kv", choices=get_args(KvType), default="fp16")
    parser.add_argument("--prefill", type=int, default=None, help="tiles of a chunk")
    parser.add_argument("--timing", action="store_true")
    parser.add_argument("--side", action="append", required=True, help="tier flags, given again")
    arguments = parser.parse_args()
    from strata_jax.weights.pack import open_pack

    lengths = [int(each) for each in arguments.prompts.split(",")]
    sides = [settings_of(words) for words in arguments.side]
    steps = StepSizes(tile_rows=TILE_ROWS[arguments.platform], chunk_tiles=arguments.prefill)
    with open_pack(arguments.model) as pack:
        files = make_plan(pack, max(lengths), arguments.kv)
        plans = [plan_here(pack, files, tiers, steps, arguments.platform) for tiers in sides]
        for plan in plans:
            plan.check()
        # One side after the other: room for what XLA does not give back at once.
        start_jax(arguments.platform, 5 * max(plan.xla_bytes for plan in plans) // 4)
        expected: dict[int, np.ndarray] = {}
        for words, tiers in zip(arguments.side, sides):
            measure(pack, words, tiers, lengths, expected, arguments)


def open_runner(pack, tiers: TierSettings, lengths: Sequence[int], arguments, is_timed: bool):
    """A model on the device."""
    from strata_jax.engine.runner import Runner, RunnerOptions
    from strata_jax.ops.native import Backend

    options = RunnerOptions(
        max_context=max(lengths),
        kv=arguments.kv,
        chunk_tiles=arguments.prefill,
        backend=Backend(arguments.platform),
        tiers=tiers,
        prefill_timing=is_timed,
    )
    return Runner(pack, pack.config, options, lambda _: None)


def measure(pack, words: str, tiers, lengths, expected: dict[int, np.ndarray], arguments) -> None:
    """Prints a side's figures."""
    runner = open_runner(pack, tiers, lengths, arguments, False)
    print(f"{words}: {'; '.join(runner.notes)}", flush=True)
    try:
        for length in lengths:
            logits, _ = read(runner, length)
            same = np.array_equal(expected.setdefault(length, logits), logits)
            times = [read(runner, length)[1] for _ in range(arguments.repeat)]
            print(
                f"  {length}: {length / statistics.median(times):.0f} tok/s "
                f"({length / max(times):.0f} to {length / min(times):.0f}), logits "
                f"{'identical' if same else 'DIFFERENT'}",
                flush=True,
            )
    finally:
        runner.close()
    if arguments.timing:
        show_timing(pack, tiers, lengths, arguments)


def show_timing(pack, tiers: TierSettings, lengths: Sequence[int], arguments) -> None:
    """Prints where the time of each prompt goes."""
    from strata_jax.engine.prefill_timing import timed_prompt

    runner = open_runner(pack, tiers, lengths, arguments, True)
    experts = runner.tiers.experts
    try:
        for length in lengths:
            read(runner, length)
            _, timing = timed_prompt(experts, functools.partial(read, runner, length))
            print("\n".join(f"  {length} {line}" for line in timing.lines()), flush=True)
    finally:
        runner.close()


def read(runner, length: int) -> tuple[np.ndarray, float]:
    """Reads a prompt as the engine does: its last logits, and the seconds."""
    ids = np.random.default_rng(length).integers(0, runner.config.vocab_size, length, np.int32)
    began, rows, logits = time.perf_counter(), runner.chunk_rows, np.zeros((1, 1))
    runner.reset()
    for begin in range(0, length, rows):
        end = min(begin + rows, length)
        logits = runner.read_tile(ids[begin:end], want_logits=end == length)
    return logits.copy(), time.perf_counter() - began


if __name__ == "__main__":
    main()
