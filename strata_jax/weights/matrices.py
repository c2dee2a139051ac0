"""Where every matrix of a pack lies, for the native stores: addresses into the mapping, no copies."""

import dataclasses
from collections.abc import Iterator

from strata_jax import _native
from strata_jax.ops.roles import EXPERT_ROLES, GLOBAL_TENSORS, LAYER_TENSORS, Role
from strata_jax.weights.pack import Pack

_FUSED = "ffn_gate_up_exps.weight"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatrixAt:
    """`count` matrices [rows, cols] of GGUF blocks in the mapping."""

    role: Role
    layer: int
    type: int
    count: int
    """More than one: experts."""
    rows: int
    cols: int
    stride: int
    """Rows from one matrix to the next; more than `rows` where gate and up are one tensor."""
    address: int
    num_bytes: int
    """From the first row to the last."""

    def address_of(self, index: int) -> int:
        """Where matrix `index` begins."""
        rows = (self.count - 1) * self.stride + self.rows
        return self.address + index * self.stride * (self.num_bytes // rows)


def matrices_of(pack: Pack) -> Iterator[MatrixAt]:
    """All matrices of the trunk."""
    for role, name in GLOBAL_TENSORS.items():
        if role is Role.OUTPUT and not pack.has(name):
            name = GLOBAL_TENSORS[Role.TOKEN_EMBD]  # tied head
        if pack.has(name):
            yield matrix_at(pack, role, 0, name)
    for layer in range(pack.config.num_layers):
        yield from matrices_of_layer(pack, layer, layer)


def matrices_of_layer(pack: Pack, block: int, layer: int) -> Iterator[MatrixAt]:
    """The matrices of a block that every model has, as those of `layer` of a store."""
    prefix = f"blk.{block}."
    for role, name in LAYER_TENSORS.items():
        if pack.has(prefix + name):
            yield matrix_at(pack, role, layer, prefix + name)
    if pack.has(prefix + _FUSED):
        yield from _fused(pack, layer, prefix + _FUSED)


def fill_store(pack: Pack) -> _native.WeightStore:
    """A native store of all trunk matrices. Valid while the pack is open; close the store first."""
    store = _native.WeightStore(len(Role), pack.config.num_layers)
    for m in matrices_of(pack):
        store.put(
            m.role, m.layer, m.type, m.count, m.rows, m.cols, m.stride, m.address, m.num_bytes
        )
    return store


def matrix_at(pack: Pack, role: Role, layer: int, name: str) -> MatrixAt:
    """Where the tensor `name` lies, as `role` of `layer`."""
    info = pack.tensor(name)
    cols, *outer = info.shape
    rows = outer[0] if outer else 1
    return MatrixAt(
        role=role,
        layer=layer,
        type=info.type,
        count=outer[1] if role in EXPERT_ROLES else 1,
        rows=rows,
        cols=cols,
        stride=rows,
        address=pack.address(name),
        num_bytes=info.nbytes,
    )


def _fused(pack: Pack, layer: int, name: str) -> Iterator[MatrixAt]:
    """Gate and up of each expert in one tensor, gate first: two matrices with a stride of both."""
    info = pack.tensor(name)
    cols, stride, count = info.shape
    half = info.nbytes // count // 2
    for index, role in enumerate((Role.FFN_GATE_EXPS, Role.FFN_UP_EXPS)):
        yield MatrixAt(
            role=role,
            layer=layer,
            type=info.type,
            count=count,
            rows=stride // 2,
            cols=cols,
            stride=stride,
            address=pack.address(name) + index * half,
            num_bytes=info.nbytes - half,
        )
