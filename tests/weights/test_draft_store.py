import numpy as np
import pytest

from strata_jax.ops.native import CPU
from strata_jax.ops.roles import Role
from strata_jax.ops.unpack_ref import dequantize_ref
from strata_jax.weights.draft_layer import draft_matrices, find_draft_layer, store_bytes
from strata_jax.weights.draft_store import open_draft_store
from strata_jax.weights.pack import open_pack
from tests.gguf_maker import TINY, make_model

IDS = np.asarray([1, 4, 5, 300], np.int32)


@pytest.fixture(params=[(), ("output.weight",)], ids=["own head", "tied"])
def draft(request, tmp_path):
    path = make_model(tmp_path / "tiny.gguf", TINY, drop=request.param).path
    with open_pack(path) as pack:
        found = find_draft_layer(pack)
        assert found is not None
        yield found


def test_copies_the_rows_of_the_head_that_are_drafted(draft):
    matrices, rows = draft_matrices(draft, IDS)

    (head,) = [m for m in matrices if m.role is Role.OUTPUT]
    assert rows is not None
    assert (head.rows, head.cols, head.address) == (4, TINY.hidden, rows.ctypes.data)
    name = "output.weight" if draft.trunk.has("output.weight") else "token_embd.weight"
    whole = draft.trunk.vector(name)
    np.testing.assert_array_equal(
        dequantize_ref(head.type, rows.reshape(-1), 4, TINY.hidden), whole[IDS]
    )


def test_leaves_the_models_head_where_it_is(draft):
    matrices, rows = draft_matrices(draft, None)

    assert rows is None
    assert Role.OUTPUT not in {m.role for m in matrices}


def test_takes_the_lowest_free_slot_until_it_is_closed(draft):
    first = open_draft_store(draft, None, CPU, print)
    second = open_draft_store(draft, IDS, CPU, print)
    slot = first.slot
    assert second.slot != slot
    first.close()

    again = open_draft_store(draft, None, CPU, print)

    assert again.slot == slot
    again.close()
    second.close()


def test_counts_the_bytes_of_a_device(draft):
    matrices, _ = draft_matrices(draft, None)

    fixed, experts = store_bytes(matrices)

    parts = 3 * TINY.hidden * TINY.width * 4
    assert experts == TINY.experts * parts
    assert fixed % 256 == 0
    assert fixed >= sum(m.num_bytes for m in matrices if "EXPS" not in m.role.name)
