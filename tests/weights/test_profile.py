import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_jax.errors import BadFileError, UsageError
from strata_jax.weights.pack import open_pack
from strata_jax.weights.profile import (
    Profile,
    check_replaceable,
    learned,
    load_profile,
    merge,
    rank_counts,
    reorder,
    routed_model,
    write_atomically,
)
from strata_jax.weights.routing import RoutedModel
from tests.gguf_maker import make_model

MODEL = RoutedModel("abc", 3, 4)
ALL = tuple((layer, expert) for layer in range(3) for expert in range(4))


def _profile(*pairs: tuple[int, int], model: RoutedModel = MODEL) -> Profile:
    return Profile(model=model, ranked=pairs)


def _counts(**uses: int) -> np.ndarray:
    """_counts(e01=5): expert 1 of layer 0 was used five times."""
    counts = np.zeros((3, 4), np.int64)
    for name, count in uses.items():
        counts[int(name[1]), int(name[2])] = count
    return counts


def _refused(path: Path) -> str:
    with pytest.raises(BadFileError) as error:
        Profile.load(path)
    assert str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value)
    return str(error.value)


def test_loads_what_it_saved(tmp_path: Path):
    profile = _profile((2, 3), (0, 0), (1, 2))

    profile.save(tmp_path / "p.json")

    assert Profile.load(tmp_path / "p.json") == profile
    assert json.loads((tmp_path / "p.json").read_text()) == {
        "format": "strata-profile-1",
        "model": "abc",
        "layers": 3,
        "experts": 4,
        "ranked": [[2, 3], [0, 0], [1, 2]],
    }
    assert [file.name for file in tmp_path.iterdir()] == ["p.json"]


GOOD = (
    '{"format": "strata-profile-1", "model": "abc", "layers": 3, "experts": 4, "ranked": [[0, 1]]}'
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "is empty, a profile expected"),
        ("{", "cut off or no JSON"),
        (GOOD[:-1], "cut off or no JSON"),
        (GOOD + GOOD, "cut off or no JSON"),
        ("[]", "strata-profile-1"),
        ("[" * 100_000, "cut off or no JSON"),
        (GOOD.replace("profile-1", "profile-2"), "strata-profile-1"),
        (GOOD.replace('"abc"', "null"), '"model" is None'),
        (GOOD.replace("3", "true"), '"layers" is True'),
        (GOOD.replace("4", "-4"), '"experts" is -4'),
        (GOOD.replace("[[0, 1]]", "[]"), "no list of [layer, expert] pairs"),
        (GOOD.replace("[[0, 1]]", "{}"), "no list of [layer, expert] pairs"),
        (GOOD.replace('"ranked"', '"rank"'), "no list of [layer, expert] pairs"),
        (GOOD.replace("[0, 1]", "[0, 1], [0]"), '"ranked"[1] is [0], [layer, expert] below [3, 4]'),
        (GOOD.replace("[0, 1]", "[3, 1]"), '"ranked"[0] is [3, 1]'),
        (GOOD.replace("[0, 1]", "[0, 4]"), '"ranked"[0] is [0, 4]'),
        (GOOD.replace("[0, 1]", "[-1, 0]"), '"ranked"[0] is [-1, 0]'),
        (GOOD.replace("[0, 1]", "[0, 1.0]"), '"ranked"[0] is [0, 1.0]'),
        (GOOD.replace("[0, 1]", "[false, 1]"), '"ranked"[0] is [False, 1]'),
        (GOOD.replace("[0, 1]", '"01"'), '"ranked"[0] is 01'),
        (GOOD.replace("[0, 1]", "[0, 1], [0, 0], [0, 1]"), '"ranked"[2] is [0, 1] for the second'),
    ],
)
def test_refuses_what_is_no_profile(tmp_path: Path, text: str, expected: str):
    path = tmp_path / "p.json"
    path.write_text(text)

    assert expected in _refused(path)


def test_refuses_a_profile_cut_anywhere(tmp_path: Path):
    path = tmp_path / "p.json"
    for length in range(len(GOOD)):
        path.write_text(GOOD[:length])
        _refused(path)


def test_refuses_what_is_no_text_file(tmp_path: Path):
    (tmp_path / "binary").write_bytes(b"\xff\x00")
    with (tmp_path / "large").open("wb") as large:
        large.truncate(1 << 40)

    assert "is no text" in _refused(tmp_path / "binary")
    assert "too large" in _refused(tmp_path / "large")
    assert "is no file" in _refused(tmp_path)
    assert "No such file" in _refused(tmp_path / "none")


@pytest.mark.parametrize(
    "other", [RoutedModel("abd", 3, 4), RoutedModel("abc", 2, 4), RoutedModel("abc", 3, 5)]
)
def test_refuses_another_models(other: RoutedModel):
    with pytest.raises(
        BadFileError, match=r"p\.json: is a profile of another model \(3 layers, 4 ex"
    ):
        _profile((0, 1)).check_model(other, Path("p.json"))


def test_knows_its_model(tmp_path: Path):
    mine = make_model(tmp_path / "mine.gguf", sparse=True).path
    other = make_model(tmp_path / "other.gguf", types={"*_exps*": 8}, sparse=True).path
    path = tmp_path / "p.json"
    with open_pack(mine) as pack:
        model = routed_model(pack)
        profile = _profile((0, 1), model=model)
        profile.save(path)

        assert (model.layers, model.experts) == (pack.config.num_layers, pack.config.num_experts)
        assert load_profile(pack, path) == profile
        assert load_profile(pack, None) is None
    with open_pack(other) as pack, pytest.raises(BadFileError, match="of another model"):
        load_profile(pack, path)


def test_ranks_by_use_then_layer_then_expert():
    profile = rank_counts(MODEL, _counts(e23=5, e10=7, e01=5, e02=5))

    assert profile.ranked == ((1, 0), (0, 1), (0, 2), (2, 3))


def test_reorders_the_first_of_a_complete_ranking():
    profile = _profile(*reversed(ALL))

    ranked = reorder(profile, _counts(e00=3, e21=9, e11=1)).ranked

    assert ranked[:3] == ((2, 1), (0, 0), (1, 1))
    assert ranked[3:] == tuple(pair for pair in reversed(ALL) if pair not in ranked[:3])


def test_reorder_keeps_the_old_order_of_ties():
    profile = _profile((2, 2), (1, 1), (0, 0))

    ranked = reorder(profile, _counts(e00=1, e11=1, e22=1, e03=1)).ranked

    assert ranked == ((2, 2), (1, 1), (0, 0), (0, 3))


def test_reorder_without_use_changes_nothing():
    assert reorder(_profile(*ALL), _counts()) == _profile(*ALL)


@settings(max_examples=100, deadline=None)
@given(
    st.permutations(ALL).flatmap(lambda order: st.integers(0, 12).map(lambda n: order[:n])),
    st.lists(st.integers(0, 3), min_size=12, max_size=12),
)
def test_reorder_loses_and_doubles_nothing(order: list[tuple[int, int]], uses: list[int]):
    counts = np.asarray(uses).reshape(3, 4)

    ranked = reorder(_profile(*order), counts).ranked

    used = {pair for pair in ALL if counts[pair] > 0}
    assert len(set(ranked)) == len(ranked)
    assert set(ranked) == set(order) | used
    assert set(ranked[: len(used)]) == used
    assert [int(counts[pair]) for pair in ranked] == sorted(
        (int(counts[pair]) for pair in ranked), reverse=True
    )


def test_a_learned_ranking_begins_with_the_residents():
    resident = np.zeros((3, 4), bool)
    resident[[0, 1, 2], [3, 3, 0]] = True
    heat = _counts(e03=1, e20=8, e01=20).astype(np.float64)

    profile = learned(MODEL, resident, heat, prior=((2, 2), (0, 1)))

    assert profile.ranked == ((2, 0), (0, 3), (1, 3), (0, 1), (2, 2))


def test_merges_by_weighted_rank():
    first = _profile((0, 0), (0, 1), (0, 2))
    second = _profile((0, 2), (0, 1), (2, 3))

    assert merge([first, second], [1, 1]).ranked == ((0, 2), (0, 1), (0, 0), (2, 3))
    assert merge([first, second], [100, 1]).ranked == ((0, 0), (0, 1), (0, 2), (2, 3))
    assert merge([first, second], [1, 100]).ranked == ((0, 2), (0, 1), (2, 3), (0, 0))
    assert merge([first, second], [0, 1]).ranked == second.ranked
    assert merge([first], [0.5]).ranked == first.ranked


def test_merges_in_any_order_alike():
    profiles = [_profile(*ALL), _profile(*reversed(ALL))]

    assert merge(profiles, [1, 1]) == merge(profiles[::-1], [1, 1])


@pytest.mark.parametrize("weights", [[1], [1, 1, 1], [-1, 1], [float("nan"), 1], [float("inf"), 1]])
def test_refuses_weights_that_do_not_fit(weights: list[float]):
    with pytest.raises(UsageError, match="weights for 2 profiles"):
        merge([_profile((0, 0)), _profile((0, 1))], weights)


def test_does_not_merge_different_models():
    other = _profile((0, 1), model=RoutedModel("other", 3, 4))

    with pytest.raises(UsageError, match=r"different models \(3 layers, 4 experts, abc"):
        merge([_profile((0, 0)), other], [1, 1])


SAVE = """
import sys
from pathlib import Path
from strata_jax.weights.profile import Profile
from strata_jax.weights.routing import RoutedModel
path, tag = Path(sys.argv[1]), 0
pairs = tuple((layer, expert) for layer in range(48) for expert in range(512))
print("ready", flush=True)
while True:
    tag += 1
    Profile(model=RoutedModel(f"run {tag}", 48, 512), ranked=pairs).save(path)
"""


def test_a_kill_at_any_moment_leaves_a_whole_file(tmp_path: Path):
    path = tmp_path / "p.json"
    _profile((0, 1)).save(path)
    randomness = random.Random(0)
    tags = set()
    for _ in range(6):
        with subprocess.Popen(
            [sys.executable, "-c", SAVE, str(path)], stdout=subprocess.PIPE
        ) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(randomness.uniform(0, 0.2))
            process.kill()
        tags.add(Profile.load(path).model.hash)

    assert tags - {"abc"}, "no kill came after a save"


def test_a_failed_save_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "p.json"
    _profile((0, 1)).save(path)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        _profile((0, 2)).save(path)

    assert Profile.load(path).ranked == ((0, 1),)
    assert [file.name for file in tmp_path.iterdir()] == ["p.json"]


def test_a_ranking_of_nothing_replaces_nothing(tmp_path: Path):
    """Report 59: it would be refused when it is read, and what was learned before would be lost."""
    path = tmp_path / "p.json"
    _profile().save(path)
    assert not path.exists()
    _profile((0, 1)).save(path)

    _profile().save(path)

    assert Profile.load(path) == _profile((0, 1))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (GOOD, "is a profile of another model"),
        (GOOD[:-1], "cut off or no JSON"),
        ("Dear diary", "cut off or no JSON"),
    ],
)
def test_does_not_write_over_what_is_no_profile_of_the_model(
    tmp_path: Path, content: str, expected: str
):
    """Report 59: what another model has learned, or something else, is not to be lost."""
    path = tmp_path / "p.json"
    path.write_text(content)

    with (
        open_pack(make_model(tmp_path / "m.gguf", sparse=True).path) as pack,
        pytest.raises(
            UsageError, match=r"--expert_profile_save=.*p\.json: would be written over"
        ) as error,
    ):
        check_replaceable(pack, path)

    assert expected in str(error.value)
    assert "\n" not in str(error.value)


def test_writes_over_what_the_model_has_learned_and_empty_files(tmp_path: Path):
    path = tmp_path / "p.json"
    with open_pack(make_model(tmp_path / "m.gguf", sparse=True).path) as pack:
        check_replaceable(pack, path)
        path.touch()
        check_replaceable(pack, path)
        _profile((0, 1), model=routed_model(pack)).save(path)
        check_replaceable(pack, path)


def test_saves_through_a_link(tmp_path: Path):
    (tmp_path / "folder").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "folder" / "real")

    write_atomically(link, "text")

    assert link.is_symlink()
    assert (tmp_path / "folder" / "real").read_text() == "text"


def test_ranks_the_released_model_in_time(tmp_path: Path):
    model = RoutedModel("abc", 48, 512)
    counts = np.random.default_rng(0).integers(0, 1000, (48, 512))
    begin = time.perf_counter()

    profile = rank_counts(model, counts)
    profile.save(tmp_path / "p.json")
    loaded = Profile.load(tmp_path / "p.json")
    again = merge([loaded, profile], [1, 1])

    assert time.perf_counter() - begin < 2
    assert again == loaded == profile
    assert (tmp_path / "p.json").stat().st_size < 300_000
