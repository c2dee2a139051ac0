#!/usr/bin/env python3
"""What tiers cost and bring on the CPU: decode against residency, the doors' cost, hits against an oracle.

  bench_tiers.py [--model F.gguf] [--tokens 128] [--repeat 3] [--plot FILE.svg] [--doors] [--replay]

Without a switch it prints decode tokens/s and hit rate at 0 to 100 % of the experts in the primary's slots, adapting
as usual, as a table in Markdown: medians of `--repeat` rounds, each with a fresh engine a share and a request that
warms up. `--plot` draws them.
`--doors` times one layer's experts with everything in slots against the same products without plan and tiers,
call by call in turn, and an A/A pair for the noise. `--replay` replays a made-up routing trace (Zipf, a scan in its
middle) through the adapting tiers and compares the hit rate with the best fixed choice for that trace.
"""

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from strata_jax.cli.files import embedded_model
from strata_jax.config import TierSettings
from strata_jax.engine.engine import Engine, EngineOptions
from strata_jax.engine.request import Request, SamplingSettings
from strata_jax.ops.sets import native_ops
from strata_jax.weights.budget import host_memory
from strata_jax.weights.experts import AdaptSettings, ExpertTiers
from strata_jax.weights.matrices import fill_store
from strata_jax.weights.pack import Pack, open_pack
from strata_jax.weights.plan import make_plan
from strata_jax.weights.tier_plan import Machine, plan_tiers

SHARES = (0, 25, 50, 75, 100)


def silent(_: str) -> None:
    """Takes progress lines."""


def open_tiers(pack: Pack, store, count: int, adapt: AdaptSettings) -> ExpertTiers:
    """Tiers with `count` experts in slots."""
    settings = TierSettings(expert_cache=count)
    machine = Machine(platform="cpu", host=host_memory())
    plan = plan_tiers(pack, make_plan(pack, 1024), settings, machine)
    return ExpertTiers.open(
        store, plan.placement, adapt, ram_is_short=False, peer_threads=1, host_threads=0,
        stream_share=0.0, report=silent,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Residency:
    """What one share of the experts in the primary's slots came to."""

    share: int
    """Percent."""
    speeds: tuple[float, ...]
    """Decode tokens/s, one of each round."""
    hits: float
    """Part of the routed entries that a slot served; the same in every round."""

    @property
    def median(self) -> float:
        return statistics.median(self.speeds)

    def __str__(self) -> str:
        least, most = min(self.speeds), max(self.speeds)
        return f"| {self.share} % | {self.median:.0f} ({least:.0f} to {most:.0f}) | {100 * self.hits:.1f} % |"


def decode(pack: Pack, share: int, tokens: int) -> tuple[float, float]:
    """(tokens/s, hit rate) of a request, behind an equal one that warms up and moves experts."""
    total = pack.config.num_layers * pack.config.num_experts
    tiers = TierSettings(expert_cache=total * share // 100)
    settings = SamplingSettings(temperature=0.0)
    request = Request(ids=tuple(range(5, 37)), settings=settings, max_tokens=tokens)
    engine = Engine.open(pack, EngineOptions(tiers=tiers, max_context=1024))
    try:
        for _ in engine.start(request):
            pass
        generation = engine.start(request)
        for _ in generation:
            pass
        return generation.timings.decode_tok_s or 0.0, generation.tier_counters["hit_rate"]
    finally:
        engine.close()


def bench_residency(pack: Pack, tokens: int, repeat: int) -> list[Residency]:
    """Every share once a round, in turn: what else the machine does falls on all alike."""
    speeds: dict[int, list[float]] = {share: [] for share in SHARES}
    hits: dict[int, set[float]] = {share: set() for share in SHARES}
    for round_ in range(repeat):
        for share in SHARES:
            speed, hit_rate = decode(pack, share, tokens)
            speeds[share].append(speed)
            hits[share].add(hit_rate)
        print(f"round {round_ + 1} of {repeat}", file=sys.stderr, flush=True)
    assert all(len(found) == 1 for found in hits.values()), f"swaps depend on timing: {hits}"
    rows = [
        Residency(share=share, speeds=tuple(speeds[share]), hits=hits[share].pop())
        for share in SHARES
    ]
    print(
        "| experts in slots | decode tok/s, median (least to most) | hits |",
        "|---|---|---|",
        sep="\n",
    )
    print(*rows, sep="\n")
    return rows


def plot(rows: Sequence[Residency], path: Path) -> None:
    """Decode speed and hit rate against residency, in colours for dark and light pages."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    ink, speed, hit = "#6e7781", "#3b82f6", "#d97706"  # all 3:1 or more on white and on black
    colours = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    settings: dict[Any, Any] = dict.fromkeys(colours, ink)
    # Text stays text, and equal figures give equal files.
    settings |= {"svg.fonttype": "none", "svg.hashsalt": "residency"}
    settings |= {"font.size": 9, "font.sans-serif": ["DejaVu Sans", "Verdana", "sans-serif"]}
    with rc_context(settings):
        figure = Figure(figsize=(7.2, 2.6), layout="constrained")
        left, right = figure.subplots(1, 2)
        shares = [row.share for row in rows]
        medians = [row.median for row in rows]
        below = [row.median - min(row.speeds) for row in rows]
        above = [max(row.speeds) - row.median for row in rows]
        left.errorbar(shares, medians, (below, above), fmt="o-", color=speed, capsize=3, lw=1.5)
        left.set(title="decode, tokens/s: median, least, most", ylim=(0, None))
        right.plot(shares, [100 * row.hits for row in rows], "o-", color=hit, lw=1.5)
        right.plot((0, 100), (0, 100), ":", color=ink, lw=1)
        right.annotate("equal use of all experts", (52, 43), color=ink)
        right.set(title="hits, % of routed entries", ylim=(-5, 105))
        for axes in (left, right):
            axes.set(xlabel="experts in the primary's slots, %", xticks=shares)
            axes.grid(alpha=0.25, color=ink)
            axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, transparent=True, metadata={"Date": None, "Creator": None})


def bench_doors(pack: Pack, repeat: int) -> None:
    """One layer's experts for one row: all in slots, against no tiers at all."""
    config = pack.config
    store = fill_store(pack)
    frozen = AdaptSettings(every=1, swaps=0, peer_swaps=0, decay=0.7)
    tiers = open_tiers(pack, store, config.num_layers * config.num_experts, frozen)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((1, config.hidden), dtype=np.float32))
    ids = jnp.asarray(rng.permutation(config.num_experts)[None, : config.num_experts_active])
    weights = jnp.full(ids.shape, 1.0 / ids.shape[1], jnp.float32)
    operands = (x, ids.astype(jnp.int32), weights, jnp.ones((1,)), jnp.int32(1))

    def compiled(slot: int):
        ops = native_ops(store.slot, tiers=slot)
        calls = 32  # in one program: a call costs less than its dispatch

        def program(x, *rest):
            for _ in range(calls):
                x = x + 1e-6 * ops.expert_ffn(x, *rest, layer=0)
            return x

        return jax.jit(program).lower(*operands).compile(), calls

    programs = {"plain": compiled(-1), "again": compiled(-1), "tiers": compiled(tiers.slot)}
    times: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(200 * repeat):
        for name, (program, calls) in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(program(*operands))
            times[name].append((time.perf_counter() - start) / calls * 1e6)
    base = statistics.median(times["plain"])
    for name, values in times.items():
        pairs = [value / plain for value, plain in zip(values, times["plain"], strict=True)]
        middle = statistics.median(values)
        ratio = statistics.median(pairs)
        print(f"{name:>6}: {middle:7.2f} us a call, {ratio:.4f} of plain ({middle - base:+.2f} us)")
    tiers.close()
    store.close()


def make_trace(num_experts: int, active: int, steps: int) -> np.ndarray:
    """Routed ids [steps, A]: Zipf over a shuffled order, a scan of all experts in the middle fifth."""
    rng = np.random.default_rng(7)
    order = rng.permutation(num_experts)
    weights = 1.0 / np.arange(1, num_experts + 1)
    trace = np.stack(
        [rng.choice(order, active, replace=False, p=weights / weights.sum()) for _ in range(steps)]
    )
    for step in range(2 * steps // 5, 3 * steps // 5):
        trace[step] = (np.arange(active) + step * active) % num_experts
    return trace.astype(np.int32)


def replay(pack: Pack) -> None:
    """Hit rate of the adapting tiers against the experts most used over the whole trace."""
    config = pack.config
    store = fill_store(pack)
    count = config.num_experts // 4
    adapt = AdaptSettings(every=4, swaps=96, peer_swaps=0, decay=0.7)
    tiers = open_tiers(pack, store, count * config.num_layers, adapt)
    ops = native_ops(store.slot, tiers=tiers.slot)
    trace = make_trace(config.num_experts, config.num_experts_active, 2000)
    x = jnp.zeros((1, config.hidden), jnp.float32)
    weights = jnp.ones((1, config.num_experts_active), jnp.float32)
    step = jax.jit(
        lambda ids: ops.expert_ffn(x, ids, weights, jnp.ones((1,)), jnp.int32(1), layer=0)
    )
    for ids in trace:
        tiers.before_window()
        jax.block_until_ready(step(jnp.asarray(ids[None])))
        tiers.after_window()
    counters = tiers.counters()
    hits = counters["entries_primary"] / trace.size
    used = np.bincount(trace.ravel(), minlength=config.num_experts)
    oracle = np.sort(used)[-count:].sum() / trace.size
    print(
        f"adapting {hits:.1%}, best fixed choice {oracle:.1%}, {100 * (hits - oracle):+.1f} points"
    )
    tiers.close()
    store.close()


def main() -> None:
    """Runs what was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--doors", action="store_true")
    parser.add_argument("--replay", action="store_true")
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    with open_pack(arguments.model or embedded_model()) as pack:
        if arguments.doors:
            bench_doors(pack, arguments.repeat)
        if arguments.replay:
            replay(pack)
        if not (arguments.doors or arguments.replay):
            rows = bench_residency(pack, arguments.tokens, arguments.repeat)
            if arguments.plot is not None:
                plot(rows, arguments.plot)


if __name__ == "__main__":
    main()
