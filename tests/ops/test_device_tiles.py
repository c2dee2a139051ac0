"""The device's kernels for tiles of a prompt, whose rows are more than a window's.

Quantised products equal the CPU's bit for bit (contract T); others are close to float64, and a row's
bits depend on that row alone.
"""

import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from strata_jax.ops.case_inputs import Call, make_call
from strata_jax.ops.case_matrices import make_matrix, random_rows
from strata_jax.ops.cases import CASES, EMBEDDED, Q8_0, Case
from strata_jax.ops.native import Backend
from strata_jax.ops.roles import Role
from strata_jax.ops.unpack_layouts_ref import LAYOUTS
from tests.ops.test_device import BACKENDS, on_cpu
from tests.ops_device import device_store, emulating, on_device, run_device
from tests.ops_maker import assert_same_bits, changed
from tests.ops_rules import poison

F32, F16, BF16 = 0, 1, 30
QUANTISED = [type_id for type_id in LAYOUTS if LAYOUTS[type_id].form != "float"]
WIDE = [8, 12, 18, 20, 21, 23]
"""Types of experts that devices of capability 9 multiply by wide tiles."""
SIDE_BY_SIDE = (Role.ATTN_Q, Role.ATTN_K, Role.ATTN_V)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    return request.param


@pytest.fixture(params=[8, 9])
def capability(request: pytest.FixtureRequest, backend: Backend) -> Iterator[None]:
    """A kind of device, or a kind and an order of threads (`emulating`)."""
    kind = request.param if isinstance(request.param, tuple) else (request.param,)
    with emulating(backend, *kind):
        yield


def products(
    types: tuple[int, ...], columns: tuple[int, ...], width: int, rows: int, live: int
) -> Call:
    """Random rows, poisoned behind the last that is live, times random matrices side by side."""
    rng = np.random.default_rng(sum(types) + rows)
    roles = SIDE_BY_SIDE[: len(types)]
    case = CASES["quant_matmul"][0]
    matrices = {
        role: dataclasses.replace(
            make_matrix(case, Role.ATTN_QKV, rng),
            type_id=type_id,
            rows=count,
            cols=width,
            data=random_rows(type_id, count, width, rng),
        )
        for role, type_id, count in zip(roles, types, columns)
    }
    x = rng.standard_normal((live, width), np.float32)
    return Call(
        op="quant_matmul",
        operands=(np.concatenate([x, poison(x, rows - live)]), np.int32(live)),
        attributes={"layer": 0, "roles": roles, "num_columns": sum(columns)},
        matrices=matrices,
        macs=0,
        num_bytes=0,
    )


@pytest.mark.usefixtures("capability")
@pytest.mark.parametrize("type_id", QUANTISED)
def test_multiplies_every_type_as_the_cpu_does(type_id: int, backend: Backend):
    call = products((type_id, type_id), (45, 130), width=512, rows=70, live=67)

    assert_same_bits(on_device(call, backend), on_cpu(call))


@pytest.mark.usefixtures("capability")
@pytest.mark.parametrize("width", [96, 640, 1120])
@pytest.mark.parametrize("type_id", [8, 20, 2, 6, 7])
def test_multiplies_rows_that_end_inside_a_segment(type_id: int, width: int, backend: Backend):
    call = products((type_id,), (45,), width, rows=131, live=131)

    assert_same_bits(on_device(call, backend), on_cpu(call))


@pytest.mark.usefixtures("capability")
def test_multiplies_matrices_of_several_forms_side_by_side(backend: Backend):
    call = products((14, 8, 12), (40, 300, 33), width=256, rows=80, live=80)

    assert_same_bits(on_device(call, backend), on_cpu(call))


@pytest.mark.usefixtures("capability")
@pytest.mark.parametrize("live", [0, 1, 64, 129, 300])
def test_gives_zeros_for_rows_that_do_not_count(live: int, backend: Backend):
    call = products((8, F32, BF16), (64, 30, 140), width=256, rows=300, live=live)
    (got,) = on_device(call, backend)
    (expected,) = on_cpu(call)

    assert_same_bits((got[:, :64],), (expected[:, :64],))
    np.testing.assert_array_equal(got[live:], 0.0)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-4)


@pytest.mark.usefixtures("capability")
def test_passes_nan_on_as_the_cpu_does(backend: Backend):
    call = products((8, 14, 12), (32, 32, 32), width=256, rows=70, live=70)
    x = call.operands[0].copy()
    x[1, 5], x[2, 40], x[3] = np.nan, np.inf, 0.0

    call = changed(call, _0=x)
    assert_same_bits(on_device(call, backend), on_cpu(call))


@pytest.mark.usefixtures("capability")
@pytest.mark.parametrize(
    ("width", "capability"),
    [(96, 8), (96, (9, 1)), (640, 9), (2560, 8)],
    indirect=["capability"],
)
@pytest.mark.parametrize("type_id", [F32, F16, BF16])
def test_multiplies_unquantised_matrices_closely(type_id: int, width: int, backend: Backend):
    call = products((type_id, type_id), (48, 70), width, rows=70, live=66)
    (got,) = on_device(call, backend)
    x = call.operands[0][:66].astype(np.float64)
    weights = [call.matrices[role].values().astype(np.float64) for role in SIDE_BY_SIDE[:2]]
    exact = np.concatenate([x @ w.T for w in weights], axis=1)

    # Two parts of a float leave 2^-18 of it out, and low * low is left out.
    assert np.linalg.norm(got[:66] - exact) < 6e-6 * np.linalg.norm(exact)
    size = np.concatenate([np.abs(x) @ np.abs(w).T for w in weights], axis=1)
    assert (np.abs(got[:66] - exact) < 2**-17 * size).all()


# Many rows by groups of warps have other tiles than few.
@pytest.mark.usefixtures("capability")
@pytest.mark.parametrize(
    ("type_id", "capability"),
    [(F32, 8), (F16, 8), (BF16, 8), (Q8_0, 8), (F32, 9), (F16, 9), (BF16, (9, 1))],
    indirect=["capability"],
)
def test_gives_a_row_the_same_bits_wherever_it_stands(type_id: int, backend: Backend):
    # A real card has larger tiles for what is more than it has processors for.
    rows, columns = (3072, 560) if backend.name == "cuda" else (200, 200)
    call = products((type_id,), (columns,), width=288, rows=rows, live=rows)
    order = np.random.default_rng(5).permutation(rows)
    few = [7, 150, *range(20, 88)]
    with device_store(backend, call.matrices) as store:
        (straight,) = run_device(call, backend, store)
        (shuffled,) = run_device(changed(call, _0=call.operands[0][order]), backend, store)
        alone = changed(call, _0=call.operands[0][few], live=np.int32(2))
        (two,) = run_device(alone, backend, store)

    assert_same_bits((shuffled,), (straight[order],))
    assert_same_bits((two[:2],), (straight[few[:2]],))


@pytest.mark.parametrize("type_id", [F32, F16, BF16])
@pytest.mark.usefixtures("capability")
def test_multiplies_a_matrix_alone_as_beside_a_larger_one(type_id: int, backend: Backend):
    call = products((type_id, type_id), (64, 200), width=288, rows=70, live=70)
    attributes = {**call.attributes, "roles": SIDE_BY_SIDE[:1], "num_columns": 64}
    with device_store(backend, call.matrices) as store:
        (both,) = run_device(call, backend, store)
        (alone,) = run_device(dataclasses.replace(call, attributes=attributes), backend, store)

    assert_same_bits((alone,), (both[:, :64],))


@pytest.mark.parametrize("backend", BACKENDS[:1], indirect=True)
def test_splits_no_weights_that_would_take_too_much_workspace(backend: Backend):
    """Two bfloat16 for each: 47 MB of it, and 51 MB, for which there are other kernels."""
    taken = []
    for columns in (367_000, 400_000):
        call = products((F16,), (columns,), width=32, rows=65, live=1)
        with device_store(backend, call.matrices) as store:
            size = backend.workspace("quant_matmul", store.slot, 0, [SIDE_BY_SIDE[0]], 65)
            taken.append(size)

    assert 46e6 < taken[0] < 48e6
    assert taken[1] < 1000


EXPERTS = (Role.FFN_GATE_EXPS, Role.FFN_UP_EXPS, Role.FFN_DOWN_EXPS)


def experts(types: tuple[int, int, int], rows: int, live: int, **sizes: int) -> Call:
    """A layer's experts at the embedded model's sizes, or others."""
    case = Case(
        name="tiles",
        origin="this test",
        config=dataclasses.replace(EMBEDDED, **sizes),
        types=dict(zip(EXPERTS, types)),
        default_type=Q8_0,
        rows=rows,
        roles=EXPERTS,
    )
    call = make_call("expert_ffn", case, seed=sum(types) + rows)
    dead = {
        f"_{place}": np.concatenate([x[:live], poison(x, rows - live)])
        for place, x in enumerate(call.operands[:4])
    }
    return changed(call, **dead, live=np.int32(live))


def experts_chosen(
    types: tuple[int, int, int], *places: tuple[int, ...], dead: int = 0, **sizes: int
) -> Call:
    """`experts` of rows that have a place for each of `places`: some experts, each by so many rows.

    No expert is chosen twice, and the first one by nobody.
    """
    rng = np.random.default_rng(len(places))
    names = itertools.count(1)
    columns = [np.repeat([next(names) for _ in counts], counts) for counts in places]
    ids = np.stack([rng.permutation(column) for column in columns], axis=1)
    live = len(ids)
    call = experts(types, live + dead, live, num_experts=8, num_experts_active=len(places), **sizes)
    return changed(call, _1=np.concatenate([ids, call.operands[1][live:]]).astype(np.int32))


@pytest.mark.usefixtures("capability")
@pytest.mark.parametrize("capability", [8], indirect=True)
@pytest.mark.parametrize("type_id", QUANTISED)
def test_computes_experts_of_every_type_as_the_cpu_does(type_id: int, backend: Backend):
    call = experts((type_id, type_id, type_id), rows=66, live=65)

    assert_same_bits(on_device(call, backend), on_cpu(call))


# Tiles of all sizes that there are products for. IQ4_NL is wide in the second product alone, IQ3_XXS
# in the first: the other one takes the tiles in parts.
@pytest.mark.usefixtures("capability")
@pytest.mark.parametrize(
    ("type_id", "capability"),
    [
        (type_id, (9, order))
        for order, type_id in enumerate(WIDE)  # thread orders, too
    ],
    indirect=["capability"],
)
def test_computes_wide_tiles_of_every_size_as_the_cpu_does(type_id: int, backend: Backend):
    types = (type_id, type_id, type_id)
    call = experts_chosen(types, (129,), (97, 32), (65, 64), dead=40)

    assert_same_bits(on_device(call, backend), on_cpu(call))


# Three tiles of an expert, two, one that is full; the edges between sizes.
@pytest.mark.usefixtures("capability")
@pytest.mark.parametrize("capability", [9], indirect=True)
@pytest.mark.parametrize(
    "places",
    [
        ((321,), (160, 129, 32)),
        ((161,), (128, 33)),
        ((159,), (96, 63)),
    ],
)
def test_cuts_an_experts_rows_into_wide_tiles(
    places: tuple[tuple[int, ...], ...], backend: Backend
):
    widths = {"expert_width": 128, "shared_width": 128, "hidden": 128}
    call = experts_chosen((8, 8, 20), *places, **widths)

    assert_same_bits(on_device(call, backend), on_cpu(call))


@pytest.mark.usefixtures("capability")
@pytest.mark.parametrize("capability", [8], indirect=True)
@pytest.mark.parametrize("types", [(21, 8, 20), (12, 14, 10), (F32, F32, F32), (8, 8, BF16)])
def test_computes_experts_of_mixed_types_as_the_cpu_does(
    types: tuple[int, int, int], backend: Backend
):
    call = experts(types, rows=65, live=65)

    assert_same_bits(on_device(call, backend), on_cpu(call))


# Rows of 640 values are five stages: places rotate from tile to tile.
@pytest.mark.usefixtures("capability")
@pytest.mark.parametrize(
    ("types", "expert_width", "shared_width", "hidden", "capability"),
    [
        ((8, 8, 20), 96, 160, 256, 8),
        ((21, 21, 20), 640, 640, 768, 8),
        ((8, 8, 8), 32, 352, 160, 8),
        ((8, 8, 20), 96, 384, 384, 9),
        ((21, 21, 20), 640, 640, 768, 9),
    ],
    indirect=["capability"],
)
def test_computes_experts_of_odd_widths_as_the_cpu_does(
    types: tuple[int, int, int],
    expert_width: int,
    shared_width: int,
    hidden: int,
    backend: Backend,
):
    sizes = {"expert_width": expert_width, "shared_width": shared_width, "hidden": hidden}
    call = experts_chosen(types, (65,), **sizes)

    assert_same_bits(on_device(call, backend), on_cpu(call))


@pytest.mark.usefixtures("capability")
@pytest.mark.parametrize(
    ("live", "capability"),
    [(0, 8), (1, 8), (63, 8), (200, 8), (0, 9)],
    indirect=["capability"],
)
def test_leaves_dead_rows_of_experts_alone(live: int, backend: Backend):
    call = experts((21, 21, 20), rows=200, live=live)

    assert_same_bits(on_device(call, backend), on_cpu(call))


def test_gives_an_expert_that_all_rows_chose_all_of_them(backend: Backend):
    call = experts((8, 8, 8), rows=150, live=150)
    ids = np.tile(np.array([3, 9, 0, 15], np.int32), (150, 1))

    call = changed(call, _1=ids)
    assert_same_bits(on_device(call, backend), on_cpu(call))


def test_counts_every_routed_entry_of_a_tile_once(backend: Backend):
    call = experts((8, 8, 8), rows=90, live=77)
    with device_store(backend, call.matrices) as store:
        run_device(call, backend, store)
        usage = store.usage()

    ids = call.operands[1][:77]
    assert usage == np.bincount(ids.ravel(), minlength=EMBEDDED.num_experts).tolist()
