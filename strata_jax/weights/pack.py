"""A model ready to be read: its file, its settings, every tensor checked and found by name.

What is checked, one tensor after another, before anything is used: it is there, once (fused and
separate expert matrices exclude each other), has the shape the settings imply and a type its use
allows. Tensors nobody asked for are named in `warnings`; those that would change the results
(a bias or a scale of a known weight) are refused. Of unused tensors only rope_freqs that are all 1
pass without a word. Linear layers keep GGUF's order of value heads: value head n uses key head
n mod `gdn_key_heads`.
"""

import dataclasses
import hashlib
import os
import pathlib
from collections.abc import Iterator

import numpy as np

from strata_jax.config import ModelConfig
from strata_jax.errors import BadFileError
from strata_jax.weights.gguf import GgufFile
from strata_jax.weights.gguf_header import TensorInfo
from strata_jax.weights.gguf_types import FLOATS, LAYOUTS, SUPPORTED, GgmlType
from strata_jax.weights.metadata import read_config
from strata_jax.weights.tensor_names import short_list, split_block
from strata_jax.weights.tensor_specs import TensorSpec, expected_tensors

_VECTOR_BYTES = 1 << 26
_SAMPLE_BYTES = 1 << 16
_SAMPLES_BYTES = 1 << 25
_RELATIVES = (".bias", ".scale", ".input_scale")
_LOWEST_ROUTER_BITS = 8


class Pack:
    """A checked model. Views and addresses are valid until `close`."""

    def __init__(
        self,
        file: GgufFile,
        config: ModelConfig,
        specs: dict[str, TensorSpec],
        warnings: tuple[str, ...],
    ):
        self.file = file
        self.config = config
        self.specs = specs
        """What every tensor of the model is for, by name; only those that are in the file."""
        self.warnings = warnings
        """What is odd about the file, one line each."""
        self._tensors = {
            name: dataclasses.replace(file.tensors[name], shape=spec.shape)
            for name, spec in specs.items()
        }

    def has(self, name: str) -> bool:
        """Whether the model has a tensor of this name (optional ones may be absent)."""
        return name in self.specs

    def tensor(self, name: str) -> TensorInfo:
        """Type and place of a tensor, and its shape as the settings imply it.

        That may differ from the file's in ones at the end. BadFileError if the model has no tensor
        of that name.
        """
        if name not in self._tensors:
            raise BadFileError(f"{self.file.paths[0]}: tensor {name} is not part of the model")
        return self._tensors[name]

    def view(self, name: str) -> np.ndarray:
        """The bytes of a tensor: uint8 [nbytes], read-only, inside the mapping."""
        return self.file.view(self.tensor(name).name)

    def address(self, name: str) -> int:
        """Memory address of a tensor's first byte."""
        return self.file.address(self.tensor(name).name)

    def vector(self, name: str) -> np.ndarray:
        """A small F32, F16 or BF16 tensor as float32, a copy, axes in numpy order (reversed).

        Raises:
            BadFileError: if it is quantised or larger than 64 MiB.
        """
        info = self.tensor(name)
        if info.type not in FLOATS or info.nbytes > _VECTOR_BYTES:
            raise BadFileError(
                f"{self.file.paths[0]}: tensor {name} is {info.type.name} and has {info.nbytes} "
                f"bytes, at most {_VECTOR_BYTES} of F32, F16 or BF16 expected"
            )
        return _as_float32(self.view(name), info.type).reshape(info.shape[::-1])

    def file_hash(self) -> str:
        """Identifies the content: sha256 in hex, under a second for files of any size.

        It covers metadata and directory of every shard, every shard's size, and the first and the
        last bytes of every tensor: 64 KiB each, less where that makes more than 32 MiB in total.
        A byte changed in the middle of a tensor is not noticed; another model, conversion or
        quantisation is. Read from the paths anew (a mapping would fault in much more than is
        looked at): BadFileError if a file is gone or has another size by now.
        """
        digest = hashlib.sha256(b"strata quick hash 1")
        count = max(1, len(self.file.tensors))
        sample = max(256, min(_SAMPLE_BYTES, _SAMPLES_BYTES // (2 * count)))
        for shard, (path, size) in enumerate(zip(self.file.paths, self.file.sizes)):
            digest.update(size.to_bytes(8, "little"))
            digest.update(self.file.header_bytes(shard).data)
            tensors = [info for info in self.file.tensors.values() if info.shard == shard]
            try:
                for piece in _ends(path, size, tensors, sample):
                    digest.update(piece)
            except OSError as error:
                raise BadFileError(f"{path}: cannot be read: {error.strerror}") from None
        return digest.hexdigest()

    def close(self) -> None:
        """Lets go of the file."""
        self.file.close()

    def __enter__(self) -> "Pack":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def open_pack(path: str | os.PathLike[str]) -> Pack:
    """Opens a model file (the first of its shards) and checks it, from headers alone.

    Raises:
        BadFileError: if the file cannot be read or is not a whole model of this architecture; the
            message names file and byte, key or tensor.
    """
    file = GgufFile.open(path)
    try:
        config, warnings = read_config(file)
        specs = {spec.name: spec for spec in expected_tensors(config, file.tensors)}
        check_present(file, specs)
        warnings += check_tensors(file, specs)
        warnings += _check_leftovers(file, specs, config)
        if config.ngram is not None:
            file.expect_random("per_layer_token_embd.weight")
    except BaseException:
        file.close()
        raise
    found = {name: spec for name, spec in specs.items() if name in file.tensors}
    return Pack(file, config, found, file.warnings + warnings)


def _ends(path: str, size: int, tensors: list[TensorInfo], sample: int) -> Iterator[bytes]:
    with pathlib.Path(path).open("rb", buffering=0) as file:
        if os.fstat(file.fileno()).st_size != size:
            raise BadFileError(f"{path}: was replaced while it was open; start anew")
        for info in tensors:
            count = min(sample, info.nbytes)
            yield os.pread(file.fileno(), count, info.offset)
            yield os.pread(file.fileno(), count, info.offset + info.nbytes - count)


def _as_float32(raw: np.ndarray, kind: GgmlType) -> np.ndarray:
    if kind is GgmlType.BF16:  # the upper half of a float32
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    return raw.view("<f2" if kind is GgmlType.F16 else "<f4").astype(np.float32)


def check_present(file: GgufFile, specs: dict[str, TensorSpec]) -> None:
    """BadFileError naming every tensor that must be there and is not."""
    missing = [
        spec.name for spec in specs.values() if not spec.optional and spec.name not in file.tensors
    ]
    if missing:
        raise BadFileError(
            f"{file.paths[0]}: missing {len(missing)} of {len(specs)} tensors: "
            f"{short_list(missing)}"
        )


def check_tensors(file: GgufFile, specs: dict[str, TensorSpec]) -> tuple[str, ...]:
    """Checks shapes and types of the tensors that are there; returns what is doubtful.

    Raises:
        BadFileError: naming the tensor, what it is and what was expected.
    """
    doubtful: dict[GgmlType, list[str]] = {}
    for spec in specs.values():
        info = file.tensors.get(spec.name)
        if info is None:
            continue
        where = f"{file.paths[info.shard]}: tensor {spec.name}"
        # Ones at the end carry nothing: writers drop them or not.
        if _without_ones(info.shape) != _without_ones(spec.shape):
            raise BadFileError(f"{where} is {list(info.shape)}, {list(spec.shape)} expected")
        _check_type(info.type, spec, where)
        if spec.use == "router" and info.type not in FLOATS:
            doubtful.setdefault(info.type, []).append(spec.name)
    return tuple(
        f"{file.paths[0]}: quantised to {kind.name}, which F32 or BF16 would serve better: "
        f"{short_list(names)}"
        for kind, names in doubtful.items()
    )


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    while len(shape) > 1 and shape[-1] == 1:
        shape = shape[:-1]
    return shape


def _check_type(kind: GgmlType, spec: TensorSpec, where: str) -> None:
    if spec.use == "vector" and kind not in FLOATS:
        raise BadFileError(f"{where} is {kind.name}, F32, F16 or BF16 expected")
    if kind not in SUPPORTED:
        raise BadFileError(f"{where} is {kind.name}, a type for weights expected")
    if spec.use == "router" and LAYOUTS[kind].bits < _LOWEST_ROUTER_BITS:
        raise BadFileError(
            f"{where} is {kind.name}, at least {_LOWEST_ROUTER_BITS} bits expected: it chooses "
            "experts or blocks, and fewer bits choose others; quantise the file anew without it"
        )


def _check_leftovers(
    file: GgufFile, specs: dict[str, TensorSpec], config: ModelConfig
) -> tuple[str, ...]:
    refuse_relatives(file, specs)
    unused = [
        name
        for name in file.tensors
        if name not in specs and not (name.endswith("rope_freqs.weight") and _all_ones(file, name))
    ]
    warnings = []
    indexer = {name: None for name in file.tensors if _is_indexer(name, config)}
    if indexer and config.index_budget == 0:
        warnings.append(
            f"{file.paths[0]}: attends to everything, because attention.compress_ratios is 0 or "
            f"missing, though it has {short_list(indexer, 2)}; converters that know the "
            "architecture under another name write 0, convert the model anew"
        )
    unused = [name for name in unused if name not in indexer]
    if unused:
        warnings.append(f"{file.paths[0]}: not used: {short_list(unused)}")
    return tuple(warnings)


def refuse_relatives(file: GgufFile, specs: dict[str, TensorSpec]) -> None:
    """BadFileError if a tensor that is not asked for would change what a known one computes."""
    for name in file.tensors:
        if name not in specs:
            _refuse_relative(name, specs, file)


def _refuse_relative(name: str, specs: dict[str, TensorSpec], file: GgufFile) -> None:
    """Refuses what would change the product of a known weight, or is the same weight again."""
    split = split_block(name)
    rivals = {f"{name.removesuffix(end)}.weight" for end in _RELATIVES if name.endswith(end)}
    if split is not None and split[1] in ("ffn_gate_exps.weight", "ffn_up_exps.weight"):
        rivals.add(f"blk.{split[0]}.ffn_gate_up_exps.weight")
    if rivals & specs.keys():
        raise BadFileError(
            f"{file.paths[file.tensors[name].shard]}: tensor {name} is not supported beside "
            f"{min(rivals & specs.keys())}, a file without it expected"
        )


def _all_ones(file: GgufFile, name: str) -> bool:
    info = file.tensors[name]
    small = info.type in FLOATS and info.nbytes <= _VECTOR_BYTES
    return small and bool((_as_float32(file.view(name), info.type) == 1).all())


def _is_indexer(name: str, config: ModelConfig) -> bool:
    split = split_block(name)
    blocks = config.num_layers + config.num_draft_layers
    return split is not None and split[1].startswith("indexer.") and split[0] < blocks
