"""Makes small, valid model files of this architecture with random weights, whole or in shards.

made = make_model(tmp_path / "tiny.gguf")                      # all F32, draft layer included
made = make_model(path, BLOCKY, types={"*_exps.*": 21, "token_embd.*": 14})
made = make_model(tmp_path / "tiny.gguf", shards=3)            # made.path is the first shard
made = make_model(path, REAL, types=REAL_TYPES, sparse=True)   # 48 layers, a hole for weights
"""

import dataclasses
import fnmatch
import itertools
import pathlib
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from tests.gguf_blocks import block_bytes, block_elems, random_tensor
from tests.gguf_content import Sizes, model_pairs, model_tensors
from tests.gguf_writer import Layout, Pair, Tensor, write_gguf

TINY = Sizes()
BLOCKY = Sizes(hidden=256, low_rank=64, width=256, shared=256, gdn_dim=64, heads=8, streams=2)
"""Rows of 256 values wherever experts and most matrices need them."""
REAL = Sizes(
    hidden=2560,
    layers=48,
    low_rank=320,
    heads=24,
    kv_heads=2,
    head_dim=256,
    rope_dim=64,
    rope_sections=(11, 11, 10, 0),
    experts=512,
    experts_active=10,
    width=640,
    shared=640,
    gdn_dim=128,
    gdn_keys=16,
    gdn_values=48,
    index_dim=128,
    index_budget=2048,
    vocab=248320,
    context=262144,
    heads_per_ngram=8,
    ngram_base=20_000_000,
)
"""The released model's sizes; for sparse files only."""
REAL_TYPES = {
    "*ffn_gate_exps*": 21,  # IQ3_S
    "*ffn_up_exps*": 21,
    "*ffn_down_exps*": 20,  # IQ4_NL: no 256-value block fits rows of 640
    "per_layer_token_embd*": 20,
    "output.weight": 14,  # Q6_K
    "token_embd*": 8,  # Q8_0
}


@dataclasses.dataclass(frozen=True)
class MadeModel:
    """A file that was written and where its parts are; one entry per shard."""

    paths: tuple[pathlib.Path, ...]
    layouts: tuple[Layout, ...]

    @property
    def path(self) -> pathlib.Path:
        """What to open."""
        return self.paths[0]


def make_model(
    path: pathlib.Path,
    sizes: Sizes = TINY,
    *,
    types: Mapping[str, int] | None = None,
    pairs: Mapping[str, tuple[str, object] | None] | None = None,
    drop: Collection[str] = (),
    extra: Sequence[Tensor] = (),
    fused: bool = False,
    sparse: bool = False,
    shards: int = 1,
    empty_first: bool = False,
    alignment: int = 32,
    seed: int = 0,
) -> MadeModel:
    """Writes a model.

    Args:
        path: the file; with several shards NAME.gguf becomes NAME-00001-of-0000N.gguf and so on.
        sizes: its sizes; `drafts=0` leaves the draft layer out.
        types: ggml type ids by name pattern (fnmatch), the last match counts; all else is F32.
        pairs: metadata to add or replace as (kind, value), or to leave out as None.
        drop: name patterns of tensors to leave out (tied output: "output.weight").
        extra: tensors to add at the end.
        fused: one ffn_gate_up_exps in place of gate and up.
        sparse: holes in place of weights: nothing is computed or written.
        shards: number of files.
        empty_first: the first of several shards has no tensors.
        alignment: of the data; other values than 32 are written into the metadata.
        seed: of the weights.
    """
    meta = {pair.key: pair for pair in model_pairs(sizes)}
    if alignment != 32:
        meta["general.alignment"] = Pair("general.alignment", "u32", alignment)
    for key, pair in (pairs or {}).items():
        if pair is None:
            del meta[key]
        else:
            meta[key] = Pair(key, *pair)
    rng = np.random.default_rng(seed)
    tensors = []
    for name, shape in model_tensors(sizes, fused):
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in drop):
            matches = [t for p, t in (types or {}).items() if fnmatch.fnmatchcase(name, p)]
            tensors.append(_tensor(name, shape, matches[-1] if matches else 0, sparse, rng))
    tensors += extra
    if shards == 1:
        layout = write_gguf(path, list(meta.values()), tensors, alignment)
        return MadeModel((path,), (layout,))
    groups = _split(tensors, shards - empty_first)
    return _write_shards(
        path, list(meta.values()), [[], *groups] if empty_first else groups, alignment
    )


def _tensor(
    name: str, shape: tuple[int, ...], type_id: int, sparse: bool, rng: np.random.Generator
) -> Tensor:
    elems = block_elems(type_id)
    assert shape[0] % elems == 0, f"{name} {shape} does not take type {type_id}"
    nbytes = int(np.prod(shape, dtype=object)) // elems * block_bytes(type_id)
    data = None if sparse else random_tensor(name, shape, type_id, rng)
    return Tensor(name, shape, type_id, nbytes, data)


def _split(tensors: list[Tensor], parts: int) -> list[list[Tensor]]:
    bounds = [len(tensors) * index // parts for index in range(parts + 1)]
    return [tensors[start:end] for start, end in itertools.pairwise(bounds)]


def _write_shards(
    path: pathlib.Path, pairs: list[Pair], groups: list[list[Tensor]], alignment: int
) -> MadeModel:
    paths, layouts = [], []
    for index, group in enumerate(groups):
        split = [
            Pair("split.no", "u16", index),
            Pair("split.count", "u16", len(groups)),
            Pair("split.tensors.count", "i32", sum(map(len, groups))),
        ]
        own = [pair for pair in pairs if index == 0 or pair.key == "general.alignment"]
        paths.append(path.with_name(f"{path.stem}-{index + 1:05}-of-{len(groups):05}.gguf"))
        layouts.append(write_gguf(paths[-1], own + split, group, alignment))
    return MadeModel(tuple(paths), tuple(layouts))
