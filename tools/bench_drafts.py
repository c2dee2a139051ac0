#!/usr/bin/env python3
"""What drafts gain: tokens a second with them and without, in turn, by kind of text and way to draw.

    tools/bench_drafts.py [MODEL] [--platform=cuda] [--tokens=256] [--rounds=3] [--script=85:3,85:7,0:3:adapt]

With a draft layer the texts are those of draft_acceptance.py. With `--script` drafts are taken from the
answer that the model gives anyway, so many per cent of them right, so many in a window; with `adapt` they pause
where they do not pay. Every answer is compared with the one without drafts.
"""

import argparse
import statistics
from pathlib import Path

import numpy as np
from draft_acceptance import beginnings

from strata_jax.cli.devices import start_jax
from strata_jax.cli.files import embedded_model
from strata_jax.config import DraftSettings
from strata_jax.engine.draft_length import DraftLength
from strata_jax.engine.options import EngineOptions
from strata_jax.engine.request import Request, SamplingSettings
from strata_jax.weights.pack import open_pack

SETTINGS = {
    "greedy": SamplingSettings(temperature=0.0),
    "drawn": SamplingSettings(temperature=1.0, top_k=40, top_p=0.9, seed=1),
}


def parse_flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path, nargs="?", default=embedded_model())
    parser.add_argument("--platform", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory_gib", type=int, default=8, help="XLA's share of a GPU")
    parser.add_argument("--spec", type=int, default=None, help="live rows of a window")
    parser.add_argument("--spec_min_p", type=float, default=None, help="as generate's")
    parser.add_argument("--texts", type=int, default=4, help="of each kind")
    parser.add_argument(
        "--script", default=None, help="PERCENT:DRAFTS[:adapt], several with commas"
    )
    return parser.parse_args()


def main() -> None:
    from strata_jax.engine.engine import Engine

    arguments = parse_flags()
    start_jax(arguments.platform, arguments.memory_gib << 30)
    with open_pack(arguments.model) as pack:
        options = EngineOptions(
            max_context=2048,
            platform=arguments.platform,
            spec=arguments.spec,
            spec_min_p=arguments.spec_min_p,
            mtp=None if arguments.script else DraftSettings(),
            suffix_draft=1 if arguments.script else 0,  # has programs for drafts
        )
        engine = Engine.open(pack, options)
        if arguments.script is None:
            texts = {kind: begins[: arguments.texts] for kind, begins in beginnings(pack).items()}
            measure(engine, arguments, texts)
        else:
            for case in arguments.script.split(","):
                percent, drafts, *adapts = case.split(":")
                print(f"{percent} % of {drafts} drafts right {' '.join(adapts)}")
                scripted(engine, arguments, float(percent), int(drafts), adapts=bool(adapts))
        engine.close()


def scripted(
    engine, arguments: argparse.Namespace, percent: float, drafts: int, *, adapts: bool
) -> None:
    """With drafts out of the answers that are known."""
    from strata_jax.engine.draft_flow import DraftFlow
    from strata_jax.engine.drafting import Drafting, Source
    from strata_jax.engine.scripted_drafter import ScriptedDrafter
    from strata_jax.engine.scripted_follower import ScriptedFollower

    begin = [17 + n % 50 for n in range(100)]
    engine._drafters.drafting, known = None, []
    for settings in SETTINGS.values():
        known.append(np.asarray([*begin, *answer(engine, begin, settings, arguments.tokens)[0]]))
    drafter = ScriptedDrafter(known, percent)
    flow = None
    if arguments.platform == "cuda":
        flow = DraftFlow(engine._runner, ScriptedFollower(drafter, engine._runner))
    length = DraftLength(drafts, ahead=flow is not None) if adapts else None
    source = Source(name="script", drafter=drafter, length=length, flow=flow)
    engine._drafters.drafting = Drafting([source], drafts)
    measure(engine, arguments, {"ids": [begin]})


def measure(engine, arguments: argparse.Namespace, texts: dict[str, list[list[int]]]) -> None:
    """Prints a line for every kind of text and way to draw; both sides by one engine, in turn."""
    drafting = engine._drafters.drafting
    for kind, begins in texts.items():
        for name, settings in SETTINGS.items():
            rates, passes, ids = {"off": [], "on": []}, [], {}
            # The first turn warms up: graphs are made.
            for turn in range(-1, arguments.rounds * len(begins)):
                begin = begins[turn % len(begins)]
                for side in rates:
                    engine._drafters.drafting = drafting if side == "on" else None
                    found, generation = answer(engine, begin, settings, arguments.tokens)
                    ids[side] = found
                    if turn < 0:
                        continue
                    rates[side].append(generation.timings.decode_tok_s)
                    if side == "on":
                        passes.append(generation.drafts["tokens_per_pass"])
                assert ids["on"] == ids["off"], (kind, name, begin)
            off, drafted = (statistics.median(rates[side]) for side in rates)
            print(
                f"  {kind:6} {name:7} off {off:6.0f} on {drafted:6.0f} tok/s: {drafted / off:.2f}"
                f"  ids a pass {statistics.mean(passes):.2f}  all on "
                + " ".join(f"{rate:.0f}" for rate in rates["on"]),
                flush=True,
            )
    engine._drafters.drafting = drafting


def answer(engine, ids, settings: SamplingSettings, tokens: int):
    """The ids of an answer, and the answer."""
    generation = engine.start(Request(ids=tuple(ids), settings=settings, max_tokens=tokens))
    return list(generation), generation


if __name__ == "__main__":
    main()
