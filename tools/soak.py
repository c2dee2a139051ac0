#!/usr/bin/env python3
"""One engine at its most hectic for a long time: same ids, clean audits, flat memory, sums that add up.

  soak.py [--minutes 30] [--model F.gguf] [--audit_every 20] [--seed 0]

A layer has 3 slots on the primary and 2 on the peer, a round of up to 8 swaps a device follows every window, half of
the misses is streamed, the rest goes to a worker of the host. Requests follow one another: prompts of 64 to 200 ids
from a fixed list, drawn greedily or with a seed, some cancelled, some just left when the next one begins; known text
is read by at most 4 rows a window. Every answer must equal that of an engine without tiers (windows of 8 rows),
which ran first. A line a minute goes to stderr, a JSON record to stdout at the end; exit code 1 if anything
was not as it must be. A request that takes longer than two minutes ends it by SIGALRM, with the stacks of all threads.
"""

import argparse
import collections
import dataclasses
import faulthandler
import json
import math
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jaxlib.version
import numpy as np
import psutil

from strata_jax.cli.devices import pin_jax_to_cpu
from strata_jax.cli.files import embedded_model
from strata_jax.config import ModelConfig, TierSettings
from strata_jax.engine.engine import Engine, EngineOptions, Generation
from strata_jax.engine.request import Request, SamplingSettings
from strata_jax.gate.record import native_library
from strata_jax.weights.pack import Pack, open_pack
from strata_jax.weights.placement import round_order, slot_bytes
from strata_jax.weights.plan import expert_bytes_by_layer
from strata_jax.weights.profile import Profile, routed_model

NUM_PROMPTS = 24
MAX_CONTEXT = 512
LIVE_ROWS = 4
PRIMARY_SLOTS, PEER_SLOTS = 3, 2  # a layer
ANSWER_S = 120
"""A request that takes longer is stuck."""
KEPT_FAULTS = 20
"""Faults that are told in words; the rest is counted."""
FLAT_KIB_MIN = 32.0
FLAT_KIB = 1024.0
"""Memory is flat if a line through its samples rises slower than the first, or by less than this in all: the
allocator's own to and fro within minutes is more than the slope that a long run can see."""
MUST_GROW = (
    "entries_primary",
    "entries_peer",
    "entries_stream",
    "entries_host",
    "swaps_primary",
    "swaps_peer",
    "bytes_swapped",
    "bytes_streamed",
)
"""Counters that are larger at every audit: what is soaked is really used."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A request and the ids that an engine without tiers answered."""

    request: Request
    expected: tuple[int, ...]


class Faults:
    """What was not as it must be."""

    def __init__(self):
        self.count = 0
        self.kept: list[str] = []

    def add(self, text: str) -> None:
        self.count += 1
        if len(self.kept) < KEPT_FAULTS:
            self.kept.append(text)
            print(f"FAULT {text}", file=sys.stderr, flush=True)

    def check(self, holds: bool, text: str) -> None:
        if not holds:
            self.add(text)


class Gauges:
    """This process over time: at most one sample a second, in memory taken before the first."""

    NAMES = ("minutes", "rss_kib", "threads", "files")

    def __init__(self, minutes: float):
        self._process = psutil.Process()
        self._samples = np.full((int(minutes * 60) + 600, len(self.NAMES)), np.nan)
        self.count = 0
        self._begin = time.monotonic()
        self._due = 0.0

    @property
    def minutes(self) -> float:
        return (time.monotonic() - self._begin) / 60

    @property
    def last(self) -> str:
        _, rss, threads, files = self._samples[self.count - 1]
        return f"rss {rss / 1024:.1f} MiB, {threads:.0f} threads, {files:.0f} files"

    def sample(self) -> None:
        now = time.monotonic()
        if now < self._due or self.count == len(self._samples):
            return
        self._due = now + 1
        process = self._process
        rss = process.memory_info().rss / 1024
        self._samples[self.count] = self.minutes, rss, process.num_threads(), process.num_fds()
        self.count += 1

    def report(self, warm_up: float, faults: Faults) -> dict[str, Any]:
        """Figures after the first `warm_up` minutes, checked to be flat."""
        samples = self._samples[: self.count]
        samples = samples[samples[:, 0] >= warm_up]
        if len(samples) < 10:
            faults.add(f"{len(samples)} samples behind the warm-up, at least 10 expected")
            return {}
        minutes, rss, threads, files = samples.T
        slope = float(np.polyfit(minutes, rss, 1)[0])
        grown = slope * float(minutes[-1] - minutes[0])
        flat = slope <= FLAT_KIB_MIN or grown <= FLAT_KIB
        faults.check(flat, f"memory grows by {slope:.1f} KiB a minute, {grown:.0f} KiB in all")
        record: dict[str, Any] = {
            "warm_up_minutes": round(warm_up, 2),
            "samples": len(samples),
            "rss_slope_kib_per_minute": round(slope, 2),
            "rss_first_kib": int(rss[0]),
            "rss_last_kib": int(rss[-1]),
            "rss_peak_kib": int(rss.max()),
        }
        for name, values in (("threads", threads), ("open_files", files)):
            least, most = int(values.min()), int(values.max())
            record[name] = {"first": int(values[0]), "least": least, "most": most}
            faults.check(least == most, f"{name} went from {least} to {most}, one number expected")
        return record


class Soak:
    """Requests on one engine, checked one by one."""

    def __init__(self, engine: Engine, config: ModelConfig, slots: tuple[int, int], faults: Faults):
        self.engine = engine
        self.faults = faults
        self.turns = self.cancelled = self.left = self.ids = self.audits = 0
        self._entries_a_row = config.num_layers * config.num_experts_active
        self._least_slot, self._most_slot = slots
        self._rows = 0
        self.windows: collections.Counter[int] = collections.Counter()
        # Its counters are those since the engine began, for as long as it is kept.
        self._origin = engine.start(_request((0,), 0, 0.0, 0))
        self._before = self.totals()

    def totals(self) -> dict[str, Any]:
        return self._origin.tier_counters

    def turn(self, case: Case, rng: np.random.Generator) -> None:
        """One request: of five, one is cancelled and one left alone somewhere in the middle."""
        ending = self.turns % 5
        whole = len(case.expected)
        stop_at = whole if ending < 3 else int(rng.integers(0, whole))
        generation = self.engine.start(case.request)
        ids = [token for _, token in zip(range(stop_at), generation)]
        if ending == 3:
            generation.cancel()
            self.cancelled += 1
        self.left += ending == 4
        self._check(case, generation, ids, stop_at)
        self.turns += 1
        self.ids += len(ids)

    def _check(self, case: Case, generation: Generation, ids: list[int], stop_at: int) -> None:
        where = f"request {self.turns} ({len(case.request.ids)} prompt ids)"
        expected = list(case.expected[:stop_at])
        if ids != expected:
            same = [a == b for a, b in zip(ids, expected)]
            place = [*same, False].index(False)
            got, wanted = ids[place : place + 3], expected[place : place + 3]
            self.faults.add(f"{where}: ids from {place} on are {got}.., {wanted}.. expected")
        reason = {3: "cancelled", 4: None}.get(self.turns % 5, "length")
        found = generation.finish_reason
        self.faults.check(found == reason, f"{where}: ended by {found}, {reason} expected")
        # The id drawn last is not read; without any id nothing was.
        rows = len(case.request.ids) + stop_at - 1 if stop_at else 0
        self._rows += rows
        self.windows.update(generation.windows)
        counters = generation.tier_counters
        self._check_entries(where, counters, rows)
        if rows:
            near = math.isclose(sum(counters["shares"].values()), 1.0, abs_tol=1e-12)
            self.faults.check(near, f"{where}: shares {counters['shares']} do not add up to 1")

    def _check_entries(self, where: str, counters: Mapping[str, Any], rows: int) -> None:
        routed = sum(value for name, value in counters.items() if name.startswith("entries_"))
        wanted = rows * self._entries_a_row
        self.faults.check(routed == wanted, f"{where}: {routed} entries, {wanted} expected")

    def audit(self) -> None:
        """Slots against the file, and the totals, with nothing in flight."""
        where = f"audit before request {self.turns}"
        for line in self.engine.audit():
            self.faults.add(f"{where}: {line}")
        self.audits += 1
        totals = self.totals()
        self._check_entries(where, totals, self._rows)
        widest = max(self.windows)
        self.faults.check(widest == LIVE_ROWS, f"{where}: {widest} live rows in a window")
        for name in MUST_GROW:
            grown = totals[name] - self._before[name]
            self.faults.check(grown > 0, f"{where}: {name} grew by {grown} since the last")
        swaps, moved = totals["swaps_primary"] + totals["swaps_peer"], totals["bytes_swapped"]
        fits = swaps * self._least_slot <= moved <= swaps * self._most_slot
        self.faults.check(fits, f"{where}: {moved} bytes moved by {swaps} swaps")
        # What is streamed once may serve several entries.
        most, streamed = totals["entries_stream"] * self._most_slot, totals["bytes_streamed"]
        self.faults.check(streamed <= most, f"{where}: {streamed} bytes streamed, at most {most}")
        read = (totals["bytes_read"] or 0) + totals["entries_file"]
        self.faults.check(read == 0, f"{where}: something came from the file tier, which is empty")
        self._before = totals


def _request(ids: Sequence[int], max_tokens: int, temperature: float, seed: int) -> Request:
    settings = SamplingSettings(temperature=temperature, seed=seed)
    return Request(ids=tuple(ids), settings=settings, max_tokens=max_tokens)


def make_cases(pack: Pack, seed: int) -> list[Case]:
    """The prompts with the answers of an engine without tiers."""
    rng = np.random.default_rng(seed)
    vocab = pack.config.vocab_size
    requests = []
    for index, length in enumerate(rng.integers(64, 201, NUM_PROMPTS).tolist()):
        ids = rng.integers(0, vocab, length).tolist()
        # Drawn ids show a last bit of the logits that the likeliest id hides.
        temperature = 1.0 if index % 2 else 0.0
        requests.append(_request(ids, int(rng.integers(16, 65)), temperature, index))
    engine = Engine.open(pack, EngineOptions(max_context=MAX_CONTEXT))
    try:
        return [Case(request=each, expected=tuple(engine.start(each))) for each in requests]
    finally:
        engine.close()


def open_hectic(pack: Pack, folder: Path) -> Engine:
    """Three slots a layer on the primary, two on the peer, everything on the move."""
    L, E = pack.config.num_layers, pack.config.num_experts
    rounds = round_order(L, E).tolist()
    ranked = tuple((place // E, place % E) for place in rounds)
    profile = folder / "rounds.json"  # without one the peer takes the first layers' experts only
    Profile(model=routed_model(pack), ranked=ranked).save(profile)
    tiers = TierSettings(
        expert_cache=PRIMARY_SLOTS * L,
        peer_device=1,
        peer_slots=PEER_SLOTS * L,
        expert_profile=profile,
        adapt_every=1,
        adapt_swaps=8,
        pcie_frac=0.5,
        pool_workers=1,
    )
    return Engine.open(pack, EngineOptions(max_context=MAX_CONTEXT, spec=LIVE_ROWS, tiers=tiers))


def soak(soaked: Soak, cases: list[Case], gauges: Gauges, arguments: argparse.Namespace) -> None:
    """Request after request until the time is up or too much is wrong."""
    rng = np.random.default_rng(arguments.seed + 1)
    next_line = 1.0
    while gauges.minutes < arguments.minutes and soaked.faults.count < KEPT_FAULTS:
        signal.alarm(ANSWER_S)
        soaked.turn(cases[soaked.turns % len(cases)], rng)
        if soaked.turns % arguments.audit_every == 0:
            soaked.audit()
        gauges.sample()
        if gauges.minutes >= next_line:
            next_line = math.floor(gauges.minutes) + 1.0
            totals = soaked.totals()
            swaps = totals["swaps_primary"] + totals["swaps_peer"]
            print(
                f"{gauges.minutes:6.1f} min: {soaked.turns} requests, {soaked.ids} ids, {swaps} swaps, "
                f"hits {totals['hit_rate']:.1%}, {soaked.audits} audits, {gauges.last}, "
                f"{soaked.faults.count} faults",
                file=sys.stderr,
                flush=True,
            )
    soaked.audit()
    signal.alarm(0)


def run(pack: Pack, arguments: argparse.Namespace) -> dict[str, Any]:
    """The whole run; returns its record."""
    library = native_library()
    sizes = slot_bytes(np.asarray(expert_bytes_by_layer(pack)[: pack.config.num_layers]))
    faults = Faults()
    cases = make_cases(pack, arguments.seed)
    with tempfile.TemporaryDirectory() as folder:
        engine = open_hectic(pack, Path(folder))
    soaked = Soak(engine, pack.config, (int(sizes.min()), int(sizes.max())), faults)
    gauges = Gauges(arguments.minutes)
    try:
        soak(soaked, cases, gauges, arguments)
    except Exception as error:
        faults.add(f"request {soaked.turns}: {type(error).__name__}: {error}")
    totals = soaked.totals()
    minutes = gauges.minutes
    process = gauges.report(min(5.0, arguments.minutes / 2), faults)
    engine.close()
    return {
        "verdict": "faults" if faults.count else "clean",
        "faults": faults.count,
        "first_faults": faults.kept,
        "minutes": round(minutes, 2),
        "requests": soaked.turns,
        "cancelled": soaked.cancelled,
        "left_alone": soaked.left,
        "ids": soaked.ids,
        "audits": soaked.audits,
        "windows_by_live_rows": dict(sorted(soaked.windows.items())),
        "process": process,
        "tiers": totals,
        "model": str(arguments.model or embedded_model()),
        "versions": {
            "python": platform.python_version(),
            "jax": jax.__version__,
            "jaxlib": jaxlib.version.__version__,
        },
        "native_library": library,
    }


def main() -> None:
    """Soaks and tells."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--audit_every", type=int, default=20, help="requests between two audits")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and cancellations")
    arguments = parser.parse_args()
    if not 2 <= arguments.minutes < math.inf:
        # Threads of XLA take their memory when a program first runs on them: about a minute.
        parser.error(f"--minutes={arguments.minutes:g}: 2 or more expected; memory settles first")
    pin_jax_to_cpu()
    faulthandler.register(signal.SIGALRM, chain=True)  # in C: a stuck native call cannot hold it up
    with open_pack(arguments.model or embedded_model()) as pack:
        record = run(pack, arguments)
    print(json.dumps(record, indent=1))
    sys.exit(1 if record["faults"] else 0)


if __name__ == "__main__":
    main()
