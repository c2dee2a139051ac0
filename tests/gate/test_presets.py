import dataclasses

import pytest

from strata_jax.errors import UsageError
from strata_jax.gate.comparison import PROMISES, differing_flags
from strata_jax.gate.presets import ALL, PRESETS, comparisons
from tests.gate.gates import FACTS


def _flags(name: str, index: int = 0) -> list[dict[str, str]]:
    return [dict(side.flags) for side in comparisons(name, FACTS)[0][index].sides]


def test_all_stands_for_every_preset():
    names = [comparison.name for comparison in comparisons(ALL, FACTS)[0]]

    parts = ["static", "adapting", "drafts"]
    assert names[:3] == [f"single-vs-peer, {part}" for part in parts]
    assert names[-1] == "drafts, ids alone"
    assert names[3:-1] == [name for name in PRESETS if name != "single-vs-peer"]


@pytest.mark.parametrize("name", PRESETS)
def test_sides_differ_in_nothing_else(name: str):
    for comparison in comparisons(name, FACTS)[0]:
        assert differing_flags([side.flags for side in comparison.sides]) <= comparison.varied
        assert comparison.contract in PROMISES
        assert all(side.claims for side in comparison.sides)


@pytest.mark.parametrize("index", [0, 1])
def test_as_many_experts_are_split_over_two_cards(index: int):
    one, two = _flags("single-vs-peer", index)

    assert int(one["expert_cache"]) == int(two["expert_cache"]) + int(two["peer_slots"])
    assert int(two["peer_slots"]) > 0


@pytest.mark.parametrize("peer", ["loopback", "1"])
def test_the_peer_is_where_the_caller_says(peer: str):
    chosen, _ = comparisons("hectic", FACTS, peer)

    peers = [side.flags.get("peer_device") for side in chosen[0].sides]
    assert peers == [None, None, peer, peer]


def test_hectic_is_three_slots_a_layer_and_a_round_after_every_window():
    _, one, *_ = _flags("hectic")

    assert one == {"expert_cache": "24", "adapt_every": "1", "adapt_swaps": "8"}


@pytest.mark.parametrize(("experts", "slots"), [(2, 1), (3, 1), (4, 2), (5, 3), (512, 3)])
def test_a_small_model_keeps_two_experts_of_a_layer_out(experts: int, slots: int):
    facts = dataclasses.replace(FACTS, layers=4, experts=experts)

    one = comparisons("hectic", facts)[0][0].sides[1]

    assert one.flags["expert_cache"] == str(4 * slots)


def test_residency_goes_from_none_to_all():
    assert [flags["expert_cache"] for flags in _flags("residency")] == [
        "0",
        "32",
        "64",
        "128",
        "32",
    ]


def test_shares_modes_threads_and_rows_are_complete():
    assert [flags["pcie_frac"] for flags in _flags("pcie")] == ["0", "0.5", "1"]
    assert [flags["ple_io"] for flags in _flags("ple-io")] == ["direct", "mmap", "ram"]
    assert [flags["threads"] for flags in _flags("threads")] == ["1", "2", "3"]
    assert [flags["spec"] for flags in _flags("windows")] == list("12345678")
    assert {flags["window_rows"] for flags in _flags("windows")} == {"8"}


def test_a_peers_part_in_prompts_is_a_gpus():
    shares = [flags.get("peer_stream") for flags in _flags("peer-prompts")]
    assert shares == [None, "0", "0.35", "1"]
    with pytest.raises(UsageError, match="--platform=cuda"):
        comparisons("peer-prompts", FACTS, on_gpu=False)
    chosen, notes = comparisons(ALL, FACTS, on_gpu=False)
    assert not {"peer-prompts", "peer-attention"} & {comparison.name for comparison in chosen}
    assert notes[0].startswith("left out: gate: --preset=peer-prompts")


def test_a_peers_attention_wants_a_tile_full_of_queries():
    shares = [flags.get("peer_attention") for flags in _flags("peer-attention")]
    assert shares == [None, "0", "0.25", "0.5"]
    with pytest.raises(UsageError, match="fill no tile of 2048 rows"):
        comparisons("peer-attention", dataclasses.replace(FACTS, index_budget=256))


def test_processes_are_the_same_command():
    first, second, compiled_anew = _flags("processes")

    assert first == second
    assert compiled_anew == first | {"compile_cache": "off"}


def test_a_model_without_a_table_has_no_gate_for_it():
    facts = dataclasses.replace(FACTS, has_ngram_table=False)

    with pytest.raises(UsageError, match="has no n-gram table"):
        comparisons("ple-io", facts)
    chosen, notes = comparisons(ALL, facts)
    assert "ple-io" not in [comparison.name for comparison in chosen]
    assert len(notes) == 1
