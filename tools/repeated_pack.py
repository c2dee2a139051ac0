"""A model of more layers than its file has: the file's layers over and over, for speed and memory work.

Twelve layers of the real widths fill 16 GB, all forty-eight 60 GB that no test machine wants to write. Speed and
memory do not depend on what weights say: block N of the longer model is block N mod L of the file, read
from the same bytes. Everything else is as if the file had them all: the plan counts them, the loader
copies each into memory of its own.
"""

import dataclasses
from collections.abc import Iterator

from strata_jax.weights.gguf import GgufFile
from strata_jax.weights.gguf_header import TensorInfo
from strata_jax.weights.pack import Pack
from strata_jax.weights.tensor_names import split_block
from strata_jax.weights.tensor_specs import TensorSpec


class _AliasedFile(GgufFile):
    """A file with further names for the tensors of another one, which stays the owner."""

    def __init__(self, file: GgufFile, aliases: dict[str, TensorInfo]):
        self.__dict__.update(file.__dict__)
        self.tensors = {**file.tensors, **aliases}


def repeated_pack(pack: Pack, num_layers: int) -> Pack:
    """`pack` with `num_layers` layers; close the given one, not this.

    Args:
        pack: a model whose layers repeat.
        num_layers: a multiple of the pack's, at least as many.

    Raises:
        ValueError: if it is not.
    """
    config = pack.config
    times, rest = divmod(num_layers, config.num_layers)
    if rest or times < 1:
        raise ValueError(
            f"{num_layers} layers from a file of {config.num_layers}, a multiple expected"
        )
    longer = dataclasses.replace(
        config,
        num_layers=num_layers,
        layer_kinds=config.layer_kinds * times,
        num_draft_layers=0,  # they follow the trunk, whose end is elsewhere now
    )
    specs = {name: spec for name, spec in pack.specs.items() if spec.tier != "draft"}
    aliases = {}
    for name, template, spec in _copies(pack, num_layers):
        specs[name] = spec
        aliases[name] = pack.file.tensors[template]
    return Pack(_AliasedFile(pack.file, aliases), longer, specs, pack.warnings)


def _copies(pack: Pack, num_layers: int) -> Iterator[tuple[str, str, TensorSpec]]:
    """Name, template's name and use of every tensor that the file does not have."""
    have = pack.config.num_layers
    own = pack.config.ngram.layer if pack.config.ngram is not None else -1
    for template, spec in pack.specs.items():
        split = split_block(template)
        if split is None or split[0] >= have:
            continue
        layer, rest = split
        if layer == own and rest.startswith("ple_"):  # the n-gram block is there once
            continue
        for copy in range(layer + have, num_layers, have):
            yield f"blk.{copy}.{rest}", template, spec
