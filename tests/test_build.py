"""The build, as far as it can be tried without building: configuring ends within seconds."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pybind11
import pytest

ROOT = Path(__file__).resolve().parent.parent
WITHIN_S = 60
"""A configuration takes some 2 s, more on a busy machine; a build takes longer than this."""


@pytest.fixture
def configure(tmp_path: Path):
    """Runs CMake's configuration; returns its exit code and what it said, in one line."""

    def run(*options: str, **environment: str) -> tuple[int, str]:
        command = ["cmake", "-S", str(ROOT), "-B", str(tmp_path / "build")]
        command += [f"-DPython_EXECUTABLE={sys.executable}"]
        command += [f"-Dpybind11_DIR={pybind11.get_cmake_dir()}", *options]
        bin_folder = str(Path(sys.executable).parent)
        path = os.pathsep.join([bin_folder, os.environ["PATH"]])
        began = time.perf_counter()
        done = subprocess.run(
            command,
            env={**os.environ, "PATH": path, **environment},
            capture_output=True,
            text=True,
            timeout=4 * WITHIN_S,
            check=False,
        )
        assert time.perf_counter() - began < WITHIN_S
        return done.returncode, " ".join((done.stdout + done.stderr).split())

    return run


@pytest.fixture
def false_nvcc(tmp_path: Path):
    """Makes an nvcc that knows its version and architectures, and says this when it is to compile."""

    def make(says: str) -> str:
        nvcc = tmp_path / "nvcc"
        nvcc.write_text(
            "#!/bin/sh\n"
            'case "$1" in\n'
            "--version) echo 'Cuda compilation tools, release 13.0, V13.0.88';;\n"
            "--list-gpu-arch) printf 'compute_80\\ncompute_86\\ncompute_89\\ncompute_90\\n"
            "compute_120\\n';;\n"
            f"*) echo '{says}'; exit 1;;\n"
            "esac\n"
        )
        nvcc.chmod(0o755)
        return str(nvcc)

    return make


def _hidden_nvcc() -> str:
    """A setting that hides every nvcc of this machine."""
    folders = {str(Path(found).parent) for found in [shutil.which("nvcc")] if found}
    return f"-DCMAKE_IGNORE_PATH={';'.join(sorted({'/usr/local/cuda/bin', *folders}))}"


def test_needs_no_nvcc(configure):
    code, said = configure("-DSTRATA_CUDA=AUTO", _hidden_nvcc(), CUDACXX="", CUDA_HOME="")

    assert code == 0, said
    assert "CUDA compiler" not in said


def test_without_nvcc_says_that_cuda_was_asked_for(configure):
    code, said = configure("-DSTRATA_CUDA=ON", _hidden_nvcc(), CUDACXX="", CUDA_HOME="")

    assert code != 0
    assert "no nvcc was found" in said
    assert "-DSTRATA_CUDA=OFF" in said


def test_names_the_combination_that_works_when_nvcc_refuses_the_compiler(configure, false_nvcc):
    nvcc = false_nvcc("host_config.h:1: error: #error -- unsupported GNU version!")

    code, said = configure("-DSTRATA_CUDA=ON", CUDACXX=nvcc)

    assert code != 0
    assert "nvcc 13.0 cannot compile with" in said
    assert "unsupported GNU version" in said
    assert "CUDA 13.0: GCC 6 to 15" in said


@pytest.mark.parametrize("archs", ["70", "90;native", "sm_90"])
def test_refuses_architectures_that_nvcc_does_not_know(configure, false_nvcc, archs: str):
    nvcc = false_nvcc("compiled")

    code, said = configure("-DSTRATA_CUDA=ON", f"-DSTRATA_CUDA_ARCHS={archs}", CUDACXX=nvcc)

    assert code != 0
    assert f"STRATA_CUDA_ARCHS: {archs.rpartition(';')[2]}" in said


def test_refuses_an_unknown_choice(configure):
    code, said = configure("-DSTRATA_CUDA=PERHAPS")

    assert code != 0
    assert "STRATA_CUDA: PERHAPS, expected AUTO, ON or OFF" in said


def test_says_how_to_build_when_jaxlib_is_missing(configure, tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Hidden:\n"
        "    def find_spec(name, path=None, target=None):\n"
        "        if name == 'jaxlib':\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Hidden)\n"
    )

    code, said = configure("-DSTRATA_CUDA=OFF", PYTHONPATH=str(tmp_path))

    assert code != 0
    assert "pip install --no-build-isolation" in said
