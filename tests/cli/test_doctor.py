import json

import pytest

from strata_jax.cli import checks, doctor
from strata_jax.errors import StrataError
from tests.cli.fake_engine import run


@pytest.fixture(scope="module")
def report():
    """JAX starts once for all tests of this file."""
    return run("doctor", "--json")


def test_the_cpu_path_works(report):
    result = json.loads(report.out)

    assert (report.code, result["works"], result["problems"]) == (0, True, [])
    assert result["devices"][0]["usable"]
    assert result["kernels"]["sets"][result["kernels"]["used"]] == "used"
    assert result["ffi_api"]["built"] is not None


def test_says_of_every_gpu_whether_it_is_used_and_why(report):
    gpus = json.loads(report.out)["devices"][1:]

    assert gpus
    assert all(isinstance(gpu["usable"], bool) and gpu["why"] for gpu in gpus)


class FakeLibrary:
    def __init__(self, devices, problem=None):
        self._machine = {
            "driver": "13.0",
            "runtime": "13.0",
            "problem": problem,
            "devices": devices,
        }

    def machine(self):
        return self._machine

    def built_archs(self):
        return ["80", "90"]


def device(problem=None):
    sizes = {"total_mib": 1000, "free_mib": 900}
    about = {"index": 0, "name": "Card", "capability": "9.0", "pci_id": "0000:01:00.0"}
    return {**about, **sizes, "problem": problem, "peers": [1]}


@pytest.mark.parametrize(
    ("library", "usable", "why"),
    [
        (FakeLibrary([device()]), True, "900 of 1000 MiB free"),
        (FakeLibrary([device("built for 80 only")]), False, "built for 80 only"),
        (FakeLibrary([], "no driver"), False, "no driver"),
        (None, False, "no CUDA library"),
    ],
)
def test_says_of_a_gpu_what_the_cuda_library_says(monkeypatch, library, usable, why):
    def load(name):
        if library is None:
            raise ImportError(name)
        return library

    monkeypatch.setattr(checks.importlib, "import_module", load)

    (gpu,) = checks._gpus(())
    assert gpu["usable"] == usable
    assert why in gpu["why"]


@pytest.mark.parametrize(
    ("peers", "why"), [([1], ", P2P with 1"), ([], ", no P2P: rows of a peer go through RAM")]
)
def test_says_whether_two_gpus_reach_each_other(monkeypatch, peers, why):
    library = FakeLibrary([device() | {"peers": peers}, device()])
    monkeypatch.setattr(checks, "cuda_library", lambda: library)

    assert checks._gpus(())[0]["why"].endswith(why)


def test_names_versions_and_libraries(report):
    result = json.loads(report.out)

    assert result["versions"]["jaxlib"][0].isdigit()
    assert any("_native" in name for name in result["libraries"])


def test_estimates_the_speed_of_the_model(report):
    speed = json.loads(report.out)["speed"]

    assert 1e6 < speed["token_bytes"] < 21e6
    assert "tok/s" in speed["summary"]


def test_prints_the_answer_first(report):
    result = json.loads(report.out)
    result["devices"] = [result["devices"][0]]

    assert doctor._lines(result)[0].startswith("works: on the CPU")

    result["devices"].append(checks._gpu("Card", "it is fine", usable=True))
    assert doctor._lines(result)[0].startswith("works: on Card; on the CPU")


def test_says_of_the_first_gpu_that_it_is_taken_though_another_could_be_used(report):
    result = json.loads(report.out)
    gpus = [checks._gpu("Old", "built for 90 only"), checks._gpu("New", "it is fine", usable=True)]
    result["devices"] = [result["devices"][0], *gpus]

    assert doctor._lines(result)[0].endswith(
        "kernels, with --platform=cpu; Old, which is taken without it, cannot be used; "
        "CUDA_VISIBLE_DEVICES can put New first"
    )
    assert checks._usable_gpus(result["devices"]) == 0
    assert checks._usable_gpus([result["devices"][0], gpus[1], gpus[0]]) == 1


def test_a_broken_library_is_a_line_and_an_exit_code(monkeypatch: pytest.MonkeyPatch):
    def fail():
        raise StrataError("strata_jax._native: not built for Python 3.11 on x86_64")

    monkeypatch.setattr(checks, "load_native", fail)

    outcome = run("doctor")

    assert outcome.code == 1
    assert "Traceback" not in outcome.out + outcome.err
    assert "  strata_jax._native: not built" in outcome.out
    assert "unknown without the native library" in outcome.out


def test_a_broken_jax_is_a_line_and_an_exit_code(monkeypatch: pytest.MonkeyPatch):
    def fail():
        raise RuntimeError("jaxlib is version 0.9, but this jax needs 0.10\nand more")

    monkeypatch.setattr(checks, "pin_jax_to_cpu", fail)

    outcome = run("doctor", "--json")

    assert outcome.code == 1
    assert json.loads(outcome.out)["problems"] == [
        "JAX on the CPU: RuntimeError: jaxlib is version 0.9, but this jax needs 0.10"
    ]


def test_a_bad_model_does_not_stop_the_report():
    outcome = run("doctor", "--model=/none")

    assert outcome.code == 0
    assert "/none: cannot be opened" in outcome.out
