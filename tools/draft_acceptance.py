#!/usr/bin/env python3
"""How often the draft layer guesses what the model says, by kind of text and place of the draft.

    tools/draft_acceptance.py [--model=FILE] [--norm=whole,per_stream] [--length=160] [--vocab=FILE]

Texts that no model was trained on begin: `tools/texts/prose.txt` (a paragraph each), this project's own sources,
and the questions of `tools/texts/chat.txt`. The model goes on by itself, at temperature 0 and drawn
(temperature 1, top_p 0.9). After every id the layer makes a chain of drafts; draft n counts where all before it
came true. "ids a pass" is what windows of 4 live rows give if all of them are used.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from strata_jax.cli.devices import pin_jax_to_cpu
from strata_jax.cli.files import embedded_model
from strata_jax.config import DraftSettings
from strata_jax.text.chat import ChatTemplate
from strata_jax.text.tokenizer import Tokenizer
from strata_jax.weights.budget import StepSizes
from strata_jax.weights.draft_layer import find_draft_layer
from strata_jax.weights.draft_needs import draft_sizes
from strata_jax.weights.pack import Pack, open_pack

CONTEXT = 1024
BEGIN = 96
"""Ids of a text that are given."""
SOURCES = ("text/budget.py", "cli/prompts.py", "weights/placement.py", "engine/request.py")
SHOWN = 3
"""Drafts of a window of 4 live rows."""


def parse_flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=embedded_model())
    parser.add_argument("--norm", default="whole,per_stream")
    parser.add_argument("--length", type=int, default=160, help="ids that the model goes on for")
    parser.add_argument("--most", type=int, default=7, help="drafts of a chain")
    parser.add_argument("--vocab", type=Path, default=None)
    return parser.parse_args()


def main() -> None:
    arguments = parse_flags()
    pin_jax_to_cpu()
    with open_pack(arguments.model) as pack:
        texts = beginnings(pack)
        for norm in arguments.norm.split(","):
            settings = DraftSettings(
                mtp_norm=norm, most=arguments.most, draft_vocab=arguments.vocab
            )
            measure(pack, settings, texts, arguments.length)


def beginnings(pack: Pack) -> dict[str, list[list[int]]]:
    """Ids to begin with, by kind of text."""
    tokenizer = Tokenizer.from_metadata(pack.file.metadata)
    chat = ChatTemplate.from_metadata(pack.file.metadata, tokenizer)
    root = Path(__file__).resolve().parent
    prose = (root / "texts/prose.txt").read_text().split("\n\n")
    code = [(root.parent / "strata_jax" / name).read_text() for name in SOURCES]
    questions = (root / "texts/chat.txt").read_text().splitlines()
    plain = {
        kind: [tokenizer.encode(text, special=False)[:BEGIN] for text in texts]
        for kind, texts in (("code", code), ("prose", prose))
    }
    asked = [chat.encode([{"role": "user", "content": question}]) for question in questions]
    return {**plain, "chat": [list(ids) for ids in asked]}


def measure(
    pack: Pack, settings: DraftSettings, texts: dict[str, list[list[int]]], length: int
) -> None:
    """Prints a row for each kind of text and way to draw."""
    from strata_jax.engine.mtp_drafter import MtpDrafter
    from strata_jax.engine.request import SamplingSettings
    from strata_jax.engine.runner import Runner, RunnerOptions

    options = RunnerOptions(max_context=CONTEXT, residual=True)
    runner = Runner(pack, pack.config, options, lambda _: None)
    draft = find_draft_layer(pack)
    assert draft is not None, "a file with a draft layer expected"
    sizes = draft_sizes(pack.config, settings, CONTEXT, "fp16", StepSizes())
    drafter = MtpDrafter.open(
        draft, runner.ops, pack.config, settings, sizes, runner.placing, lambda _: None
    )
    print(f"norm {settings.mtp_norm}, vocabulary {settings.draft_vocab or 'all'}")
    for kind, begins in texts.items():
        for name, temperature in (("greedy", 0.0), ("drawn", 1.0)):
            seen = np.zeros((2, settings.most))
            for seed, ids in enumerate(begins):
                drawn = SamplingSettings(temperature=temperature, top_p=0.9, seed=seed)
                for drafts, actual in answers(runner, drafter, ids, drawn, length):
                    count(seen, drafts, actual)
            show(f"{kind}, {name}", seen)
    drafter.close()
    runner.close()


def answers(runner, drafter, ids, settings, length: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The drafts after each id of an answer, with the ids that came."""
    from strata_jax.engine.sampling import Sampler

    runner.reset()
    drafter.reset()
    drafter.read(np.asarray(ids[:1], np.int32), runner.residual, -1)
    sampler = Sampler(settings, ids, runner.config.vocab_size)
    sequence, chains, read = list(ids), [], 0
    while len(sequence) < len(ids) + length:
        rows = np.asarray(sequence[read : read + runner.options.window_rows], np.int32)
        logits = runner.read_window(rows)
        read += len(rows)
        if read == len(sequence):
            sequence.append(sampler.pick(logits[-1], read))
        following = np.asarray(sequence[read - len(rows) + 1 : read + 1], np.int32)
        drafter.read(following, runner.residual, read - len(rows))
        if read + 1 == len(sequence):
            chains.append((len(sequence), drafter.draft(length).ids))
    for place, drafts in chains:
        yield drafts, np.asarray(sequence[place : place + len(drafts)], np.int32)


def count(seen: np.ndarray, drafts: np.ndarray, actual: np.ndarray) -> None:
    """Adds a chain to the drafts that were looked at and that came true, by place."""
    for place, token in enumerate(actual):
        seen[0, place] += 1
        if drafts[place] != token:
            return
        seen[1, place] += 1


def show(name: str, seen: np.ndarray) -> None:
    rates = seen[1] / np.maximum(seen[0], 1)
    ids = 1 + np.cumprod(rates[:SHOWN]).sum()
    places = " ".join(f"{rate:.2f}" for rate in rates)
    print(f"  {name:14} {int(seen[0, 0]):5} chains  {places}  ids a pass {ids:.2f}", flush=True)


if __name__ == "__main__":
    main()
