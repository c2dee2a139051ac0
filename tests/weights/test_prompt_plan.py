"""What prompts take of a GPU's memory, and slots of experts that they borrow where that is short."""

import dataclasses

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strata_jax.config import TierSettings
from strata_jax.errors import CapacityError
from strata_jax.weights.budget import CHUNK_SHARE, GIB, MIB, StepSizes, chunk_bytes
from strata_jax.weights.pack import open_pack
from strata_jax.weights.placement import Tier, slot_bytes
from strata_jax.weights.plan import make_plan
from strata_jax.weights.prompt_plan import scratch_bytes
from strata_jax.weights.tier_plan import Machine, plan_tiers
from tests.gguf_maker import BLOCKY, make_model
from tests.weights.tier_plans import HOST, need_of

ALL = 8 * 128
STEPS = StepSizes(tile_rows=256, chunk_tiles=None)
LONG = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    """A model without weights, of eight layers of 128 experts."""
    sizes = dataclasses.replace(BLOCKY, drafts=0, layers=8, experts=128)
    path = make_model(
        tmp_path_factory.mktemp("model") / "m.gguf",
        sizes,
        types={"*_exps*": 8, "*_shexp.*": 8},
        sparse=True,
    ).path
    with open_pack(path) as opened:
        yield opened


@pytest.fixture(scope="module")
def planned(pack):
    """Plans by free bytes of a GPU."""
    plan = make_plan(pack, None)

    def made(free, steps=STEPS, **flags):
        machine = Machine(platform="cuda", host=HOST, primary_free_bytes=free)
        return plan_tiers(pack, plan, TierSettings(**flags), machine, steps=steps)

    return made


def test_little_memory_gets_large_chunks_by_borrowing(planned):
    little = planned(120 * MIB)
    own = planned(120 * MIB, dataclasses.replace(STEPS, lends=False))
    plenty = planned(4 * GIB)

    assert plenty.steps.chunk_rows == 8192
    assert not plenty.prompt.lent_bytes
    assert little.steps.chunk_rows > own.steps.chunk_rows
    assert little.prompt.scratch_bytes > 0
    little.check()


def test_a_ring_is_borrowed_unless_a_count_of_experts_leaves_room(planned):
    auto, counted = planned(200 * MIB), planned(1200 * MIB, expert_cache=256)

    assert auto.ring_slots > 0
    assert auto.prompt.lent_bytes > 0
    assert "prefill ring" not in need_of(auto, "primary").parts
    assert any("prompts borrow the slots of " in note for note in auto.notes)
    assert counted.ring_slots > 0
    assert counted.prompt.lent_bytes == 0
    assert need_of(counted, "primary").parts["prefill ring"] == counted.prompt.owned_bytes


@LONG
@given(
    mib=st.integers(50, 300),
    cache=st.none() | st.integers(0, ALL),
    ring=st.none() | st.just(0) | st.integers(16, 300),
    tiles=st.none() | st.integers(1, 32),
)
def test_what_is_borrowed_is_there(pack, planned, mib, cache, ring, tiles):
    """Report 32: whatever is free, what a chunk needs has its place before the first expert."""
    flags = {"expert_cache": cache, "prefill_ring": ring}
    steps = dataclasses.replace(STEPS, chunk_tiles=tiles)

    found = planned(mib * MIB, steps, **flags)

    prompt, placed = found.prompt, found.placement
    slot = int(slot_bytes(placed.expert_bytes).max())
    assert prompt.lent_bytes <= placed.primary_bytes // 2
    assert prompt.owned_bytes + prompt.lent_bytes == prompt.ring_slots * slot + prompt.scratch_bytes
    assert prompt.owned_bytes == 0 or prompt.lent_bytes == 0
    lent = prompt.lent_experts(placed)
    begin = placed.primary_bytes - prompt.lent_bytes
    assert (
        placed.slots[placed.tiers == Tier.PRIMARY][~lent[placed.tiers == Tier.PRIMARY]] < begin
    ).all()
    assert bool(found.steps.lends) == (prompt.scratch_bytes > 0)
    if found.steps.lends:
        assert prompt.scratch_bytes == scratch_bytes(pack.config, found.steps)
        assert chunk_bytes(pack.config, found.steps) <= mib * MIB // CHUNK_SHARE
    homes = need_of(found, "host").parts["staging"]
    assert homes >= prompt.home_bytes(placed) >= int(lent.any()) * prompt.lent_bytes


@LONG
@given(mib=st.integers(50, 300), less=st.integers(-40, 3))
def test_an_engine_plans_what_the_command_planned(planned, mib, less):
    """Chunk and loan are chosen once: XLA has its memory by then, and more or a little less may be free."""
    first = planned(mib * MIB)

    again = planned((mib - less) * MIB, first.steps)

    assert again.steps == first.steps
    assert again.prompt.scratch_bytes == first.prompt.scratch_bytes
    assert again.xla_bytes == first.xla_bytes


def test_room_for_a_chunk_that_is_gone_is_an_error(planned):
    steps = planned(120 * MIB).steps

    with pytest.raises(CapacityError, match=" rows has no room any more; ask again"):
        planned(40 * MIB, steps)


def test_experts_that_are_lent_are_the_last_ones(planned):
    found = planned(200 * MIB)

    lent = found.prompt.lent_experts(found.placement)
    assert (found.placement.tiers[lent] == Tier.PRIMARY).all()
    others = (found.placement.tiers == Tier.PRIMARY) & ~lent
    assert np.min(found.placement.slots[lent]) > np.max(found.placement.slots[others])
