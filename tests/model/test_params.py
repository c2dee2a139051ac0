"""The parameter tree."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from strata_jax.model.params import LinearParams, MixerParams


def mixer(value=1.0):
    return MixerParams(norm=jnp.full((2, 3), value, jnp.float32))


def test_trees_are_taken_apart_by_field_name():
    paths = jax.tree_util.tree_leaves_with_path(
        LinearParams(
            conv_weight=jnp.zeros(1), decay=jnp.zeros(2), dt_bias=jnp.zeros(3), norm=jnp.zeros(4)
        )
    )

    assert [jax.tree_util.keystr(path) for path, _ in paths] == [
        ".conv_weight",
        ".decay",
        ".dt_bias",
        ".norm",
    ]


def test_trees_are_rebuilt_with_leaves_that_are_no_arrays():
    shapes = jax.tree.map(lambda leaf: leaf.shape, mixer())

    assert isinstance(shapes, MixerParams)
    assert shapes.norm == (2, 3)


def test_parameters_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        mixer().norm = jnp.zeros(1)  # type: ignore[misc]


def test_parameters_are_named_never_counted():
    with pytest.raises(TypeError):
        MixerParams(jnp.zeros(1))  # type: ignore[misc]
