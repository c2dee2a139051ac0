"""Makes the vectors of this folder anew: `python -m tests.golden.make`, with ../shared beside the project."""

import hashlib
import pathlib
import tempfile

import numpy as np

from strata_jax.weights.pack import open_pack
from tests.gguf_maker import TINY, make_model
from tests.stepper import Stepper

HERE = pathlib.Path(__file__).parent
SHARED = HERE.parents[2] / "shared/golden/strata-small/IQ3_S"
PROMPTS = ("short", "chat", "long")
TOP = 20
POSITIONS = (0, 1, 5, 6, 30, 32, 35, 64, 100, 129)
"""Before and after the ends of text, around the indexer budget of 32, and far past it."""


def tiny_ids() -> np.ndarray:
    """130 ids with two ends of text."""
    ids = np.random.default_rng(11).integers(0, TINY.vocab - 4, 130).astype(np.int32)
    ids[[5, 77]] = TINY.vocab - 3
    return ids


def make_tiny() -> None:
    """Logits of a random float32 model by the plain op set."""
    with tempfile.TemporaryDirectory() as folder:
        path = make_model(pathlib.Path(folder) / "tiny.gguf", TINY).path
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        with open_pack(path) as pack:
            logits, _ = Stepper(pack, plain=True).read(tiny_ids(), steps=8)
    rows = np.asarray(POSITIONS)
    np.savez_compressed(
        HERE / "tiny-f32.npz", sha256=digest, ids=tiny_ids(), positions=rows, logits=logits[rows]
    )


def make_embedded() -> None:
    """The exact logits of the embedded model: the largest of each position, and their sum."""
    arrays = {}
    for prompt in PROMPTS:
        with np.load(SHARED / f"{prompt}.npz") as stored:
            exact = stored["logits"].astype(np.float64)
            top = np.argsort(-exact, axis=1, kind="stable")[:, :TOP]
            largest = exact.max(axis=1)
            total = np.log(np.exp(exact - largest[:, None]).sum(axis=1)) + largest
            arrays |= {
                f"{prompt}.ids": stored["ids"],
                f"{prompt}.positions": stored["positions"],
                f"{prompt}.top_ids": top.astype(np.int16),
                f"{prompt}.top_logits": np.take_along_axis(exact, top, 1).astype(np.float32),
                f"{prompt}.logsumexp": total,
                f"{prompt}.llama_cpp_kl": stored["llama_cpp_kl"],
                f"{prompt}.llama_cpp_top1": stored["llama_cpp_top1"],
            }
    np.savez_compressed(HERE / "strata-small-IQ3_S.npz", **arrays)


if __name__ == "__main__":
    make_tiny()
    make_embedded()
