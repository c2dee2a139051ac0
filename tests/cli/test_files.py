import os
from pathlib import Path

import pytest

from strata_jax.cli.files import output_path, user_path
from strata_jax.errors import UsageError
from tests.cli.fake_engine import run


def test_a_tilde_is_the_home_folder(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", "/home/somebody")

    assert user_path("model", "~/m.gguf") == Path("/home/somebody/m.gguf")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "--mtp=: is empty"),
        ("a\0b", "has a zero byte"),
        ("~nobody-of-this-name/x", "the home folder of nobody"),
        ("x" * 5000, f"--mtp={'x' * 60}...: has 5000 characters"),
    ],
)
def test_refuses_what_is_no_path(text: str, problem: str):
    with pytest.raises(UsageError, match=problem):
        user_path("mtp", text)


def test_writes_to_files_in_folders_that_are_there(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")  # whoever writes would wait for a reader

    assert output_path("out", None) is None
    assert output_path("out", str(tmp_path / "new")) == tmp_path / "new"
    for name in (".", "pipe", "none/new"):
        with pytest.raises(UsageError, match=r"--out=.*: a file in an existing folder expected"):
            output_path("out", str(tmp_path / name))


FLAGS = (
    *("--model", "--prompt_file", "--prompt_ids", "--mtp", "--draft_vocab", "--logits_out"),
    *("--routing_out", "--expert_profile", "--expert_profile_save", "--compile_cache"),
)


@pytest.mark.parametrize("flag", FLAGS)
def test_every_flag_refuses_a_home_of_nobody(flag: str):
    prompt = () if flag.startswith("--prompt") else ("--prompt=Hi",)

    outcome = run("generate", f"{flag}=~nobody-of-this-name/x.json", *prompt)

    assert outcome.code == 2
    assert f"{flag}=~nobody" in outcome.err


def test_a_models_file_is_not_written_over(tmp_path: Path):
    """Whether the command reads it or not: a part of several, too."""
    path = tmp_path / "m-00002-of-00002.gguf"
    path.write_bytes(b"GGUF and more")

    with pytest.raises(UsageError, match="is a GGUF file, which would be lost"):
        output_path("out", str(path))


@pytest.mark.parametrize(
    "line",
    [
        "generate --prompt_file={a} --logits_out={b}",
        "generate --prompt_ids={a} --routing_out={b}",
        "generate --draft_script=50:{a} --expert_profile_save={b}",
        "generate --expert_profile={a} --logits_out={b}",
        "chat --draft_vocab={a} --routing_out={b}",
        "chat --mtp={a} --routing_out={a}",
        "gate --model=x --model={a} --record={b}",
        "profile --action=make --routing={a} --out={b}",
        "generate --logits_out={new} --routing_out={folder}/../new",
    ],
)
def test_no_command_writes_over_what_it_reads_or_writes(tmp_path: Path, line: str):
    (tmp_path / "a").write_text("precious")
    (tmp_path / "b").symlink_to("a")
    (tmp_path / "folder").mkdir()
    paths = {name: tmp_path / name for name in ("a", "b", "new", "folder")}

    outcome = run(*line.format(**paths).split())

    assert outcome.code == 2
    assert "are one file, whose content would be lost" in outcome.err
    assert (tmp_path / "a").read_text() == "precious"
    assert not (tmp_path / "new").exists()


def test_a_device_takes_several_outputs():
    outcome = run(
        *("generate", "--prompt_ids=5", "--routing_out=/dev/null", "--logits_out=/dev/null")
    )

    assert outcome.code == 0
