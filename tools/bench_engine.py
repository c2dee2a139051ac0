#!/usr/bin/env python3
"""Speed of the engine without text or HTTP: prompt and decode tokens/s, decoding at depth, peak memory.

  bench_engine.py [--model F.gguf ...] [--prompt 512] [--tokens 128] [--threads 2] [--repeat 5]
                  [--depths 512,7000] [--memory 2048,8192] [--peer DIR/llama-bench]

A warm-up run comes first. Every figure is the median of `--repeat` runs with the least and the largest. With
`--peer`, llama-bench runs on the same file with the same threads between our runs (A B A B ...). Prompts are
random ids; decoding starts behind one id, as llama-bench's does, or behind as many as `--depths` says; it is
greedy and counts drawing the ids. `--memory` reads each prompt in a process of its own, the cache as large as
the prompt.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import sys

import numpy as np

from strata_jax.cli.devices import pin_jax_to_cpu
from strata_jax.errors import StrataError
from strata_jax.weights.pack import Pack, open_pack

ROOT = pathlib.Path(__file__).resolve().parents[1]
EMBEDDED = ROOT / "strata_jax/models/strata-small/model-IQ3_S.gguf"
PEER_TIMEOUT_S = 600


@dataclasses.dataclass(frozen=True)
class Figure:
    """Runs of one measurement, in their order."""

    runs: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.runs)

    def __str__(self) -> str:
        return f"{self.median:9.1f} ({min(self.runs):.1f}-{max(self.runs):.1f})"


class Ours:
    """A model open in our engine."""

    def __init__(self, pack: Pack, threads: int, max_context: int):
        from strata_jax.engine.engine import Engine, EngineOptions

        options = EngineOptions(threads=threads, max_context=max_context)
        self.engine = Engine.open(pack, options)
        self._vocab = pack.config.vocab_size
        self._rng = np.random.default_rng(0)

    def prompt(self, length: int) -> float:
        """Tokens/s of a fresh prompt."""
        timings = self._run(length, 1)
        assert timings.prompt_tok_s is not None
        return timings.prompt_tok_s

    def decode(self, tokens: int, depth: int) -> float:
        """Tokens/s of writing behind `depth` ids."""
        timings = self._run(depth, tokens + 1)
        assert timings.decode_tok_s is not None
        return timings.decode_tok_s

    def _run(self, length: int, max_tokens: int):
        from strata_jax.engine.request import Request, SamplingSettings

        ids = tuple(self._rng.integers(0, self._vocab, length).tolist())
        greedy = SamplingSettings(temperature=0.0)
        generation = self.engine.start(Request(ids=ids, settings=greedy, max_tokens=max_tokens))
        count = sum(1 for _ in generation)
        assert count == max_tokens, (count, generation.finish_reason)
        return generation.timings


def peer_speeds(args: argparse.Namespace, model: pathlib.Path) -> tuple[float, float]:
    """Prompt and decode tokens/s of one run of llama-bench."""
    command = [args.peer, "-m", model, "-p", args.prompt, "-n", args.tokens]
    command += ["-t", args.threads, "-r", 1, "-o", "json"]
    environment = {**os.environ, "LD_LIBRARY_PATH": str(args.peer.parent)}
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        env=environment,
        timeout=PEER_TIMEOUT_S,
    )
    if done.returncode:
        sys.exit(f"{args.peer}: exit code {done.returncode}: {done.stderr.strip()[-500:]}")
    rows = json.loads(done.stdout)
    prompt = next(row["avg_ts"] for row in rows if row["n_prompt"] and not row["n_gen"])
    decode = next(row["avg_ts"] for row in rows if row["n_gen"] and not row["n_prompt"])
    return prompt, decode


def compare(args: argparse.Namespace, model: pathlib.Path, ours: Ours) -> None:
    """Prompt and decode speed, the peer's between ours."""
    tests = {
        f"pp {args.prompt}": lambda: ours.prompt(args.prompt),
        f"tg {args.tokens}": lambda: ours.decode(args.tokens, 1),
    }
    for run in tests.values():
        run()
    found = {name: [] for name in tests}
    peers = {name: [] for name in tests}
    for _ in range(args.repeat):
        for name, run in tests.items():
            found[name].append(run())
        if args.peer:
            for name, speed in zip(tests, peer_speeds(args, model), strict=True):
                peers[name].append(speed)
    for name in tests:
        mine, peer = Figure(tuple(found[name])), Figure(tuple(peers[name]))
        line = f"{model.name}: {name:>10} ours {mine} tok/s"
        if args.peer:
            line += f"   llama.cpp {peer} tok/s   ratio {mine.median / peer.median:.2f}"
        print(line, flush=True)


def at_depths(args: argparse.Namespace, model: pathlib.Path, ours: Ours) -> None:
    """Decode speed behind prompts of several lengths, and the time a token against the first's."""
    found = {depth: [] for depth in args.depths}
    for depth in args.depths:
        ours.decode(2, depth)
    for _ in range(args.repeat):
        for depth in args.depths:
            found[depth].append(ours.decode(args.tokens, depth))
    first = statistics.median(found[args.depths[0]])
    for depth in args.depths:
        figure = Figure(tuple(found[depth]))
        print(
            f"{model.name}: tg {args.tokens} @ {depth} ours {figure} tok/s   time a token "
            f"{first / figure.median:.2f} x that at {args.depths[0]}",
            flush=True,
        )


def peak_memory(args: argparse.Namespace, model: pathlib.Path) -> None:
    """Peak resident memory of reading prompts, each in a process of its own."""
    last = None
    for length in args.memory:
        command = [sys.executable, __file__, "--model", model, "--rss_of_prompt", length]
        command += ["--threads", args.threads]
        done = subprocess.run(
            [str(part) for part in command], capture_output=True, text=True, check=True
        )
        loaded, peak = map(int, done.stdout.split())
        line = f"{model.name}: prompt of {length}: peak {peak / 2**20:.1f} MiB"
        line += f", {(peak - loaded) / 2**20:.1f} MiB of it after loading"
        if last is not None:
            line += f", {(peak - last[1]) / (length - last[0]):.0f} bytes a token more"
        print(line, flush=True)
        last = length, peak


def rss_of_prompt(args: argparse.Namespace, model: pathlib.Path) -> None:
    """Prints the peak resident bytes after loading and after a prompt; runs in a child."""
    length = args.rss_of_prompt
    with open_pack(model) as pack:
        ours = Ours(pack, args.threads, length + 1)
        loaded = _peak_bytes()
        ours.prompt(length)
        print(loaded, _peak_bytes())


def _peak_bytes() -> int:
    status = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


def _numbers(text: str) -> list[int]:
    numbers = [int(part) for part in text.split(",") if part]
    if any(number < 1 for number in numbers):
        raise argparse.ArgumentTypeError(f"{text}, numbers above 0 expected")
    return numbers


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=pathlib.Path, action="append", help="may be repeated")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--depths", type=_numbers, default=[], help="as in 512,7000")
    parser.add_argument("--memory", type=_numbers, default=[], help="prompts, as in 2048,8192")
    parser.add_argument("--peer", type=lambda path: pathlib.Path(path).resolve())
    parser.add_argument("--rss_of_prompt", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if min(args.prompt, args.tokens, args.threads, args.repeat) < 1:
        parser.error("--prompt, --tokens, --threads and --repeat are 1 or more")
    if args.peer and not args.peer.is_file():
        parser.error(f"--peer={args.peer}: no such file, the path of llama-bench expected")
    args.model = args.model or [EMBEDDED]
    return args


def bench(args: argparse.Namespace, model: pathlib.Path) -> None:
    """Runs one file."""
    if args.rss_of_prompt:
        rss_of_prompt(args, model)
        return
    with open_pack(model) as pack:
        context = max([args.prompt, *args.depths]) + args.tokens + 1
        ours = Ours(pack, args.threads, context)
        compare(args, model, ours)
        if args.depths:
            at_depths(args, model, ours)
        ours.engine.close()
    if args.memory:
        peak_memory(args, model)


def main() -> None:
    """Runs what the flags ask for."""
    args = _arguments()
    pin_jax_to_cpu()
    try:
        for model in args.model:
            bench(args, model)
    except StrataError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
