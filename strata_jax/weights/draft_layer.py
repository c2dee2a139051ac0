"""The draft layer of a model: found in the model's own file or in one beside it, checked, described."""

import dataclasses
import os
from collections.abc import Iterator
from typing import Self

import numpy as np

from strata_jax.config import ModelConfig
from strata_jax.errors import BadFileError
from strata_jax.ops.roles import DRAFT_TENSORS, EXPERT_ROLES, GLOBAL_TENSORS, LAYER_TENSORS, Role
from strata_jax.weights.gguf import GgufFile
from strata_jax.weights.matrices import MatrixAt, matrices_of_layer, matrix_at
from strata_jax.weights.metadata import read_config
from strata_jax.weights.pack import Pack, check_present, check_tensors, refuse_relatives
from strata_jax.weights.panels import expert_slot_bytes, matrix_bytes
from strata_jax.weights.tensor_names import short_list
from strata_jax.weights.tensor_specs import TensorSpec, draft_tensors, expected_tensors

_OWN = ("context_length", "num_draft_layers")
"""Settings in which the file of a draft layer may differ from the model's."""
_NO_USE = "nextn.shared_head_norm.weight"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftLayer:
    """Where the draft layer's tensors are. Valid as long as both packs are open."""

    pack: Pack
    """Holds the layer: the model's, or that of `--mtp`."""
    trunk: Pack
    """The model: gives the embedding and the head that the layer has not."""
    notes: tuple[str, ...]
    """What is odd about it, one line each."""

    @property
    def block(self) -> int:
        """Number of its block."""
        return self.trunk.config.num_layers

    @property
    def prefix(self) -> str:
        """Of its tensors' names."""
        return f"blk.{self.block}."

    def has(self, role: Role) -> bool:
        """Whether the layer has a matrix of its own for this role."""
        name = {**LAYER_TENSORS, **DRAFT_TENSORS}.get(role)
        return name is not None and self.pack.has(self.prefix + name)

    def matrices(self) -> Iterator[MatrixAt]:
        """Its matrices, as those of layer 0 of a store that holds nothing else."""
        yield from matrices_of_layer(self.pack, self.block, 0)
        for role, name in DRAFT_TENSORS.items():
            if self.pack.has(self.prefix + name):
                yield matrix_at(self.pack, role, 0, self.prefix + name)

    def close(self) -> None:
        """Lets go of the file, if it is one of its own."""
        if self.pack is not self.trunk:
            self.pack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def find_draft_layer(pack: Pack, path: str | os.PathLike[str] | None = None) -> DraftLayer | None:
    """The draft layer of a model.

    Args:
        pack: the model.
        path: a file that holds the layer; None = the model's own.

    Returns:
        None if there is no `path` and the model has no draft layer.

    Raises:
        BadFileError: if the file cannot be read, is no whole draft layer or one of another model: file,
            tensor or setting are named.
    """
    if path is None:
        if pack.config.num_draft_layers == 0:
            return None
        return DraftLayer(pack=pack, trunk=pack, notes=tuple(_notes(pack, pack.file.paths[0])))
    file = GgufFile.open(path)
    try:
        config, warnings = read_config(file, draft_of=pack.config)
        _check_same(config, pack.config, file.paths[0], pack.file.paths[0])
        specs = {spec.name: spec for spec in draft_tensors(config, file.tensors)}
        check_present(file, specs)
        warnings += check_tensors(file, specs)
        specs = {name: spec for name, spec in specs.items() if name in file.tensors}
        refuse_relatives(file, specs)
        warnings += tuple(_leftovers(file, config, specs))
        found = Pack(file, config, specs, warnings)
        return DraftLayer(pack=found, trunk=pack, notes=(*warnings, *_notes(found, file.paths[0])))
    except BaseException:
        file.close()
        raise


def _head(draft: DraftLayer) -> tuple[Pack, str]:
    """Which tensor the drafter's head is, and of which pack."""
    if draft.has(Role.OUTPUT):
        return draft.pack, draft.prefix + DRAFT_TENSORS[Role.OUTPUT]
    has_own = draft.trunk.has(GLOBAL_TENSORS[Role.OUTPUT])
    return draft.trunk, GLOBAL_TENSORS[Role.OUTPUT if has_own else Role.TOKEN_EMBD]


def draft_matrices(
    draft: DraftLayer, head_ids: np.ndarray | None, *, copy: bool = True
) -> tuple[list[MatrixAt], np.ndarray | None]:
    """All matrices of a draft layer's store, and the bytes of those that are no part of a file.

    Args:
        draft: the layer.
        head_ids: rows of the head that the drafter scores, which are copied; None = all.
        copy: whether the bytes are wanted: sizes are right without, too.
    """
    matrices, rows = list(draft.matrices()), None
    if head_ids is None:
        return matrices, None
    matrices = [m for m in matrices if m.role is not Role.OUTPUT]
    pack, name = _head(draft)
    whole, count = matrix_at(pack, Role.OUTPUT, 0, name), len(head_ids)
    if copy:
        rows = pack.view(name).reshape(whole.rows, -1)[head_ids]
    head = dataclasses.replace(
        whole,
        rows=count,
        stride=count,
        address=0 if rows is None else rows.ctypes.data,
        num_bytes=whole.num_bytes // whole.rows * count,
    )
    return [*matrices, head], rows


def store_bytes(matrices: list[MatrixAt]) -> tuple[int, int]:
    """Bytes of a device that the matrices and the experts take."""
    fixed = [m for m in matrices if m.role not in EXPERT_ROLES]
    count = max((m.count for m in matrices), default=0)
    return (
        sum(m.count * matrix_bytes(m.type, m.rows, m.cols) for m in fixed),
        count * expert_slot_bytes(matrices, 0),
    )


def _check_same(draft: ModelConfig, trunk: ModelConfig, path: str, trunk_path: str) -> None:
    different = [
        f"{field.name} is {getattr(draft, field.name)}, {getattr(trunk, field.name)} expected"
        for field in dataclasses.fields(ModelConfig)
        if field.name not in _OWN and getattr(draft, field.name) != getattr(trunk, field.name)
    ]
    if different:
        raise BadFileError(
            f"{path}: is the draft layer of another model than {trunk_path}: {'; '.join(different)}"
        )


def _leftovers(file: GgufFile, config: ModelConfig, specs: dict[str, TensorSpec]) -> Iterator[str]:
    """What the file has beside the layer: parts of the model, which the model's file has, or anything."""
    others = [name for name in file.tensors if name not in specs]
    of_model = {spec.name for spec in expected_tensors(config, file.tensors)}
    known = [name for name in others if name in of_model]
    if known:
        yield f"{file.paths[0]}: those of the model's own file are used: {short_list(known)}"
    unknown = [name for name in others if name not in of_model]
    if unknown:
        yield f"{file.paths[0]}: not used: {short_list(unknown)}"


def _notes(pack: Pack, path: str) -> Iterator[str]:
    config = pack.config
    if config.num_draft_layers > 1:
        yield (
            f"{path}: has {config.num_draft_layers} draft layers; the first is used, which every draft of "
            "a chain goes through"
        )
    name = f"blk.{config.num_layers}.{_NO_USE}"
    if pack.has(name):
        yield f"{path}: not used: {name}; the draft layer of this architecture has no such norm"
