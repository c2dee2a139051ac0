"""The native tests, built and run without a sanitizer; `tests/native/run thread|address` has them too."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RUN = ROOT / "tests/native/run"
DRIVERS = {path.stem for path in RUN.parent.glob("test_*.cc")}
COMPILER = shlex.split(os.environ.get("CXX") or "g++")[0]
BUILD_S = 290
"""More than any machine needs: the libraries' objects serve if they were built with STRATA_EMULATE=ON."""


def _run(sanitizer: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(RUN), sanitizer, str(folder)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHON": sys.executable},
        timeout=BUILD_S,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which(COMPILER) is None,
    reason=f"NOT TESTED: the native tests need a C++ compiler, {COMPILER} is not here (CXX names it)",
)
def test_passes_every_native_test(tmp_path: Path):
    done = _run("none", tmp_path)

    assert done.returncode == 0, done.stdout + done.stderr
    began = [line for line in done.stdout.splitlines() if line.startswith("==")]
    assert sorted(began) == sorted(f"== {name} (none)" for name in DRIVERS)
    assert list(tmp_path.iterdir()) == [], "a native test left files behind"


def test_names_the_sanitizers_it_knows(tmp_path: Path):
    done = _run("memory", tmp_path)

    assert done.returncode == 2
    assert done.stderr == ("tests/native/run: memory, one of none, thread, address expected\n")
