"""The axis vocabulary, and the pytree decorator of the model's state and parameters.

Letters are axes only; sizes in configs are words.

    T rows of a window or tile     D width of one residual stream    J residual streams
    H query heads                  K key/value heads, or the reduced axis of a product
    C channels per head            S cells of the KV cache           M blocks of cells
    IH, IC indexer heads, width    Vh, Kh value and key heads of the delta net
    E routed experts               A experts active per token        F hidden width of an expert
    V vocabulary                   W n-gram heads                    R rotated values of a head
    N columns of a product         P columns of a merged projection  NB blocks a row attends to
"""

import dataclasses
from typing import TypeVar, dataclass_transform

import jax

T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def pytree(cls: type[T]) -> type[T]:
    """Makes a frozen keyword-only dataclass that JAX takes apart field by field."""
    cls = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
    names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]

    def flatten(value):
        keys = tuple((jax.tree_util.GetAttrKey(name), getattr(value, name)) for name in names)
        return keys, None

    def unflatten(_, children):
        value = object.__new__(
            cls
        )  # JAX rebuilds trees with leaves that are no arrays: no checks here
        for name, child in zip(names, children, strict=True):
            object.__setattr__(value, name, child)
        return value

    jax.tree_util.register_pytree_with_keys(cls, flatten, unflatten)
    return cls
