"""expert_ffn of a window whose experts lie on two devices and in the host's memory: the CPU's bits.

With the types of released files, whose kernels look for a peer's rows while they run; the embedded model's
types, whose kernels start behind the peer's, are those of tests/weights/test_device_experts.py.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

from strata_jax.ops.case_inputs import Call, make_call
from strata_jax.ops.cases import CASES, EMBEDDED
from strata_jax.ops.native import Backend
from strata_jax.ops.roles import EXPERT_ROLES, Role
from strata_jax.weights.panels import EXPERT_PARTS, matrix_bytes
from strata_jax.weights.placement import Tier
from tests.ops_device import run_device
from tests.ops_maker import assert_same_bits, changed, native

SHARED = (Role.FFN_GATE_SHARED, Role.FFN_UP_SHARED, Role.FFN_DOWN_SHARED)
TYPES = {Role.FFN_GATE_EXPS: 21, Role.FFN_UP_EXPS: 21, Role.FFN_DOWN_EXPS: 20}  # IQ3_S, IQ4_NL
ON_PEER = 1
"""`kOnPeer` of ffi/cuda/expert_word.h."""
ROWS = 8
BACKENDS = [
    pytest.param(Backend("emulated"), id="emulated"),
    pytest.param(Backend("cuda"), id="cuda", marks=pytest.mark.gpu),
]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    return request.param


@pytest.fixture(params=[0, 1])
def device(request: pytest.FixtureRequest, backend: Backend) -> int:
    if request.param >= backend.library.device_count():
        pytest.skip("a second GPU is needed: NOT CHECKED")
    return request.param


def call_of(rows: int) -> Call:
    case = dataclasses.replace(CASES["expert_ffn"][0], rows=rows, types=TYPES, default_type=8)
    return make_call("expert_ffn", case, seed=rows)


def on_cpu(call: Call) -> tuple[np.ndarray, ...]:
    """What the CPU's own kernels give, wherever JAX would compute by default."""
    with jax.default_device(jax.devices("cpu")[0]):
        return native(call)


@dataclasses.dataclass(frozen=True)
class Tiered:
    """A store as `run_device` wants it."""

    native: Any
    table: int = -1

    @property
    def slot(self) -> int:
        return self.native.slot


@contextlib.contextmanager
def tiered(backend: Backend, device: int, call: Call, tiers: list[Tier]) -> Iterator[Tiered]:
    """A store whose experts lie where `tiers` says."""
    library, matrices = backend.library, call.matrices
    if device:
        assert library.enable_peer_access(0, device) == ""
        assert library.enable_peer_access(device, 0) == ""
    experts = [matrices[role] for role in EXPERT_PARTS]
    slot = sum(matrix_bytes(m.type_id, m.rows, m.cols) for m in experts)
    fixed = {role: m for role, m in matrices.items() if role not in EXPERT_ROLES}
    size = sum(m.count * matrix_bytes(m.type_id, m.rows, m.cols) for m in fixed.values())
    room = slot * len(tiers)
    store = library.DeviceStore(len(Role), 1, len(tiers), size, room, room)
    try:
        store.open_doors(ROWS, EMBEDDED.num_experts_active, EMBEDDED.hidden)
        store.open_peer(device, False, room, EMBEDDED.expert_width, ROWS)
        for role, m in fixed.items():
            store.put(role, 0, m.type_id, m.count, m.rows, m.cols, m.rows, m.data.ctypes.data)
        gate, up, down = experts
        types = (gate.type_id, up.type_id, down.type_id)
        store.put_expert_shape(0, types, gate.rows, gate.cols)
        for expert, tier in enumerate(tiers):
            raw = tuple(m.data.ctypes.data + m.data.nbytes // m.count * expert for m in experts)
            store.put_expert(0, expert, tier, expert * slot, raw)
        store.publish_experts()
        store.warm_peer(0, SHARED)
        yield Tiered(store)
    finally:
        store.close()


def somewhere(seed: int) -> list[Tier]:
    places = [Tier.PRIMARY, Tier.PEER, Tier.HOST]
    return [places[i] for i in np.random.default_rng(seed).integers(3, size=EMBEDDED.num_experts)]


@pytest.mark.parametrize(("rows", "live"), [(1, 1), (3, 3), (8, 8), (8, 5), (8, 0)])
def test_gives_the_same_bits_wherever_experts_lie(rows: int, live: int, backend: Backend, device):
    call = changed(call_of(rows), live=np.int32(live))
    tiers = somewhere(rows + live)
    with tiered(backend, device, call, tiers) as store:
        got = run_device(call, backend, store)
        homes = store.native.take_homes()
        aborted = store.native.peer_aborted()

    assert_same_bits(got, on_cpu(call))
    routed = [tiers[expert] for expert in call.operands[1][:live].ravel()]
    assert homes[ON_PEER] == routed.count(Tier.PEER)
    assert not aborted


def test_takes_no_rows_of_a_call_before(backend: Backend, device: int):
    """Windows of other lengths and other values in turn, so that a peer's older rows would be seen."""
    whole = call_of(ROWS)
    rng = np.random.default_rng(5)
    calls = []
    for rows in (8, 1, 3, 8, 1, 1, 5, 8):
        x = rng.standard_normal((rows, EMBEDDED.hidden), np.float32)
        operands = [operand[:rows] for operand in whole.operands[1:-1]]
        calls.append(dataclasses.replace(whole, operands=(x, *operands, np.int32(rows))))
    with tiered(backend, device, whole, somewhere(1)) as store:
        got = [run_device(call, backend, store) for call in calls]

    for each, call in zip(got, calls):
        assert_same_bits(each, on_cpu(call))


@pytest.mark.parametrize("tier", [Tier.PRIMARY, Tier.PEER, Tier.HOST])
def test_gives_the_same_bits_where_all_experts_lie_together(tier: Tier, backend: Backend, device):
    call = call_of(3)
    with tiered(backend, device, call, [tier] * EMBEDDED.num_experts) as store:
        got = run_device(call, backend, store)

    assert_same_bits(got, on_cpu(call))


def test_gives_up_on_rows_that_do_not_come_and_recovers(backend: Backend, device: int):
    call = call_of(3)
    with tiered(backend, device, call, [Tier.PEER] * EMBEDDED.num_experts) as store:
        run_device(call, backend, store)
        store.native.lose_peer_rows(timeout_ms=300)
        run_device(call, backend, store)
        assert store.native.peer_aborted()
        store.native.recover_peer()
        assert not store.native.peer_aborted()
        got = run_device(call, backend, store)

    assert_same_bits(got, on_cpu(call))
