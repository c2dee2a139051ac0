import io
import json
from pathlib import Path

import pytest
from absl import flags

from strata_jax.cli import generate, prompts
from strata_jax.cli.files import model_path
from strata_jax.errors import BadFileError, UsageError
from strata_jax.weights.pack import open_pack
from tests.cli.fake_engine import Terminal


def _read(*args: str, stdin: bytes | None = None) -> str | tuple[int, ...]:
    values = flags.FlagValues()
    generate.define(values)
    values(["generate", *args])
    source = None if stdin is None else io.TextIOWrapper(io.BytesIO(stdin))
    return prompts.read_prompt(values, source)


def test_reads_a_flag():
    assert _read("--prompt=é\n") == "é\n"


def test_reads_a_file_as_it_is(tmp_path: Path):
    file = tmp_path / "prompt"
    file.write_bytes("é\r\n".encode())

    assert _read(f"--prompt_file={file}") == "é\r\n"


def test_reads_stdin_as_it_is():
    assert _read(stdin="é\r\n".encode()) == "é\r\n"


@pytest.mark.parametrize("text", ["5,6,7", " 5 , 6,7", "+5,6,7"])
def test_reads_a_list_of_ids(text: str):
    assert _read(f"--prompt_ids={text}") == (5, 6, 7)


def test_reads_a_file_of_ids(tmp_path: Path):
    file = tmp_path / "ids.json"
    file.write_text("[5,\n 6, 7]")

    assert _read(f"--prompt_ids={file}") == (5, 6, 7)


@pytest.mark.parametrize(
    ("args", "names"),
    [
        (("--prompt=a", "--prompt_file=b"), "--prompt and --prompt_file"),
        (("--prompt=a", "--prompt_ids=5"), "--prompt and --prompt_ids"),
        (("--prompt_file=a", "--prompt_ids=5"), "--prompt_file and --prompt_ids"),
    ],
)
def test_refuses_two_prompts(args: tuple[str, ...], names: str):
    with pytest.raises(UsageError, match=names):
        _read(*args)


@pytest.mark.parametrize(
    "text", ["", "a", "5,,6", "5;6", "5.5", "[5, 6]", "5,", "\u0665", "5;" * 9999]
)
def test_refuses_what_is_no_list_of_ids(text: str):
    with pytest.raises(UsageError, match="ids like 5,6,7"):
        _read(f"--prompt_ids={text}")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("[5, 6", "no JSON"),
        ("\xff", "no JSON"),
        ("[" * 100_000, "no JSON"),
        ("{}", "a dict, a flat list of ids"),
        ("[5, [6]]", r"item 1 is \[6\]"),
        ("[5.0]", "item 0 is 5.0"),
        ("[true]", "item 0 is true"),
        (json.dumps(["x" * 1000]), "item 0 is"),
        ("[" + "9" * 5000 + "]", "no JSON"),
    ],
)
def test_refuses_a_broken_file_of_ids(tmp_path: Path, content: str, expected: str):
    file = tmp_path / "ids.json"
    file.write_bytes(content.encode("latin-1"))

    with pytest.raises(BadFileError, match=expected) as error:
        _read(f"--prompt_ids={file}")

    assert len(str(error.value)) < 300 + len(str(file))


@pytest.mark.parametrize(
    "arg",
    [
        "--prompt_file=none",
        "--prompt_file=/dev/zero/x",
        "--prompt_ids=none.json",
        "--prompt_ids=/",
    ],
)
def test_refuses_files_that_cannot_be_read(arg: str):
    with pytest.raises(BadFileError, match="cannot be read"):
        _read(arg)


def test_does_not_read_without_end(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prompts, "MAX_BYTES", 1000)

    with pytest.raises(BadFileError, match="more than"):
        _read("--prompt_file=/dev/zero")


def test_names_the_byte_that_is_no_text():
    with pytest.raises(UsageError, match="stdin: byte 2 is not UTF-8"):
        _read(stdin=b"ab\xff")


@pytest.mark.parametrize("stdin", [None, Terminal()])
def test_waits_for_nobody(stdin: Terminal | None):
    values = flags.FlagValues()
    generate.define(values)
    values(["generate"])

    with pytest.raises(UsageError, match="no prompt; give --prompt"):
        prompts.read_prompt(values, stdin)


def test_refuses_an_empty_stdin():
    with pytest.raises(UsageError, match="stdin is empty"):
        _read(stdin=b"")


def test_special_texts_are_tokens_and_marks_are_text():
    with open_pack(_embedded()) as pack:
        tokenizer = prompts.PlainTokenizer.from_metadata(pack.file.metadata)

    assert prompts.encode_plain(tokenizer, "<|im_start|>") == (4088,)
    assert tokenizer.special_id("<think>") is None
    assert tokenizer.special_id("<|im_start|>") == 4088


@pytest.mark.parametrize(
    ("ids", "max_context", "expected"),
    [
        ((), None, "prompt is empty"),
        ((5, 4096), None, r"id 4096 at position 1 is outside the vocabulary \[0, 4096\)"),
        ((-1,), None, "id -1"),
        ((5,) * 11, 10, "11 tokens, at most 10"),
        ((5,) * 8193, None, "8193 tokens, at most 8192"),
    ],
)
def test_refuses_ids_that_the_model_cannot_read(
    ids: tuple[int, ...], max_context: int | None, expected: str
):
    with open_pack(_embedded()) as pack, pytest.raises(UsageError, match=expected):
        prompts.check_ids(ids, pack.config, max_context)


def _embedded() -> Path:
    values = flags.FlagValues()
    generate.define(values)
    values(["generate"])
    return model_path(values)
