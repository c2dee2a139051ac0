import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from strata_jax import __version__
from strata_jax.cli.dispatch import COMMANDS
from strata_jax.cli.main import main
from strata_jax.errors import BadFileError, CapacityError, StrataError, UsageError
from tests.cli.cpu_time import cpu_seconds
from tests.cli.fake_engine import Opener, run

STRATA = [sys.executable, "-m", "strata_jax"]


@pytest.mark.parametrize("args", [(), ("help",), ("--help",), ("-h",), ("--helpfull",)])
def test_prints_usage(args: tuple[str, ...]):
    outcome = run(*args)

    assert (outcome.code, outcome.err) == (0, "")
    assert all(f"  {command} " in outcome.out for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_prints_the_usage_of_a_command(command: str):
    by_help, by_flag = run("help", command), run(command, "--help")

    assert by_help == by_flag
    assert (by_help.code, by_help.err) == (0, "")
    assert f"strata-jax {command} [flags]" in by_help.out
    assert "--model=" in by_help.out


def test_prints_its_version():
    assert run("--version").out == f"strata-jax {__version__}\n"


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (("genrate",), "unknown command 'genrate'; did you mean generate?"),
        (("xyz",), f"unknown command 'xyz'; one of {', '.join(COMMANDS)} expected"),
        (("help", "pln"), "did you mean plan?"),
        (("--model=x", "generate"), "received --model=x first"),
        (("plan", "--prompt=x"), "--prompt is a flag of generate, not of plan"),
        (("plan", "--top-k=x"), "--top_k is a flag of generate and chat"),
        (("doctor", "--jsn"), "did you mean --json?"),
    ],
)
def test_a_wrong_command_line_is_a_usage_error(args: tuple[str, ...], expected: str):
    outcome = run(*args)

    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith("strata-jax: ")
    assert outcome.err.count("\n") == 1
    assert expected in outcome.err


class _Raises(Opener):
    def __init__(self, error: BaseException):
        super().__init__("")
        self._error = error

    def __call__(self, pack, options, report):
        raise self._error


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (StrataError("why"), 1),
        (UsageError("why"), 2),
        (CapacityError("why"), 3),
        (BadFileError("why"), 4),
        (KeyboardInterrupt(), 130),
        (MemoryError(), 3),
        (OSError(28, "why", "disk"), 1),
    ],
)
def test_an_error_is_one_line_and_an_exit_code(error: BaseException, code: int):
    outcome = run("generate", "--prompt=Hi", "--platform=cpu", "--json", opener=_Raises(error))

    assert (outcome.code, outcome.out) == (code, "")
    [line] = outcome.err.splitlines()
    assert line.startswith("strata-jax: ")


def test_a_bug_is_not_hidden():
    with pytest.raises(ZeroDivisionError):
        run("generate", "--prompt=Hi", opener=_Raises(ZeroDivisionError()))


def test_an_error_stays_one_line_whatever_it_quotes():
    outcome = run("generate", "--prompt=Hi", opener=_Raises(StrataError("a\nb\x1b[2J")))

    assert outcome.err.endswith("strata-jax: a b\\x1b[2J\n")


def test_a_reader_that_has_gone_is_no_error():
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    assert run("--version", out=Gone()).code == 1
    assert run("--version", out=Gone()).err == ""


def test_closed_streams_are_no_error():
    assert main(["--version"], None, None, None) == 0
    assert main(["plan", "--model=/none"], None, None, None) == 4


def _imported(command: str) -> str:
    script = (
        f"import sys; from strata_jax.cli.main import main; "
        f"main({command.split()!r}, None, None, None); "
        f"print(*sorted({{'jax', 'numpy', 'tokenizers'}} & set(sys.modules)))"
    )
    return subprocess.check_output([sys.executable, "-c", script], text=True).strip()


@pytest.mark.parametrize("command", ["", "--help", "help generate", "chat --help", "generate --x"])
def test_usage_imports_nothing_heavy(command: str):
    assert _imported(command) == ""


def test_plan_imports_no_jax():
    assert _imported("plan --json") == "numpy"


def test_usage_comes_at_once():
    assert cpu_seconds([*STRATA, "--help"])[0] < 0.5


def test_a_closed_pipe_is_quiet():
    read_end, write_end = os.pipe()
    os.close(read_end)

    done = subprocess.run([*STRATA, "plan"], stdout=write_end, stderr=subprocess.PIPE, check=False)
    os.close(write_end)

    assert (done.returncode, done.stderr) == (1, b"")


def test_a_full_disk_is_one_line():
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full, which this system does not have")
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([*STRATA, "plan"], stdout=full, stderr=subprocess.PIPE, check=False)

    assert done.returncode == 1
    assert done.stderr.decode().count("\n") == 1
    assert "No space left" in done.stderr.decode()


def test_writes_with_the_embedded_model():
    args = ["generate", "--prompt_ids=5,6,7", "--max-tokens=9", "--temperature=0", "--ignore_eos"]

    done = subprocess.run(
        [*STRATA, *args, "--json", "--platform=cpu"], capture_output=True, check=True, text=True
    )

    result = json.loads(done.stdout)
    assert len(result["ids"]) == 9
    assert result["text"]
    assert result["timings"]["decode_tok_s"] > 0
    assert "Warning" not in done.stderr
