import io
import json
from pathlib import Path
from typing import Any

import numpy as np

from strata_jax.cli.files import embedded_model
from strata_jax.cli.gate_worker import serve
from tests.cli.fake_engine import Opener


class _CountingOpener(Opener):
    def __init__(self) -> None:
        super().__init__([5, 6, 7, 8])
        self.count = 0

    def __call__(self, pack, options, report):
        self.count += 1
        self.pack = pack
        return super().__call__(pack, options, report)


def _serve(*requests: list[str], opener: Opener | None = None) -> tuple[int, list[dict[str, Any]]]:
    lines = "".join(json.dumps({"args": args}) + "\n" for args in requests)
    replies = io.StringIO()
    code = serve(io.StringIO(lines), replies, opener or _CountingOpener())
    return code, [json.loads(line) for line in replies.getvalue().splitlines()]


def _args(ids: str = "5,6,7", *more: str) -> list[str]:
    return [f"--prompt_ids={ids}", "--max_tokens=3", "--json", *more]


def test_answers_as_generate_does(tmp_path: Path):
    logits = tmp_path / "logits.npy"

    code, replies = _serve(_args("5,6,7", f"--logits_out={logits}"))

    assert code == 0
    assert [reply["code"] for reply in replies] == [0]
    assert replies[0]["result"]["ids"] == [5, 6, 7]
    assert replies[0]["result"]["prompt_tokens"] == 3
    assert "note: a note of the engine" in replies[0]["lines"]
    assert np.load(logits).shape == (5, 4096)


def test_opens_one_engine_for_all_requests():
    opener = _CountingOpener()

    _, replies = _serve(_args("5,6"), _args("7"), _args("8,9,10"), opener=opener)

    assert opener.count == 1
    assert opener.engine is not None
    assert [request.ids for request in opener.engine.requests] == [(5, 6), (7,), (8, 9, 10)]
    assert [reply["result"]["prompt_tokens"] for reply in replies] == [2, 1, 3]


def test_keeps_engine_and_file_open_until_the_end():
    opener = _CountingOpener()
    closed = []

    def requests():
        for ids in ("5", "6", "7"):
            yield json.dumps({"args": _args(ids)})
            assert opener.engine is not None
            closed.append(opener.engine.closed)
            assert opener.pack.view("token_embd.weight")[0] >= 0

    serve(requests(), io.StringIO(), opener)  # type: ignore[arg-type]  (an iterator of lines will do)

    assert closed == [False, False, False]
    assert opener.engine is not None
    assert opener.engine.closed


def test_a_wrong_flag_is_a_reply():
    code, replies = _serve(_args("5", "--treads=2"), _args("6"))

    assert (code, [reply["code"] for reply in replies]) == (0, [2, 0])
    assert replies[0]["result"] is None
    assert replies[0]["lines"] == [
        "strata-jax: generate: unknown flag --treads; did you mean --threads? ('strata-jax help "
        "generate' lists all)"
    ]


def test_refuses_another_configuration():
    _, replies = _serve(_args("5", "--threads=1"), _args("5", "--threads=2"))

    assert [reply["code"] for reply in replies] == [0, 2]
    assert "which the engine was opened with" in replies[1]["lines"][-1]


def test_refuses_another_model(tmp_path: Path):
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(embedded_model().read_bytes())

    _, replies = _serve(_args("5"), _args("5", f"--model={copy}"))

    assert [reply["code"] for reply in replies] == [0, 2]


def test_ends_when_interrupted():
    class Interrupted(Opener):
        def __call__(self, pack, options, report):
            raise KeyboardInterrupt

    code, replies = _serve(_args("5"), _args("6"), opener=Interrupted(""))

    assert (code, [reply["code"] for reply in replies]) == (130, [130])


def test_without_requests_nothing_is_opened():
    opener = _CountingOpener()

    assert _serve(opener=opener) == (0, [])
    assert opener.count == 0
