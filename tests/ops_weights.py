"""Matrices and activations for the op tests: sane ones, and those that go wrong first."""

import numpy as np

from strata_jax.ops.case_matrices import Matrix, random_rows
from strata_jax.ops.unpack_layouts_ref import LAYOUTS


def name_of(type_id):
    return LAYOUTS[type_id].name


def columns_of(type_id):
    """Row lengths: less than a segment, a segment and a part, an odd number of blocks."""
    block = LAYOUTS[type_id].block_values
    return [cols for cols in (160, 256, 320, 640, 768) if cols % block == 0]


def matrix_of(type_id, num_rows, num_cols, rng, data=None, count=1):
    data = random_rows(type_id, count * num_rows, num_cols, rng) if data is None else data
    return Matrix(type_id=type_id, count=count, rows=num_rows, cols=num_cols, data=data)


def any_bytes(type_id, num_rows, num_cols, rng):
    """Every code, and scales of every kind: subnormal, infinite, NaN."""
    layout = LAYOUTS[type_id]
    size = num_rows * num_cols // layout.block_values * layout.block_bytes
    return rng.integers(0, 256, size, np.uint8)


def hard_rows(num_cols: int, rng: np.random.Generator) -> np.ndarray:
    """Nine rows of activations, most of them of a kind that goes wrong: float32 [9, num_cols]."""
    x = rng.standard_normal((9, num_cols)).astype(np.float32)
    x[1] = 0.0
    x[2] = -0.0
    x[3] = (x[3] * np.float32(1e-39)).astype(np.float32)  # subnormal: below the floor
    x[4, num_cols // 2] = np.nan
    x[5, 0], x[5, -1] = np.inf, -np.inf
    x[6] = np.clip(x[6], -3, 3) * np.float32(1e38)
    # Either side of the floor of 2^-100, and products that are subnormal.
    x[7] = np.ldexp(rng.choice([-1.0, 1.0], num_cols), rng.integers(-104, -94, num_cols))
    x[7, :32] = np.float32(2.0**-100)  # the floor itself counts
    x[8] = np.rint(x[8] * 4) / 2  # ties in the rounding to codes
    return x
