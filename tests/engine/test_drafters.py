import pathlib

import pytest

from strata_jax.config import DraftSettings
from strata_jax.engine import drafters
from strata_jax.engine.drafters import Drafters
from strata_jax.engine.engine import Engine, EngineOptions
from strata_jax.engine.request import SamplingSettings
from strata_jax.engine.scripted_drafter import DraftScript
from strata_jax.errors import BadFileError, UsageError
from strata_jax.weights.pack import open_pack
from tests.gguf_maker import TINY, make_model

SHARED = pathlib.Path(__file__).parents[3] / "shared"
DRAWN = SamplingSettings(temperature=1.0, top_p=0.9, seed=3)


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    """A small model with a draft layer."""
    with open_pack(make_model(tmp_path_factory.mktemp("drafts") / "tiny.gguf", TINY).path) as found:
        yield found


@pytest.fixture(scope="module")
def plain(embedded_pack):
    engine = Engine.open(embedded_pack, EngineOptions(max_context=512))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def drafting(embedded_pack):
    """Drafts whether it pays or not: what pays is a matter of the clock."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("strata_jax.engine.drafters.DraftLength", lambda most, ahead: None)
        engine = Engine.open(embedded_pack, EngineOptions(max_context=512, mtp=DraftSettings()))
    yield engine
    engine.close()


def prompt(length):
    return [(37 * n + 11) % 4000 for n in range(length)]


@pytest.mark.parametrize("settings", [SamplingSettings(temperature=0.0), DRAWN])
@pytest.mark.parametrize("length", [1, 3, 64, 130])
def test_answers_are_those_without_a_draft_layer(plain, drafting, request_of, length, settings):
    request = request_of(prompt(length), max_tokens=40, settings=settings)

    generation = drafting.start(request)

    assert list(generation) == list(plain.start(request))
    assert plain.start(request).drafts is None
    assert generation.drafts is not None


@pytest.mark.parametrize("length", [64, 65])
def test_a_prompt_without_an_answer_leaves_nothing_behind(drafting, plain, request_of, length):
    assert list(drafting.start(request_of(prompt(length), max_tokens=0))) == []

    after = drafting.start(request_of(prompt(5), max_tokens=6))

    assert list(after) == list(plain.start(request_of(prompt(5), max_tokens=6)))


def test_drafts_come_true(drafting, request_of, embedded_pack):
    # The model's own words, after which its draft layer knows how it goes on.
    request = request_of(prompt(3), max_tokens=200)
    accepted = drafted = 0

    for _ in range(3):
        generation = drafting.start(request)
        list(generation)
        accepted += generation.drafts["accepted"]
        drafted += generation.drafts["drafted"]

    assert drafted > 0
    assert accepted / drafted > 0.5


def test_the_same_answer_again_and_again_with_stops_in_between(drafting, request_of):
    request = request_of(prompt(70), max_tokens=24)
    expected = list(drafting.start(request))

    for turn in range(12):
        other = drafting.start(request_of(prompt(5 + 9 * turn), max_tokens=30))
        for _ in range(turn):
            next(other)
        other.cancel()
        assert list(drafting.start(request)) == expected


def test_the_layer_has_room_in_the_plan(plain, drafting):
    def host(engine):
        return next(need for need in engine.plan.needs if need.name == "host").parts

    assert "draft" not in host(plain)
    assert host(drafting)["draft"] > 0
    assert host(drafting)["draft cache"] > 0


def test_a_note_says_that_there_are_drafts(plain, drafting):
    assert any("the draft layer guesses up to 3 ids" in note for note in drafting.notes)
    assert not any("draft layer" in note for note in plain.notes)


@pytest.mark.parametrize("options", [{"spec": 1}, {"window_rows": 1}, {"mtp": None}])
def test_there_are_none_where_windows_have_no_room_or_nobody_wants_any(pack, options):
    chosen = EngineOptions(
        **{"max_context": 128, "mtp": DraftSettings(mtp_window=128), "suffix_draft": 2, **options}
    )

    engine = Engine.open(pack, chosen)

    assert not any("draft layer" in note for note in engine.notes)
    idle = "--suffix_draft, --mtp_window: no effect, a window of one live row"
    assert any(idle in note for note in engine.notes) == (chosen.mtp is not None)
    engine.close()


@pytest.mark.parametrize(
    ("options", "follows"),
    [({}, True), ({"all_logits": True}, False), ({"suffix_draft": 1}, False), ({"spec": 1}, False)],
)
def test_the_layer_works_by_itself_where_the_host_waits_for_no_window(pack, options, follows):
    """It is compiled for one way or the other: asked on the wrong one it has nothing to run."""
    chosen = EngineOptions(mtp=DraftSettings(), platform="cuda", **options)

    assert Drafters.plan(pack, chosen, 128).follow is follows


def test_settings_of_a_layer_that_is_not_there_are_named(tiny_pack):
    options = EngineOptions(max_context=128, mtp=DraftSettings(mtp_window=128))

    engine = Engine.open(tiny_pack, options)

    assert any("--mtp_window: no effect, the model has no draft" in note for note in engine.notes)
    engine.close()


def test_a_file_that_is_no_draft_layer_is_refused_before_anything_is_loaded(pack, tmp_path):
    options = EngineOptions(max_context=128, mtp=DraftSettings(mtp=tmp_path / "none.gguf"))

    with pytest.raises(BadFileError, match=r"none\.gguf"):
        Engine.open(pack, options)


def test_a_script_that_cannot_be_read_is_refused_before_anything_is_loaded(pack, tmp_path):
    script = DraftScript(path=tmp_path / "none", percent=50)

    with pytest.raises(UsageError, match=r"draft_script: .*none: "):
        Drafters.plan(pack, EngineOptions(draft_script=script), 128)


@pytest.mark.parametrize(("spec", "lines"), [(None, 0), (8, 0), (9, 1)])
def test_says_that_drafts_end_before_wide_windows_do(spec, lines):
    notes = drafters._width_notes(EngineOptions(spec=spec, window_rows=16, suffix_draft=2))

    assert len(notes) == lines


def test_a_layer_in_a_file_of_its_own_drafts_the_same(request_of):
    models = SHARED / "models/micro"
    if not models.exists():
        pytest.skip(f"LOUD SKIP: {models} is not there: no file of a draft layer alone was tried")
    found = []

    with open_pack(models / "model-f32.gguf") as pack:
        for path in (None, models / "mtp-only-f32.gguf"):
            options = EngineOptions(max_context=256, mtp=DraftSettings(mtp=path), kv="f32")
            engine = Engine.open(pack, options)
            generation = engine.start(request_of([n % 1000 for n in prompt(70)], max_tokens=30))
            found.append(list(generation))
            engine.close()

    assert found[0] == found[1]
