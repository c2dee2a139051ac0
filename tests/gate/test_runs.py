import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from strata_jax.gate.runs import RunError, Worker, to_args
from tests.gate.gates import command


def _worker(folder: Path, timeout_s: float = 20, **scenario: Any) -> Worker:
    return Worker(command(**scenario), folder / "stderr", timeout_s)


def _args(folder: Path) -> list[str]:
    flags = {"model": "m", "prompt_ids": "5,6", "max_tokens": "3"}
    return to_args({**flags, "logits_out": str(folder / "logits.npy")})


def _is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_flags_become_arguments():
    assert to_args({"a": "1", "b": "x y"}) == ["--a=1", "--b=x y"]


def test_one_process_answers_several_requests(tmp_path: Path):
    with _worker(tmp_path) as worker:
        replies = [worker.ask(_args(tmp_path)) for _ in range(3)]

    assert [reply.result["prompt_tokens"] for reply in replies] == [2, 2, 2]
    assert replies[0].lines == ("note: fake",)
    assert replies[0].seconds > 0
    assert not _is_running(worker.pid)


def test_a_refused_request_says_what_was_refused(tmp_path: Path):
    with (
        _worker(tmp_path, code=2) as worker,
        pytest.raises(RunError, match="generate ended with exit code 2: strata-jax: no such flag"),
    ):
        worker.ask(_args(tmp_path))


@pytest.mark.parametrize("request_number", [0, 1])
def test_a_process_that_dies_is_told_with_its_last_words(tmp_path: Path, request_number: int):
    with _worker(tmp_path, die=3, from_request=request_number) as worker:
        for _ in range(request_number):
            worker.ask(_args(tmp_path))
        with pytest.raises(RunError, match=r"died \(exit code 3\): worker: out of luck"):
            worker.ask(_args(tmp_path))


def test_a_process_that_is_gone_already_is_no_traceback(tmp_path: Path):
    with Worker((sys.executable, "-c", ""), tmp_path / "stderr", 20) as worker:
        while worker._process.poll() is None:
            time.sleep(0.01)

        with pytest.raises(RunError, match=r"died \(exit code 0\): it said nothing"):
            worker.ask(_args(tmp_path))


def test_a_process_that_ends_well_is_no_failure(tmp_path: Path):
    with _worker(tmp_path) as worker:
        worker.ask(_args(tmp_path))
        worker.finish()


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ({"end_by": 11}, r"it died at its end \(signal 11\): it said nothing"),
        ({"end_s": 60}, "it did not end within 2 s of its last answer"),
    ],
)
def test_a_process_that_ends_badly_is_told(tmp_path: Path, fault: dict[str, Any], expected: str):
    pids = []

    def ask_and_finish() -> None:
        with _worker(tmp_path, 2, **fault) as worker:
            pids.append(worker.pid)
            worker.ask(_args(tmp_path))
            worker.finish()  # its error passes the worker, which does not wait for the process then

    with pytest.raises(RunError, match=expected):
        ask_and_finish()

    assert not _is_running(pids[0])


def test_a_process_that_hangs_is_killed(tmp_path: Path):
    began = time.monotonic()

    with (
        _worker(tmp_path, 1, hang_s=60) as worker,
        pytest.raises(RunError, match="no answer within 1 s; --timeout_s=N waits longer"),
    ):
        worker.ask(_args(tmp_path))

    assert time.monotonic() - began < 10
    assert not _is_running(worker.pid)


@pytest.mark.parametrize("said", ["hello", "[]", '{"code": 0}', '{"code": 0, "lines": 3}'])
def test_what_is_no_reply_is_shown(tmp_path: Path, said: str):
    with (
        _worker(tmp_path, say=said) as worker,
        pytest.raises(RunError, match="a reply expected"),
    ):
        worker.ask(_args(tmp_path))


def test_an_interrupt_leaves_no_process(tmp_path: Path):
    with pytest.raises(KeyboardInterrupt), _worker(tmp_path) as worker:
        raise KeyboardInterrupt

    assert not _is_running(worker.pid)


def test_a_command_that_cannot_be_run_is_an_os_error(tmp_path: Path):
    with pytest.raises(OSError, match="none"):
        Worker(("/none",), tmp_path / "stderr", 1)


def test_the_real_process_starts_and_ends(tmp_path: Path):
    from strata_jax.gate.runs import WORKER

    ended = subprocess.run(WORKER, input="", capture_output=True, text=True, cwd=tmp_path)

    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
