"""A peer's part of sparse attention: the last rows of a tile, with the bits of one device alone."""

import contextlib
import dataclasses
from collections.abc import Iterator

import jax
import numpy as np
import pytest

from strata_jax.config import KvType, TierSettings
from strata_jax.ops.case_inputs import make_call
from strata_jax.ops.cases import CASES, EMBEDDED
from strata_jax.ops.native import Backend
from strata_jax.ops.roles import Role
from strata_jax.ops.sets import native_ops
from strata_jax.weights.budget import StepSizes
from strata_jax.weights.peer_prompts import attention_bytes, attention_sizes
from tests.ops.test_device import BACKENDS
from tests.ops_maker import assert_same_bits

ROWS, POSITION = 256, 320
SMALL = dataclasses.replace(EMBEDDED, index_budget=64)
WIDE = dataclasses.replace(SMALL, num_heads=12, num_kv_heads=1, head_dim=256)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    return request.param


@contextlib.contextmanager
def peer_store(backend: Backend, device: int, sizes: dict[str, float]) -> Iterator[int]:
    """Slot of a store without matrices whose peer takes rows of attention."""
    library = backend.library
    if device:
        assert library.enable_peer_access(0, device) == ""
        assert library.enable_peer_access(device, 0) == ""
    store = library.DeviceStore(len(Role), 1, 1, 0, 0, 0)
    store.open_doors(1, 1, 32)
    store.open_peer(device, False, 0, 32, 1)
    store.open_peer_attention(library.PeerAttentionSizes(sizes))
    yield store.slot
    store.close()


@pytest.mark.parametrize(
    ("config", "kv", "device", "live"),
    [(SMALL, "f32", 0, ROWS), (WIDE, "int8", 1, ROWS - 70)],
)
def test_takes_the_last_rows_and_changes_no_bit(config, kv: KvType, device, live: int, backend):
    if device >= backend.library.device_count():
        pytest.skip("a second GPU is needed: NOT CHECKED")
    case = dataclasses.replace(
        CASES["qsa_attend"][0], config=config, rows=ROWS, position=POSITION, kv=kv
    )
    attend, select = make_call("qsa_attend", case, seed=1), make_call("qsa_select", case, seed=2)
    q, proj, keys, values, _, scales, pos, _ = attend.operands
    settings = TierSettings(peer_device=1, peer_attention=0.5)
    steps = StepSizes(tile_rows=ROWS)
    sizes, _ = attention_sizes(settings, config, steps, (len(keys), kv), is_reached=True)
    assert sizes is not None
    native = backend.library.peer_attention_bytes(backend.library.PeerAttentionSizes(sizes))
    assert native <= attention_bytes(sizes) <= 1.5 * native + 16384

    def both(slot: int) -> np.ndarray:
        ops = native_ops(slot, backend=backend)

        # All are arguments: what a program holds as a constant no other device reaches.
        @jax.jit
        def run(live, pos, select_operands, q, proj, keys, values, scales):
            blocks = ops.qsa_select(*select_operands, pos, live, **select.attributes)
            cells = (keys, values, blocks, scales, pos, live)
            return ops.qsa_attend(q, proj, *cells, **attend.attributes)

        given = (select.operands[:2], q, proj, keys, values, scales)
        return np.array(run(np.int32(live), pos, *given))

    with peer_store(backend, device, sizes) as slot:
        assert_same_bits((both(slot),), (both(-1),))
