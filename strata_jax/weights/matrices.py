"""Tells the native store where every matrix of a pack lies: addresses into the mapping, no copies."""

from strata_jax import _native
from strata_jax.ops.roles import EXPERT_ROLES, GLOBAL_TENSORS, LAYER_TENSORS, Role
from strata_jax.weights.pack import Pack

_FUSED = "ffn_gate_up_exps.weight"


def fill_store(pack: Pack) -> _native.WeightStore:
    """A native store of all trunk matrices. Valid while the pack is open; close the store first."""
    store = _native.WeightStore(len(Role), pack.config.num_layers)
    for role, name in GLOBAL_TENSORS.items():
        if role is Role.OUTPUT and not pack.has(name):
            name = GLOBAL_TENSORS[Role.TOKEN_EMBD]  # tied head
        if pack.has(name):
            _put(store, pack, role, 0, name)
    for layer in range(pack.config.num_layers):
        prefix = f"blk.{layer}."
        for role, name in LAYER_TENSORS.items():
            if pack.has(prefix + name):
                _put(store, pack, role, layer, prefix + name)
        if pack.has(prefix + _FUSED):
            _put_fused(store, pack, layer, prefix + _FUSED)
    return store


def _put(store: _native.WeightStore, pack: Pack, role: Role, layer: int, name: str) -> None:
    info = pack.tensor(name)
    cols, *outer = info.shape
    rows = outer[0] if outer else 1
    count = outer[1] if role in EXPERT_ROLES else 1
    store.put(role, layer, info.type, count, rows, cols, rows, pack.address(name), info.nbytes)


def _put_fused(store: _native.WeightStore, pack: Pack, layer: int, name: str) -> None:
    """Gate and up of each expert in one tensor, gate first: two matrices with a stride of both."""
    info = pack.tensor(name)
    cols, stride, count = info.shape
    rows = stride // 2
    half = info.nbytes // count // 2
    for index, role in enumerate((Role.FFN_GATE_EXPS, Role.FFN_UP_EXPS)):
        address = pack.address(name) + index * half
        num_bytes = info.nbytes - half
        store.put(role, layer, info.type, count, rows, cols, stride, address, num_bytes)
