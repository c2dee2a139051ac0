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
