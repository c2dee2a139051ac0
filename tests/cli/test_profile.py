import json
from pathlib import Path

import pytest

from strata_jax.cli.files import EMBEDDED
from strata_jax.weights.pack import open_pack
from strata_jax.weights.profile import Profile, routed_model
from strata_jax.weights.routing import RoutedModel, RoutingWriter
from tests.cli.fake_engine import Outcome, run

MODEL = RoutedModel("abc", 3, 4)
ALL = tuple((layer, expert) for layer in range(3) for expert in range(4))
EMBEDDED_MODEL = Path(__file__).resolve().parent.parent.parent.joinpath("strata_jax", *EMBEDDED)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two runs' records and two rankings of one model, and a ranking of another."""
    with RoutingWriter(tmp_path / "r1", MODEL) as writer:
        writer.add(0, [[1, 2], [1, 3]])
        writer.add(2, [[0, 3]])
    with RoutingWriter(tmp_path / "r2", MODEL) as writer:
        writer.add(2, [[3, 1], [3, 0]])
    Profile(model=MODEL, ranked=ALL).save(tmp_path / "all")
    Profile(model=MODEL, ranked=((2, 2), (1, 1))).save(tmp_path / "two")
    Profile(model=RoutedModel("other", 3, 4), ranked=((2, 2),)).save(tmp_path / "other")
    return tmp_path


def _run(folder: Path, *args: str) -> Outcome:
    """Runs with `@` for the folder."""
    return run("profile", *(arg.replace("@", f"{folder}/") for arg in args))


def _ranked(folder: Path) -> tuple[tuple[int, int], ...]:
    return Profile.load(folder / "out").ranked


def test_makes_a_ranking_of_records(folder: Path):
    outcome = _run(folder, "--action=make", "--routing=@r1", "--routing=@r2", "--out=@out")

    assert (outcome.code, outcome.err) == (0, f"note: wrote {folder}/out: 6 experts ranked\n")
    assert _ranked(folder) == ((2, 3), (0, 1), (2, 0), (0, 2), (0, 3), (2, 1))
    assert "ranked   6 of 12 experts (3 layers, 4 experts each)" in outcome.out
    assert "hottest  2:3 0:1 2:0" in outcome.out


def test_reorders_a_complete_ranking(folder: Path):
    assert (
        _run(folder, "--action=reorder", "--profile=@all", "--routing=@r2", "--out=@out").code == 0
    )

    ranked = _ranked(folder)
    assert ranked[:3] == ((2, 3), (2, 0), (2, 1))
    assert ranked[3:] == tuple(pair for pair in ALL if pair not in ranked[:3])


def test_replaces_the_ranking_it_read(folder: Path):
    outcome = _run(folder, "--action=reorder", "--profile=@two", "--routing=@r2", "--out=@two")

    assert outcome.code == 0
    assert Profile.load(folder / "two").ranked == ((2, 3), (2, 0), (2, 1), (2, 2), (1, 1))


def test_merges_rankings(folder: Path):
    args = ("--action=merge", "--profile=@all", "--profile=@two", "--out=@out")

    assert _run(folder, *args).code == 0
    even = _ranked(folder)
    assert _run(folder, *args, "--weights=1,100").code == 0
    heavy = _ranked(folder)

    assert even[:3] == ((2, 2), (1, 1), (0, 0))
    assert heavy[:3] == ((2, 2), (1, 1), (0, 0))
    assert len(even) == len(heavy) == 12
    assert _run(folder, *args, "--weights=1,0").code == 0
    assert _ranked(folder) == ALL


def test_shows_a_ranking(folder: Path):
    outcome = _run(folder, "--profile=@two")

    assert (outcome.code, outcome.err) == (0, "")
    lines = outcome.out.splitlines()
    assert lines[0] == "model    abc"
    assert "hottest  2:2 1:1 (layer:expert)" in lines
    assert lines[-1].split() == ["2", "1", "1"]


def test_prints_one_object(folder: Path):
    outcome = _run(folder, "--profile=@two", "--json")

    assert json.loads(outcome.out) == {
        "model": "abc",
        "layers": 3,
        "experts": 4,
        "num_ranked": 2,
        "by_layer": [0, 1, 1],
        "first_half_by_layer": [0, 0, 1],
        "ranked": [[2, 2], [1, 1]],
    }


def test_says_when_a_record_is_cut_off(folder: Path):
    text = (folder / "r1").read_text()
    (folder / "r1").write_text(text[:-5])

    outcome = _run(folder, "--action=make", "--routing=@r1", "--out=@out")

    assert outcome.code == 0
    assert "r1: the last line is cut off and left out" in outcome.err
    assert _ranked(folder) == ((0, 1), (0, 2), (0, 3))


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ((), "--action=show with 0 --profile, one expected"),
        (("--profile=@all", "--profile=@two"), "--action=show with 2 --profile, one expected"),
        (("--profile=@all", "--routing=@r1"), "--action=show with --routing, --profile only"),
        (("--profile=@all", "--out=@out"), "--action=show with --out"),
        (("--profile=@all", "--weights=1"), "--action=show with --weights"),
        (("--action=make", "--out=@out"), "--action=make with no --routing"),
        (("--action=make", "--routing=@r1"), "--action=make with no --out"),
        (("--action=make", "--routing=@r1", "--profile=@all", "--out=@out"), "reorder takes both"),
        (("--action=make", "--routing=@r1", "--out=/none/x"), "--out=/none/x: a file in an exist"),
        (("--action=make", "--routing=@r1", "--out=@"), "a file in an existing folder expected"),
        (("--action=merge", "--profile=@all", "--out=@out"), "1 --profile, two or more expected"),
        (("--action=merge", "--profile=@all", "--profile=@two"), "no --out"),
        (
            ("--action=merge", "--profile=@all", "--profile=@two", "--out=@out", "--weights=1"),
            "1 weights for 2 profiles",
        ),
        (
            ("--action=merge", "--profile=@all", "--profile=@two", "--out=@out", "--weights=a,b"),
            "--weights=a,b: numbers with commas expected",
        ),
        (
            ("--action=merge", "--profile=@all", "--profile=@two", "--out=@out", "--weights=0,0"),
            "--weights of 0 only",
        ),
        (("--action=reorder", "--profile=@all", "--out=@out"), "no --routing"),
        (("--action=reorder", "--routing=@r1", "--out=@out"), "0 --profile, one expected"),
        (("--action=train",), "show|make|merge|reorder"),
    ],
)
def test_refuses_flags_that_do_not_go_together(folder: Path, args: tuple[str, ...], expected: str):
    outcome = _run(folder, *args)

    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.count("\n") == 1
    assert expected in outcome.err
    assert not (folder / "out").exists()


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (("--profile=@none",), "none: cannot be read: No such file"),
        (("--profile=@r1",), "profile"),
        (("--action=make", "--routing=@all", "--out=@out"), "strata-routing-1"),
        (("--action=make", "--routing=@empty", "--out=@out"), "empty: is empty"),
        (("--action=make", "--routing=@rows", "--out=@out"), "rows: holds no rows"),
        (
            ("--action=merge", "--profile=@all", "--profile=@other", "--out=@out"),
            "other: is about another model (3 layers, 4 experts, other), that of",
        ),
        (
            ("--action=reorder", "--profile=@other", "--routing=@r1", "--out=@out"),
            "r1: is about another model",
        ),
        (("--profile=@all", f"--model={EMBEDDED_MODEL}"), "all: is about another model"),
        (("--profile=@all", "--model=/none"), "/none: cannot be opened"),
    ],
)
def test_refuses_bad_files(folder: Path, args: tuple[str, ...], expected: str):
    (folder / "empty").touch()
    RoutingWriter(folder / "rows", MODEL).close()

    outcome = _run(folder, *args)

    assert (outcome.code, outcome.out) == (4, "")
    assert outcome.err.count("\n") == 1
    assert expected in outcome.err
    assert not (folder / "out").exists()


def test_takes_the_ranking_of_the_model_given(tmp_path: Path):
    with open_pack(EMBEDDED_MODEL) as pack:
        Profile(model=routed_model(pack), ranked=((0, 1),)).save(tmp_path / "mine")

    assert _run(tmp_path, "--profile=@mine", f"--model={EMBEDDED_MODEL}").code == 0


def test_the_ranking_comes_out_although_it_cannot_be_written(folder: Path):
    outcome = _run(folder, "--action=make", "--routing=@r1", "--out=/dev/full", "--json")

    assert outcome.code == 1
    assert json.loads(outcome.out)["num_ranked"] > 0
    assert "No space left" in outcome.err
