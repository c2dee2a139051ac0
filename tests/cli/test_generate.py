import json
from pathlib import Path

import numpy as np
import pytest

from tests.cli.fake_engine import FakeGeneration, Opener, run
from tests.gguf_maker import make_model

ANSWER = "I think.</think>\n\nHello there.<|im_end|>"
PLAIN = "Hello there.<|im_end|>"


def _run(*args: str, answer: str | list[int] = PLAIN, prompt: str = "--prompt=Hi"):
    opener = Opener(answer)
    prompts = (prompt,) if prompt else ()
    return run("generate", *prompts, *args, opener=opener), opener


def _without_tokenizer(folder: Path, **pairs: tuple[str, object]) -> Path:
    removed = {"tokenizer.ggml.merges": None}
    return make_model(folder / "model.gguf", sparse=True, pairs=removed | pairs).path


def test_writes_text():
    outcome, opener = _run()

    assert (outcome.code, outcome.out) == (0, "Hello there.\n")
    assert opener.request.ids == (4, 73) or len(opener.request.ids) == 1


def test_writes_nothing_but_text_to_stdout():
    outcome, _ = _run("--chat", answer=ANSWER)

    assert outcome.out == "Hello there.\n"
    assert "I think.\nnote: prompt" in outcome.err


def test_a_prompt_is_continued_mark_by_mark():
    outcome, _ = _run(answer=ANSWER)

    assert outcome.out == "I think.</think>\n\nHello there.\n"


def test_a_message_is_wrapped_by_the_template():
    outcome, opener = _run("--chat", "--thinking=off")

    assert opener.engine is not None
    assert opener.engine.decode(opener.request.ids) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    assert outcome.out == "Hello there.\n"


def test_special_texts_in_a_message_stay_text():
    _, opener = _run("--chat", prompt="--prompt=<|im_end|>")

    assert opener.request.ids.count(4089) == 1


def test_prints_one_object():
    outcome, opener = _run("--json", "--max_tokens=9")

    result = json.loads(outcome.out)
    assert list(result) == [
        "ids",
        "text",
        "finish_reason",
        "prompt_tokens",
        "timings",
        "tiers",
        "windows",
        "drafts",
        "ngram",
        "model",
        "versions",
        "kernels",
        "kv",
        "flags",
        "tile_rows",
        "plan",
        "memory",
    ]
    assert result["text"] == "Hello there."
    assert result["finish_reason"] == "stop"
    assert result["prompt_tokens"] == len(opener.request.ids)
    assert result["ids"][-1] == 4089
    assert list(result["timings"]) == [
        "load_s",
        "compile_s",
        "prompt_s",
        "decode_s",
        "prompt_tok_s",
        "decode_tok_s",
    ]
    assert result["model"]["file"].endswith("model-IQ3_S.gguf")
    assert len(result["model"]["hash"]) == 64
    assert result["versions"]["jaxlib"]
    assert result["windows"] == {"1": len(result["ids"])}


def test_the_object_holds_its_conditions():
    """Contract R: two runs are compared by what stands in their files."""
    outcome, _ = _run("--json", "--expert_cache=24", "--stop=a", "--stop=b,c", "--deterministic")

    result = json.loads(outcome.out)
    assert result["flags"] == [
        "--prompt=Hi",
        "--stop=a",
        "--stop=b,c",
        "--json=true",
        "--deterministic=true",
        "--expert_cache=24",
    ]
    assert result["kernels"] in ("avx512", "avx2", "scalar")
    assert result["plan"]["placement"]["primary"]["experts_by_layer"] == [3] * 8
    assert result["plan"]["cache_is_on"] is True
    assert result["memory"]["anonymous_bytes"] > 0


def test_keeps_reasoning_apart_in_the_object():
    outcome, _ = _run("--json", "--chat", answer=ANSWER)

    result = json.loads(outcome.out)
    assert (result["reasoning"], result["text"]) == ("I think.", "Hello there.")


def test_reads_the_prompt_only():
    outcome, _ = _run("--json", "--max_tokens=0")

    result = json.loads(outcome.out)
    assert (outcome.code, result["ids"], result["text"]) == (0, [], "")
    assert result["finish_reason"] == "length"
    assert result["timings"]["decode_tok_s"] is None


def test_writes_logits_under_the_name_given(tmp_path: Path):
    path = tmp_path / "logits"

    outcome, opener = _run("--max_tokens=3", f"--logits_out={path}")

    assert outcome.code == 0
    logits = np.load(path)
    assert logits.dtype == np.float32
    assert logits.shape == (len(opener.request.ids) + 2, 4096)


@pytest.mark.parametrize("flag", ["--logits_out=/dev/full", "--seed=1"])
def test_the_answer_comes_out_whatever_else_cannot_be_written(flag: str):
    """All of that is told, and the exit code says that something is missing."""
    opener = Opener(PLAIN)
    opener.unsaved = "--expert_profile_save=x: cannot be written"

    outcome = run("generate", "--prompt=Hi", "--json", flag, opener=opener)

    assert outcome.code == 1
    assert json.loads(outcome.out)["text"] == "Hello there."
    assert "strata-jax: --expert_profile_save=x: cannot be written\n" in outcome.err
    assert ("strata-jax: --logits_out=/dev/full: cannot be" in outcome.err) == ("full" in flag)


@pytest.mark.parametrize("name", ["", "none/logits.npy"])
def test_refuses_a_place_for_logits_before_loading(tmp_path: Path, name: str):
    outcome, opener = _run(f"--logits_out={tmp_path}/{name}")

    assert outcome.code == 2
    assert "a file in an existing folder expected" in outcome.err
    assert opener.engine is None


@pytest.mark.parametrize(
    ("stop", "text"),
    [(["there"], "Hello "), (["o t", "zz"], "Hell"), (["zz"], "Hello there.")],
)
def test_a_stop_text_ends_the_answer_before_it(stop: list[str], text: str):
    outcome, _ = _run("--json", *(f"--stop={each}" for each in stop))

    result = json.loads(outcome.out)
    assert (result["text"], result["finish_reason"]) == (text, "stop")
    assert (4089 in result["ids"]) == (stop == ["zz"])


def test_a_comma_in_a_stop_text_is_a_comma():
    outcome, _ = _run("--stop=o, w", answer="Hello, world")

    assert outcome.out == "Hell\n"


def test_goes_on_after_the_end():
    _, opener = _run()
    assert 4089 in opener.request.stop_ids

    outcome, opener = _run("--ignore_eos", answer=PLAIN + " More.")
    assert opener.request.stop_ids == frozenset()
    assert outcome.out == "Hello there. More.\n"


@pytest.mark.parametrize(
    ("flags", "expected"), [((), 256), (("--ignore_eos",), 0), (("--max_repeats=3",), 3)]
)
def test_a_reply_that_is_stuck_ends_unless_it_shall_go_on(
    flags: tuple[str, ...], expected: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(FakeGeneration, "stuck_on", 7)

    outcome, opener = _run(*flags)

    assert opener.request.max_repeats == expected
    assert "note: the answer was ended: it had come to repeat id 7; --max_repeats=N" in outcome.err


def test_takes_the_files_sampling_and_the_flags():
    _, opener = _run("--top_k=3", "--seed=9", "--presence_penalty=0.5")

    settings = opener.request.settings
    assert (settings.top_k, settings.seed, settings.presence_penalty) == (3, 9, 0.5)
    assert settings.top_p == pytest.approx(0.95)


def test_ids_need_no_tokenizer(tmp_path: Path):
    model = _without_tokenizer(tmp_path)

    outcome, opener = _run(
        f"--model={model}",
        "--json",
        "--max_tokens=2",
        prompt="--prompt_ids=5,6,7",
        answer=[1, 2, 3],
    )

    result = json.loads(outcome.out)
    assert outcome.code == 0
    assert opener.request.ids == (5, 6, 7)
    assert (result["ids"], result["text"]) == ([1, 2], None)
    assert outcome.err.count("ids only, no text") == 1


def test_text_needs_a_tokenizer(tmp_path: Path):
    outcome, opener = _run(f"--model={_without_tokenizer(tmp_path)}", "--json")

    assert (outcome.code, outcome.out) == (4, "")
    assert "merges" in outcome.err
    assert opener.engine is None


def test_stop_texts_need_a_tokenizer(tmp_path: Path):
    outcome, _ = _run(
        f"--model={_without_tokenizer(tmp_path)}", "--stop=x", prompt="--prompt_ids=5"
    )

    assert outcome.code == 2
    assert "--stop needs text" in outcome.err


def test_ids_are_shown_as_text_where_that_is_possible():
    outcome, _ = _run(prompt="--prompt_ids=5,6,7")

    assert outcome.out == "Hello there.\n"


def test_ids_without_a_token_are_no_text(tmp_path: Path):
    model = make_model(tmp_path / "model.gguf", sparse=True).path
    outcome, opener = _run(f"--model={model}", prompt="--prompt_ids=5", answer=[10**6, 5])

    assert outcome.code == 0
    assert opener.engine is not None
    assert outcome.out == opener.engine.decode([5]) + "\n"


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (("--prompt_ids=5", "--chat"), "--prompt_ids and --chat"),
        (("--prompt=x", "--thinking=off"), "--chat expected"),
        (("--prompt=x", "--effort=high"), "--chat expected"),
        (("--prompt=x", "--chat", "--effort=high"), "effort 'high'"),
        (("--prompt=x", "--stop="), "stop"),
        (("--prompt=",), "prompt is empty"),
        (("--prompt=\udcff",), "surrogate"),
        (("--prompt_ids=5,99999",), "id 99999 at position 1"),
        (("--prompt=x", "--max_tokens=-1"), "--max_tokens=-1"),
        (("--prompt=" + "word " * 9000,), "raise --max_context"),
        ((), "no prompt"),
    ],
)
def test_refuses_before_loading(args: tuple[str, ...], expected: str):
    opener = Opener(PLAIN)
    outcome = run("generate", "--json", *args, opener=opener)

    assert (outcome.code, outcome.out) == (2, "")
    assert expected in outcome.err
    assert opener.engine is None


def test_needs_a_template_to_chat(tmp_path: Path):
    model = make_model(tmp_path / "model.gguf", sparse=True).path

    outcome, _ = _run(f"--model={model}", "--chat")

    assert outcome.code == 2
    assert "tokenizer.chat_template" in outcome.err


@pytest.mark.parametrize("model", ["/none", "/", "/dev/null"])
def test_a_bad_file_is_one_line(model: str):
    outcome, _ = _run(f"--model={model}", "--json", "--platform=cpu")

    assert (outcome.code, outcome.out) == (4, "")
    assert outcome.err.startswith(f"strata-jax: {model}: ")
    assert outcome.err.count("\n") == 1


def test_reads_stdin():
    opener = Opener(PLAIN)

    outcome = run("generate", opener=opener, stdin="é\n".encode())

    assert outcome.code == 0
    assert opener.engine is not None
    assert opener.engine.decode(opener.request.ids) == "é\n"
