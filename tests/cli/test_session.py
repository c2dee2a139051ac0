import os
from pathlib import Path

import pytest

from strata_jax.cli import session
from strata_jax.cli.files import EMBEDDED, embedded_model
from strata_jax.weights.pack import open_pack
from strata_jax.weights.profile import Profile, routed_model
from tests.cli.fake_engine import Opener, run


def _options(*args: str):
    opener = Opener("Hello.")
    outcome = run("generate", "--prompt=Hi", *args, opener=opener)
    return outcome, opener.engine.options if opener.engine else None


def test_hands_the_flags_down():
    _, options = _options(
        *("--max_context=99", "--threads=3", "--window_rows=4", "--compile_cache=off"),
        "--kv=int8",
    )

    assert options is not None
    assert (options.max_context, options.threads, options.window_rows) == (99, 3, 4)
    assert (options.cache_dir, options.all_logits) == (None, False)
    assert options.kv == "int8"


def test_keeps_programs_where_the_user_says(tmp_path: Path):
    _, options = _options(f"--compile_cache={tmp_path}/a/b")

    assert options is not None
    assert options.cache_dir == tmp_path / "a/b"
    assert (tmp_path / "a/b").is_dir()


def test_keeps_programs_in_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    _, options = _options()

    assert options is not None
    assert options.cache_dir == tmp_path / "strata_jax"


def test_does_without_a_default_cache_that_cannot_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))

    outcome, options = _options()

    assert options is not None
    assert options.cache_dir is None
    assert "compiled programs are not kept" in outcome.err


def test_refuses_a_cache_asked_for_that_cannot_be_used(tmp_path: Path):
    (tmp_path / "file").touch()

    outcome, _ = _options(f"--compile_cache={tmp_path}/file/x")

    assert outcome.code == 2
    assert "a folder to write to expected, or off" in outcome.err


def test_programs_are_not_kept_where_jax_cannot_name_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))

    outcome, options = _options()
    refused, _ = _options(f"--compile_cache={folder}")

    assert options is not None
    assert options.cache_dir is None
    assert "its name is not UTF-8" in outcome.err
    assert refused.code == 2
    assert "its name is not UTF-8, which JAX expects, a folder" in refused.err


@pytest.mark.parametrize("begin", [(), ("--expert_profile={path}",)])
def test_says_that_a_profile_is_replaced_unless_the_run_begins_with_it(
    tmp_path: Path, begin: tuple[str, ...]
):
    path = tmp_path / "p.json"
    with open_pack(embedded_model()) as pack:
        Profile(model=routed_model(pack), ranked=((7, 15),)).save(path)

    outcome, options = _options(
        f"--expert_profile_save={path}", *(arg.format(path=path) for arg in begin)
    )

    assert (outcome.code, options is None) == (0, False)
    assert ("takes the place of what is there" in outcome.err) == (not begin)


def test_refuses_to_save_a_profile_over_something_else_before_loading(tmp_path: Path):
    path = tmp_path / "notes.txt"
    path.write_text("Dear diary")

    outcome, options = _options(f"--expert_profile_save={path}")

    assert (outcome.code, options) == (2, None)
    assert "would be written over, but" in outcome.err
    assert path.read_text() == "Dear diary"


def test_tells_the_notes_of_the_engine_and_closes_it():
    opener = Opener("Hello.")

    outcome = run("generate", "--prompt=Hi", opener=opener)

    assert "note: a note of the engine\n" in outcome.err
    assert opener.engine is not None
    assert opener.engine.closed


@pytest.mark.parametrize(
    ("args", "variables", "expected"),
    [
        (("--deterministic",), {}, "note: --deterministic: always on here\n"),
        ((), {"STRATA_MMQ_NO_STREAMK": "1"}, "note: STRATA_MMQ_NO_STREAMK: always on here"),
        ((), {"JAX_PLATFORMS": "cuda"}, "note: JAX_PLATFORMS=cuda has no effect"),
    ],
)
def test_answers_settings_that_decide_nothing(
    args: tuple[str, ...],
    variables: dict[str, str],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    outcome, _ = _options(*args)

    assert outcome.code == 0
    assert expected in outcome.err


def test_says_once_that_there_is_no_device():
    assert _options()[0].err.count("no NVIDIA device here") == 1
    assert "NVIDIA" not in _options("--platform=cpu")[0].err


def test_refuses_cuda_before_the_model_is_opened():
    outcome, options = _options("--platform=cuda", "--model=/none")

    assert outcome.code == 1
    assert "--platform=cpu" in outcome.err
    assert options is None


def test_names_what_decides_the_bits():
    assert list(session.versions()) == ["strata_jax", "jax", "jaxlib", "numpy", "python"]


def test_the_embedded_model_is_in_the_package():
    outcome = run("plan", "--json")

    assert outcome.code == 0
    assert "/".join(EMBEDDED) in outcome.out
