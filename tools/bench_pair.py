#!/usr/bin/env python3
"""Times decoding with several sets of tier flags in turns: what differs is the flags, not the minute.

    tools/bench_pair.py MODEL --platform=cuda --depth=1024 --side='--expert_cache=3072' \\
        --side='--expert_cache=1536 --peer_device=loopback --peer_slots=1536'

The cache before `depth` holds zeros: times do not depend on what it says. Prints for every side the median
of the rounds, that of its ratios to the first side, and where the entries were computed.
"""

import argparse
import shlex
import statistics
import time
from pathlib import Path
from typing import get_args

from absl import flags

from strata_jax.cli.devices import start_jax
from strata_jax.cli.tier_flags import define_tiers, tier_settings
from strata_jax.config import KvType, TierSettings

FIRST_ID = 17
WARM_UP = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--platform", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--depth", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=48, help="tokens of a round")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--kv", choices=get_args(KvType), default="fp16")
    parser.add_argument("--side", action="append", required=True, help="tier flags, given again")
    arguments = parser.parse_args()
    settings = [settings_of(words) for words in arguments.side]
    start_jax(arguments.platform, 4 * len(settings) << 30)
    from strata_jax.engine.runner import Runner, RunnerOptions
    from strata_jax.ops.native import Backend
    from strata_jax.weights.pack import open_pack

    backend = Backend(arguments.platform)
    context = arguments.depth + (arguments.rounds + 1) * arguments.steps
    with open_pack(arguments.model) as pack:
        runners = []
        try:
            for tiers in settings:
                options = RunnerOptions(
                    max_context=context, kv=arguments.kv, backend=backend, tiers=tiers
                )
                runners.append(Runner(pack, pack.config, options, lambda _: None))
                print(f"{arguments.side[len(runners) - 1]}: {'; '.join(runners[-1].notes)}")
            _measure(runners, arguments, backend)
        finally:
            for runner in runners:
                runner.close()


def settings_of(words: str) -> TierSettings:
    """The settings that some tier flags make."""
    values = flags.FlagValues()
    define_tiers(values)
    values(["bench_pair", *shlex.split(words)])
    return tier_settings(values)


def _measure(runners: list, arguments: argparse.Namespace, backend) -> None:
    calls = backend.library.handler_calls if backend.is_device else lambda: 0
    # Steps meet new addresses of what XLA allocates for a while, also what the other sides' steps
    # allocate, and are captured anew.
    for _ in range(WARM_UP):
        for runner in runners:
            runner.reset()
            runner.position = arguments.depth
            list(runner.best_ids(FIRST_ID, arguments.steps))
    before = calls()
    counts = [runner.tiers.experts.counters() for runner in runners]
    rates: list[list[float]] = [[] for _ in runners]
    ids: list[list[int]] = [[] for _ in runners]
    for _ in range(arguments.rounds):
        for side, runner in enumerate(runners):
            began = time.perf_counter()
            ids[side] += runner.best_ids(FIRST_ID, arguments.steps)
            rates[side].append(arguments.steps / (time.perf_counter() - began))
    ran = calls() - before
    print(f"depth {arguments.depth}, handlers ran {ran} times in {sum(map(len, ids))} steps")
    for side, runner in enumerate(runners):
        done = runner.tiers.counters(counts[side])
        shares = {name: round(share, 3) for name, share in (done["shares"] or {}).items() if share}
        ratio = statistics.median(rate / first for rate, first in zip(rates[side], rates[0]))
        print(
            f"{arguments.side[side]}: {statistics.median(rates[side]):.1f} tok/s "
            f"({min(rates[side]):.1f} to {max(rates[side]):.1f}), {ratio:.3f} of the first; "
            f"ids {'identical' if ids[side] == ids[0] else 'DIFFERENT'}; {shares}, "
            f"swaps {done['swaps_primary']} + {done['swaps_peer']}"
        )


if __name__ == "__main__":
    main()
