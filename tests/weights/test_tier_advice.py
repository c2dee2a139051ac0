"""What is advised where a plan does not fit: who follows it gets a plan that fits."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from strata_jax.config import TierSettings
from strata_jax.errors import UsageError
from strata_jax.weights.budget import MIB, HostMemory
from strata_jax.weights.pack import Pack, open_pack
from strata_jax.weights.plan import make_plan
from strata_jax.weights.tier_needs import Need, TierPlan
from strata_jax.weights.tier_plan import Machine, plan_tiers
from tests.gguf_maker import BLOCKY, make_model
from tests.weights.tier_plans import ALL, make_pack_file

MODEL_MIB = 25
"""Of the file; memories are drawn around it."""


STREAMED = {"*_exps*": 21, "*ffn_gate_shexp*": 8, "*ffn_up_shexp*": 8, "*ffn_down_shexp*": 8}
"""Types of experts that a GPU's prompts may stream through a ring."""


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Pack, Pack]]:
    """A model whose experts are not streamed, and one whose are."""
    folder = tmp_path_factory.mktemp("model")
    streamed = make_model(folder / "s.gguf", BLOCKY, types=STREAMED, sparse=True).path
    with open_pack(make_pack_file(folder)) as plain, open_pack(streamed) as pack:
        yield plain, pack


def _planned(pack: Pack, machine: Machine, flags: dict[str, float | str]) -> TierPlan:
    rest = dict(flags)
    context = rest.pop("max_context", None)
    sizes = make_plan(pack, None if context is None else int(context))
    return plan_tiers(pack, sizes, TierSettings(**rest), machine)  # type: ignore[arg-type]


def _followed(flags: dict[str, float | str], advice: str) -> dict[str, float | str]:
    """The flags after an advice such as `--max_context=512 with --expert_cache=0`."""
    changed = dict(flags)
    for name, value in re.findall(r"--(\w+)=(\S+)", advice):
        is_number = re.fullmatch(r"-?[\d.]+", value)
        changed[name] = value if not is_number else float(value) if "." in value else int(value)
    return changed


def _problems(tiers: TierPlan) -> list[Need]:
    return [need for need in tiers.needs if not need.fits]


def _maybe(strategy: st.SearchStrategy) -> st.SearchStrategy:
    return st.none() | strategy


MIBS = st.integers(1, 3 * MODEL_MIB)
GIBS = st.integers(0, 2 * MODEL_MIB).map(lambda mib: mib / 1024)
FLAGS = st.fixed_dictionaries(
    {
        "expert_cache": _maybe(st.integers(0, ALL)),
        "peer_device": _maybe(st.sampled_from([1, 1, "loopback"])),
        "prefill_ring": _maybe(st.integers(0, 40)),
        "peer_stream": _maybe(st.sampled_from([0.0, 0.35, 1.0])),
        "peer_attention": _maybe(st.sampled_from([0.0, 0.25, 0.5])),
        "adapt_swaps": _maybe(st.sampled_from([0, 5])),
        "peer_adapt_swaps": _maybe(st.sampled_from([0, 5])),
        "device_memory_mib": _maybe(MIBS),
        "peer_memory_mib": _maybe(MIBS),
        "peer_slots": _maybe(st.integers(1, ALL)),
        "vram_reserve_mib": _maybe(MIBS),
        "peer_reserve_mib": _maybe(MIBS),
        "ple_io": _maybe(st.just("ram")),
        "host_ram_limit_gib": _maybe(GIBS),
        "resident_budget_gib": _maybe(GIBS),
        "max_context": _maybe(st.integers(8, 20).map(lambda power: 2**power)),
    }
).map(lambda flags: {name: value for name, value in flags.items() if value is not None})
HOSTS = st.builds(
    lambda total, free: HostMemory(
        total_bytes=total * MIB, available_bytes=total * MIB * free // 4, lockable_bytes=None
    ),
    total=st.integers(MODEL_MIB // 2, 8 * MODEL_MIB),
    free=st.integers(1, 4),
)
MACHINES = st.one_of(
    st.builds(Machine, platform=st.just("cpu"), host=HOSTS),
    st.builds(
        Machine,
        platform=st.just("cuda"),
        host=HOSTS,
        primary_free_bytes=MIBS.map(lambda mib: mib * MIB),
        peer_free_bytes=MIBS.map(lambda mib: mib * MIB),
        peer_is_reached=st.booleans(),
        num_devices=st.just(2),
    ),
)


def _gpu(total_mib: int, free_mib: int, primary_mib: int, peer_mib: int = 1) -> Machine:
    return Machine(
        platform="cuda",
        host=HostMemory(
            total_bytes=total_mib * MIB, available_bytes=free_mib * MIB, lockable_bytes=None
        ),
        primary_free_bytes=primary_mib * MIB,
        peer_free_bytes=peer_mib * MIB,
        num_devices=2,
    )


def _example(machine: Machine, streams: bool = False, **flags: float | str) -> Any:
    return example(machine=machine, flags=flags, choice=0, streams=streams)


# Room for swaps and pieces of the file that fill a GPU's RAM.
@_example(_gpu(12, 3, 70), max_context=256, vram_reserve_mib=37)
# A context so short that there seems to be room for swaps, where a reserve takes it all.
@_example(_gpu(12, 3, 71), max_context=2048, vram_reserve_mib=54)
# An emulated peer without experts, which would take those that the primary gives up.
@_example(
    Machine(
        platform="cpu",
        host=HostMemory(total_bytes=23 * MIB, available_bytes=6 * MIB, lockable_bytes=None),
    ),
    peer_device=1,
    device_memory_mib=27,
    ple_io="ram",
    peer_memory_mib=2,
)
# What a peer on the primary's own device has is what the primary leaves.
@_example(_gpu(12, 3, 18, peer_mib=2), True, peer_device="loopback", max_context=2048)
@_example(_gpu(12, 3, 15), True, peer_device="loopback", peer_memory_mib=6, peer_reserve_mib=1)
# A ring that nobody asked for, and rings that were asked for and want more slots or memory then.
@_example(_gpu(12, 3, 17), True, device_memory_mib=1)
@_example(_gpu(12, 3, 15), True, prefill_ring=6)
@_example(_gpu(12, 3, 15), True, peer_device=1, prefill_ring=4, device_memory_mib=1)
@_example(_gpu(12, 3, 15), True, peer_device=1, prefill_ring=1, device_memory_mib=1)
@settings(max_examples=200, deadline=None)
@given(machine=MACHINES, flags=FLAGS, choice=st.integers(0, 5), streams=st.booleans())
def test_who_follows_the_advice_comes_to_a_plan_that_fits(
    packs: tuple[Pack, Pack],
    machine: Machine,
    flags: dict[str, float | str],
    choice: int,
    streams: bool,
):
    """Report 27 (and 31, 43): the flag that is named, with its value, is enough."""
    pack = packs[streams]
    try:
        tiers = _planned(pack, machine, flags)
    except UsageError:
        return  # refused before anything is planned
    for _ in range(6):
        problems = _problems(tiers)
        if not problems:
            return
        advice = problems[0].advice
        if not advice:
            break
        name = problems[0].name
        flags = _followed(flags, advice[choice % len(advice)])
        tiers = _planned(pack, machine, flags)  # no UsageError: advice contradicts nothing
        assert name not in [need.name for need in _problems(tiers)], (advice, flags)

    assert _problems(tiers)[0].advice == (), "advice went round in circles"
    least = {"expert_cache": 0, "max_context": 256, "ple_io": "direct", "vram_reserve_mib": 0}
    assert _problems(_planned(pack, machine, least)), "nothing was advised where something fits"
