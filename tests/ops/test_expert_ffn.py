import dataclasses
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from strata_jax.ops.case_inputs import Call, make_call
from strata_jax.ops.cases import CASES
from strata_jax.ops.expert_ffn import ROLES
from strata_jax.ops.expert_ffn_ref import GgufStack, expert_ffn_exact
from strata_jax.ops.roles import Role
from strata_jax.ops.unpack_layouts_ref import LAYOUTS
from tests.ops_maker import (
    KERNELS,
    OP_ERRORS,
    THREADS,
    assert_close,
    assert_same_bits,
    changed,
    flush_to_zero,
    guarded_store,
    kernels,
    native,
    run_native,
    run_plain,
    small_cases,
    threads,
)
from tests.ops_rules import RowRules
from tests.ops_weights import any_bytes, hard_rows, matrix_of, name_of

F32, F16, Q4_0, Q8_0, Q4_K, Q6_K, IQ4_NL, IQ3_S = 0, 1, 2, 8, 12, 14, 20, 21


def sizes_of(type_id):
    """D and F of an expert: odd numbers of blocks where the type has blocks of 32."""
    block = LAYOUTS[type_id].block_values
    return (160, 96) if block <= 32 else (2 * block, block)


def make_matrices(types, D, F, shared_F, count, rng, raw=None):
    """Gate, up, down of `count` experts and of the shared one, by role."""
    shapes = [(F, D), (F, D), (D, F), (shared_F, D), (shared_F, D), (D, shared_F)]
    made = {}
    for place, (role, type_id, (rows, cols)) in enumerate(zip(ROLES, types, shapes)):
        stack = count if place < 3 else 1
        data = raw(type_id, stack * rows, cols, rng) if raw else None
        made[role] = matrix_of(type_id, rows, cols, rng, data, count=stack)
    return made


def make(types, D, F, *, T=9, A=2, count=3, shared_F=None, seed=0, raw=None) -> Call:
    rng = np.random.default_rng(seed)
    matrices = make_matrices(types, D, F, shared_F or F, count, rng, raw)
    x = np.concatenate([hard_rows(D, rng)] * (T // 9 + 1))[:T]
    weights = rng.random((T, A), np.float32)
    weights[weights < 0.1] = 0.0
    weights[weights > 0.9] = -0.0
    ids = rng.integers(0, count, (T, A), np.int32)  # twice the same expert now and then
    shared = rng.random(T, np.float32)
    return Call(
        op="expert_ffn",
        operands=(x, ids, weights, shared, np.int32(T)),
        attributes={"layer": 0},
        matrices=matrices,
        macs=0,
        num_bytes=0,
    )


def exact(call):
    """The specification's result."""
    stacks = [
        GgufStack(m.type_id, m.rows, m.data.reshape(m.count, -1))
        for m in (call.matrices[role] for role in ROLES)
    ]
    return (expert_ffn_exact(*call.operands[:4], matrices=stacks),)


class TestRules(RowRules):
    op = "expert_ffn"


class TestBits:
    @pytest.mark.parametrize("type_id", LAYOUTS, ids=name_of)
    def test_are_those_of_the_specification(self, type_id):
        call = make([type_id] * 6, *sizes_of(type_id), seed=type_id)
        expected = exact(call)
        for name in KERNELS:
            with kernels(name):
                assert_same_bits(native(call), expected, name)

    @pytest.mark.parametrize("type_id", LAYOUTS, ids=name_of)
    def test_are_those_of_the_specification_for_any_weights(self, type_id):
        call = make([type_id] * 6, *sizes_of(type_id), seed=type_id, raw=any_bytes)
        expected = exact(call)
        for name in KERNELS:
            with kernels(name):
                assert_same_bits(native(call), expected, name)

    @pytest.mark.parametrize(
        "types",
        [
            (IQ3_S, Q4_K, IQ4_NL, Q8_0, Q8_0, Q6_K),
            (IQ3_S, IQ3_S, IQ4_NL, F32, F16, F32),
            (F16, Q8_0, F32, Q8_0, F32, Q4_0),
            (F32, F32, Q8_0, Q8_0, Q8_0, F16),
        ],
    )
    @pytest.mark.parametrize("shared_F", [64, 256, 512])
    def test_are_those_of_the_specification_for_a_mix_of_types(self, types, shared_F):
        F = 256
        if LAYOUTS[types[5]].block_values > shared_F:
            types = (*types[:5], Q8_0)
        call = make(types, 256, F, shared_F=shared_F)

        assert_same_bits(native(call), exact(call))

    @pytest.mark.parametrize(("D", "F"), [(56, 40), (16, 16), (1, 3)])
    def test_are_those_of_the_specification_for_widths_that_fill_no_vector(self, D, F):
        call = make([F32, F16, F32] * 2, D, F)
        expected = exact(call)
        for name in KERNELS:
            with kernels(name):
                assert_same_bits(native(call), expected, name)

    @pytest.mark.parametrize("T", [*range(1, 10), 64, 256])
    def test_are_those_of_the_specification_at_every_number_of_rows(self, T):
        call = make([Q8_0] * 6, 64, 32, T=T)
        expected = exact(call)
        for name in KERNELS:
            for count in THREADS:
                with kernels(name), threads(count):
                    assert_same_bits(native(call), expected, f"{name}, {count} threads")

    @pytest.mark.parametrize("expert", [0, 2])
    def test_are_those_of_the_specification_where_all_rows_share_an_expert(self, expert):
        call = make([IQ4_NL] * 6, 64, 32, T=150)  # more rows than one pass of a panel takes
        call = changed(call, _1=np.full((150, 2), expert, np.int32))

        assert_same_bits(native(call), exact(call))

    def test_do_not_depend_on_the_grouping(self):
        call = make([Q4_0] * 6, 64, 32, T=9, A=3, count=4)
        (together,) = native(call)
        with guarded_store(call.matrices) as store:
            for t in range(9):
                rows = [x[t : t + 1] for x in call.operands[:4]]
                alone = dataclasses.replace(call, operands=(*rows, np.int32(1)))
                assert_same_bits(run_native(alone, store.slot), (together[t : t + 1],))

    def test_depend_on_router_order(self):
        call = make([Q8_0] * 6, 64, 32, T=9, A=3)
        turned = changed(
            call, _1=call.operands[1][:, ::-1].copy(), _2=call.operands[2][:, ::-1].copy()
        )

        assert_same_bits(native(turned), exact(turned))

    def test_keep_subnormals_whatever_the_callers_mode(self):
        call = make([Q8_0, Q8_0, F32] * 2, 64, 32)
        tiny = call.operands[2] * np.float32(1e-39)
        call = changed(call, _2=tiny, _3=call.operands[3] * np.float32(1e-39))

        with flush_to_zero(), threads(2):
            got = native(call)

        assert_same_bits(got, exact(call))

    def test_are_those_of_separate_matrices_where_gate_and_up_are_fused(self):
        call = make([IQ3_S] * 6, 256, 256, count=3)
        gate, up, down = (call.matrices[role] for role in ROLES[:3])
        both = np.concatenate(
            [gate.data.reshape(3, 1, -1), up.data.reshape(3, 1, -1)], axis=1
        ).reshape(-1)
        fused = dataclasses.replace(gate, rows=512, data=both)
        others = {role: call.matrices[role] for role in ROLES[2:]}
        expert_bytes = gate.data.nbytes // 3

        with guarded_store(others) as store:
            address = store.put(Role.FFN_ROUTER, fused)  # a role the op does not read
            span = both.nbytes - expert_bytes
            store.put_at(ROLES[0], gate, 512, address, span)
            store.put_at(ROLES[1], up, 512, address + expert_bytes, span)
            got = run_native(call, store.slot)

        assert_same_bits(got, exact(call))
        assert down.count == 3


class TestTwin:
    @pytest.mark.parametrize("case", small_cases("expert_ffn"), ids=lambda case: case.name)
    def test_is_near(self, case):
        call = make_call("expert_ffn", case, seed=3)

        assert_close("expert_ffn", native(call), run_plain(call))

    def test_is_near_the_specification(self):
        call = make_call("expert_ffn", CASES["expert_ffn"][1], seed=4)

        assert_close("expert_ffn", exact(call), run_plain(call))


class TestErrors:
    call = make([Q8_0] * 6, 64, 32, T=4, A=2, count=3)

    def test_name_a_closed_store(self):
        with guarded_store(self.call.matrices) as store:
            slot = store.slot
        with pytest.raises(OP_ERRORS, match=f"expert_ffn: store {slot} is closed"):
            run_native(self.call, slot)

    def test_name_tiers_that_are_closed(self):
        call = dataclasses.replace(self.call, attributes={"layer": 0, "tiers": 10**6})

        with pytest.raises(OP_ERRORS, match="expert_ffn: tiers 1000000 are closed"):
            native(call)

    @pytest.mark.parametrize("value", [-1, 3, 2**31 - 1, -(2**31)])
    def test_name_an_id_that_is_no_expert_and_its_place(self, value):
        ids = self.call.operands[1].copy()
        ids[2, 1] = value

        with pytest.raises(
            OP_ERRORS, match=rf"expert_ffn: ids\[2, 1\] is {value}, outside \[0, 3\)"
        ):
            native(changed(self.call, _1=ids))

    @pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
    def test_name_the_layer_of_a_missing_matrix(self, role):
        matrices = {r: m for r, m in self.call.matrices.items() if r != role}

        with pytest.raises(OP_ERRORS, match="expert_ffn: the matrices of layer 0 do not fit rows"):
            native(dataclasses.replace(self.call, matrices=matrices))

    def test_name_the_layer_of_a_matrix_of_another_shape(self):
        wrong = make_matrices([Q8_0] * 6, 96, 32, 32, 3, np.random.default_rng(0))
        for role in ROLES:
            matrices = {**self.call.matrices, role: wrong[role]}
            with pytest.raises(OP_ERRORS, match="expert_ffn: the matrices of layer 0 do not fit"):
                native(dataclasses.replace(self.call, matrices=matrices))

    @pytest.mark.parametrize("place", [1, 2, 3])
    def test_name_operands_of_another_number_of_rows(self, place):
        short = self.call.operands[place][:3]

        with pytest.raises(OP_ERRORS, match="expert_ffn: shapes of x, ids, weights"):
            native(changed(self.call, **{f"_{place}": short}))

    def test_name_weights_of_another_number_of_experts(self):
        with pytest.raises(OP_ERRORS, match="expert_ffn: shapes of x, ids, weights"):
            native(changed(self.call, _2=self.call.operands[2][:, :1]))

    def test_name_another_layer(self):
        call = dataclasses.replace(self.call, attributes={"layer": 5})

        with pytest.raises(OP_ERRORS, match="expert_ffn: the matrices of layer 5 do not fit"):
            native(call)


OUT_OF_MEMORY = """
import pathlib, resource
import jax, jax.numpy as jnp
import numpy as np
from strata_jax.ops.sets import native_ops
from strata_jax.weights.matrices import fill_store
from strata_jax.weights.pack import open_pack

path = pathlib.Path("strata_jax/models/strata-small/model-IQ3_S.gguf")
with open_pack(path) as pack:
    store = fill_store(pack)
    ops, rows = native_ops(store.slot), 16384

    def program(x, ids, weights, shared, live):
        return ops.expert_ffn(x, ids, weights, shared, live, layer=0)

    x, ids = np.zeros((rows, 256), np.float32), np.tile(np.arange(4, dtype=np.int32), (rows, 1))
    operands = [jnp.asarray(a) for a in (x, ids, np.ones((rows, 4), np.float32))]
    operands.append(jnp.ones(rows))
    compiled = jax.jit(program).lower(*operands, jnp.int32(0)).compile()
    few, all_rows = jnp.int32(1), jnp.int32(rows)
    expected = np.array(compiled(*operands, few))
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + (48 << 20)  # 80 MiB of rows do not fit, all else does
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    try:
        np.asarray(compiled(*operands, all_rows))
    except (ValueError, RuntimeError) as error:
        print(error)
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
    assert np.array_equal(np.asarray(compiled(*operands, few)), expected)
    store.close()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory limits: UNTESTED here")
def test_says_that_memory_ran_out_and_goes_on():
    done = subprocess.run(
        [sys.executable, "-c", OUT_OF_MEMORY],
        cwd=pathlib.Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stderr
    assert "expert_ffn: no memory for this step; a shorter --max_context" in done.stdout
