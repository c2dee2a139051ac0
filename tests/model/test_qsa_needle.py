"""A block of four tokens in a long random context that only the last query looks for.

At 8 and 64 times the indexer's budget, by the ops that the model's attention is made of.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from strata_jax.config import KvType
from strata_jax.ops.native import CPU, Backend
from strata_jax.ops.sets import native_ops

BUDGET, RATIO = 256, 4
HEADS, DIM, ROTATED, TILE = 4, 64, 16, 1024
KINDS = np.cumsum([2 * DIM, DIM, DIM, HEADS * DIM])
"""Where a row's q with its gate, k, v and index queries end; its index key follows."""
FOUND = 100.0
SIGNAL = 0.75
"""Of the mark, on every value: the needle's scores stand out of 4,096 others by little more than
they have to."""
DTYPES = {"fp16": jnp.float16, "int8": jnp.int8, "f32": jnp.float32}


def haystack(tokens: int, needle: int, seed: int) -> np.ndarray:
    """Projections of all tokens; values of the needle's are FOUND."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((tokens, KINDS[-1] + DIM), np.float32)
    q, _, v, index_q, index_k = np.split(rows, KINDS, axis=1)
    # The mark lies in the values that are not rotated: positions do not matter there.
    mark = np.where(np.arange(DIM) < ROTATED, 0, rng.choice([-SIGNAL, SIGNAL], DIM))
    index_k[needle : needle + RATIO] += mark
    v[needle : needle + RATIO] = FOUND
    index_q[-1] += np.tile(mark, HEADS)
    q[:, DIM:] = 30.0  # the gate is open
    return rows


@functools.cache
def programs(backend: Backend):
    ops = native_ops(-1, backend=backend)
    append = functools.partial(
        ops.qsa_append, num_heads=1, index_heads=HEADS, ratio=RATIO, eps=1e-6
    )
    select = functools.partial(ops.qsa_select, ratio=RATIO, num_blocks=BUDGET // RATIO)
    attend = functools.partial(ops.qsa_attend, ratio=RATIO)
    return jax.jit(append, donate_argnums=range(6, 11)), jax.jit(select), jax.jit(attend)


def last_row(rows: np.ndarray, kv: KvType, backend: Backend) -> tuple[np.ndarray, np.ndarray]:
    """The blocks that the last token selects, and what it attends to."""
    append, select, attend = programs(backend)
    tokens = len(rows)
    keys, values = (jnp.zeros((tokens, 1, DIM), DTYPES[kv]) for _ in range(2))
    raw = jnp.zeros((tokens, DIM), jnp.float32)
    index_keys = jnp.zeros((tokens // RATIO // 16 + 1, DIM, 16), jnp.float32)
    scales = jnp.zeros((tokens if kv == "int8" else 1, 1, 2), jnp.float32)
    caches = (keys, values, raw, index_keys, scales)
    inv_freq = (1e7 ** (-np.arange(0, ROTATED, 2) / ROTATED)).astype(np.float32)
    norms = [np.ones(DIM, np.float32)] * 4
    q = index_q = tile = np.zeros(0)
    for begin in range(0, tokens, TILE):
        tile = rows[begin : begin + TILE]
        numbers = (np.int32(0), np.int32(begin), np.int32(TILE))
        q, index_q, *caches = append(tile, *norms, inv_freq, *caches, *numbers)
    numbers = (np.int32(tokens - 1), np.int32(1))
    blocks = select(index_q[-1:], caches[3], *numbers)
    out = attend(q[-1:], tile[-1:], caches[0], caches[1], blocks, caches[4], *numbers)
    return np.asarray(blocks[0]), np.asarray(out[0])


BACKENDS = [
    pytest.param(CPU, id="cpu"),
    pytest.param(Backend("cuda"), id="cuda", marks=pytest.mark.gpu),
]


@pytest.mark.parametrize("depth", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("times", [8, 64])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_last_query_finds_the_needle(backend: Backend, times: int, seed: int, depth: float):
    tokens = times * BUDGET
    needle = int(depth * tokens) // RATIO * RATIO
    rows = haystack(tokens, needle, seed)

    with jax.default_device(jax.devices(backend.platform)[0]):
        blocks, out = last_row(rows, ("fp16", "int8", "f32")[seed % 3], backend)
        hay = rows[np.r_[:needle, : tokens - needle]]
        without, other = last_row(hay, "fp16", backend)

    assert needle // RATIO in blocks
    # Equal weights would give four of some 256 cells their share.
    assert out.mean() > FOUND * RATIO / BUDGET / 4
    assert len(without) == BUDGET // RATIO
    assert abs(other.mean()) < 1
