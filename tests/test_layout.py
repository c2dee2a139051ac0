"""The layout that README.md and ffi/README.md promise."""

import ast
import dataclasses
import fnmatch
import importlib
import inspect
import re
from pathlib import Path

import pytest

from strata_jax import _native
from strata_jax.ops import cases, sets

ROOT = Path(__file__).resolve().parent.parent
MAX_LINES = 500
GENERATED = {"ffi/common/gguf_grids.h"}
NOT_OPS = {
    "timed",
    "__init__",
    "native",
    "ffi_version",
    "sets",
    "roles",
    "cases",
    "case_inputs",
    "case_matrices",
    "cells",
}
"""Modules of strata_jax/ops that define no op; modules named *_ref specify bits for several."""
DEVICE_ONLY = {"gdn_chunk", "ngram_ask", "route"}
"""Ops for which the CPU runs another one, or none."""
XLA_HEADERS = {"common/check.h", "common/cells_ffi.h", "ops/handlers.h", "cuda/handlers.h"}
TOPICS = {"goldens", "kernels", "device", "device_tiles"}
"""Names of test files that are about more than one module."""


def _stems(pattern: str, suffix: str = "") -> set[str]:
    return {path.stem.removesuffix(suffix) for path in ROOT.glob(pattern)}


def _files(*patterns: str) -> list[str]:
    found = [path for pattern in patterns for path in ROOT.glob(pattern) if path.is_file()]
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


def _read(path: str) -> str:
    return (ROOT / path).read_text()


OPS = sorted(_stems("ffi/ops/*_ffi.cc", "_ffi"))
HANDLERS = [
    *((folder, op) for folder in ("ffi/ops", "ffi/cuda/ops") for op in OPS),
    *(("ffi/cuda/ops", op) for op in sorted(DEVICE_ONLY)),
]
PYTHON_FILES = _files("strata_jax/**/*.py", "tests/**/*.py", "tools/*.py")
OWN_FILES = sorted(
    {*PYTHON_FILES, *_files("strata_jax/*.pyi", "ffi/**/*", "tools/*", "CMakeLists.txt", ".ci/*")}
    - GENERATED
)
NATIVE_FILES = _files("ffi/**/*.h", "ffi/**/*.cc", "ffi/**/*.cu", "ffi/**/*.cuh")


def test_has_three_native_files_for_every_op():
    sources = _stems("ffi/ops/*.cc") - {f"{op}_ffi" for op in OPS}

    assert sources == set(OPS)
    assert _stems("ffi/ops/*.h") - {"handlers"} == set(OPS)


def test_has_a_python_file_for_every_op():
    modules = {stem for stem in _stems("strata_jax/ops/*.py") if not stem.endswith("_ref")}

    assert modules - NOT_OPS == set(OPS) | DEVICE_ONLY


def test_registers_every_op():
    declared = re.findall(r"DECLARE_HANDLER_SYMBOL\((\w+)Ffi\)", _read("ffi/ops/handlers.h"))

    assert sorted(_native.targets()) == OPS
    assert sorted(declared) == sorted(_camel(op) for op in OPS)


def test_names_every_op_in_the_build():
    found = re.search(r"set\(HOST_OPS ([^)]*)\)", _read("CMakeLists.txt"))

    assert found
    assert found[1].split() == OPS


def test_has_cases_and_a_field_for_every_op():
    fields = {field.name for field in dataclasses.fields(sets.OpSet)}

    assert set(cases.CASES) == fields == set(OPS) | DEVICE_ONLY


def test_has_a_test_file_for_every_op():
    assert {f"test_{op}" for op in OPS} <= _stems("tests/ops/test_*.py")


@pytest.mark.parametrize(("folder", "op"), HANDLERS)
def test_calls_the_handler_by_the_name_of_the_op(op: str, folder: str):
    source = _read(f"{folder}/{op}_ffi.cc")

    assert f'DEFINE_HANDLER_SYMBOL({_camel(op)}Ffi, Caught("{op}", Handle),' in source
    assert set(re.findall(r'STRATA_CHECK_ARG\(\s*"(\w+)"', source)) <= {op}
    assert re.search(rf'backend\.call\(\s*"{op}"', _read(f"strata_jax/ops/{op}.py"))


@pytest.mark.parametrize(("folder", "op"), HANDLERS)
def test_says_whether_the_handler_is_graph_safe(op: str, folder: str):
    source = _read(f"{folder}/{op}_ffi.cc")

    assert "graph-safe" in source.partition("\n")[0].lower()
    assert ("kCmdBufferCompatible" in source) == (folder == "ffi/cuda/ops")


@pytest.mark.parametrize(("folder", "op"), HANDLERS)
def test_passes_arguments_in_the_order_of_the_python_function(op: str, folder: str):
    bound = _bound(_read(f"{folder}/{op}_ffi.cc"))
    positional, keywords = _parameters(op, op)

    assert bound["Arg"] == positional
    shared = [name for name in bound["Attr"] if name in keywords]
    assert shared == [name for name in keywords if name in shared]


@pytest.mark.parametrize(("folder", "op"), HANDLERS)
def test_binds_what_the_handler_takes(op: str, folder: str):
    source = _read(f"{folder}/{op}_ffi.cc")
    bound = _bound(source)
    stream = ["stream"] if folder == "ffi/cuda/ops" else []

    assert _handler_parameters(source) == [*stream, *bound["Arg"], *bound["Ret"], *bound["Attr"]]


@pytest.mark.parametrize("op", [*OPS, *sorted(DEVICE_ONLY)])
def test_has_a_twin_with_the_same_arguments(op: str):
    assert _parameters(op, f"{op}_ref")[0] == _parameters(op, op)[0]


def test_has_no_file_that_is_too_long():
    lines = {path: _read(path).count("\n") for path in OWN_FILES}

    assert [path for path, count in lines.items() if count > MAX_LINES] == []


def test_keeps_annotations_readable_at_run_time():
    def imports(path: str) -> list[str | None]:
        nodes = ast.walk(ast.parse(_read(path)))
        return [node.module for node in nodes if isinstance(node, ast.ImportFrom)]

    assert [path for path in PYTHON_FILES if "__future__" in imports(path)] == []


def test_keeps_xla_out_of_everything_but_handlers():
    def knows_xla(path: str) -> bool:
        includes = re.findall(r'#include ["<]([^">]+)[">]', _read(path))
        return any(name.startswith("xla/") or name in XLA_HEADERS for name in includes)

    knowing = {path for path in NATIVE_FILES if knows_xla(path) and not path.endswith("_ffi.cc")}

    modules = {"ffi/module.cc", "ffi/cuda/module_device.cc"}
    assert knowing <= {*(f"ffi/{header}" for header in XLA_HEADERS), *modules}


def test_includes_headers_once():
    headers = [path for path in NATIVE_FILES if path.endswith((".h", ".cuh"))]

    assert [path for path in headers if "\n#pragma once\n" not in _read(path)] == []


@pytest.mark.parametrize("path", _files("tests/*/test_*.py"))
def test_mirrors_the_package_in_the_tests(path: str):
    _, package, name = path.split("/")
    topic = name.removeprefix("test_").removesuffix(".py")
    modules = _stems(f"strata_jax/{package}/*.py") - {"__init__"}

    assert modules, f"there is no strata_jax/{package}"
    assert topic in TOPICS or any(
        topic in (module, module.removesuffix("_ref")) or topic.startswith(f"{module}_")
        for module in modules
    )


def test_shows_the_real_tree_in_the_readme():
    shown = _shown_tree(_read("README.md"))

    assert [path for path in shown if not (ROOT / path).exists()] == []
    assert _real_tree() <= set(shown)


def _camel(op: str) -> str:
    return "".join(word.capitalize() for word in op.split("_"))


def _bound(source: str) -> dict[str, list[str]]:
    """Names of what a handler binds, by kind: those in comments of Arg and Ret, those of Attr."""
    binding = source[source.index("ffi::Ffi::Bind()") :]
    names = {
        kind: re.findall(rf"\.{kind}<.*?>\(\)\)?[;,]?\s*// (\w+)", binding)
        for kind in ("Arg", "Ret")
    }
    return names | {"Attr": re.findall(r'\.Attr<.*?>\("(\w+)"\)', binding)}


def _handler_parameters(source: str) -> list[str]:
    start = source.index("ffi::Error Handle(") + len("ffi::Error Handle(")
    parameters = source[start : source.index(") {", start)]
    while "<" in parameters:  # commas between parameters only
        parameters = re.sub(r"<[^<>]*>", "", parameters)
    return [parameter.split()[-1] for parameter in parameters.split(",")]


def _parameters(module: str, function: str) -> tuple[list[str], list[str]]:
    """Names of the positional and of the keyword-only parameters of a function of ops."""
    found = getattr(importlib.import_module(f"strata_jax.ops.{module}"), function)
    parameters = inspect.signature(found).parameters.values()
    keywords = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
    return [each.name for each in parameters if each.kind is not each.KEYWORD_ONLY], keywords


def _shown_tree(readme: str) -> list[str]:
    """Paths of the tree in the readme: two spaces a level, a name, then what it is for."""
    block = readme.split("## Tree", 1)[1].split("```")[1]
    paths: list[str] = []
    parents: list[str] = []
    for line in block.splitlines()[1:]:
        depth = (len(line) - len(line.lstrip())) // 2
        del parents[depth:]
        for name in re.split(r"\s{2,}", line.strip())[0].split():
            paths.append("".join([*parents, name]))
        parents.append(paths[-1])
    return paths


def _real_tree() -> set[str]:
    """Everything at the top, and the folders in its folders; a folder ends in a slash."""
    ignored = [*_read(".gitignore").split(), ".git"]

    def shown(folder: Path) -> list[Path]:
        return [
            path
            for path in folder.iterdir()
            if not any(fnmatch.fnmatch(path.name, pattern.rstrip("/")) for pattern in ignored)
        ]

    top = shown(ROOT)
    second = [path for folder in top if folder.is_dir() for path in shown(folder) if path.is_dir()]
    return {
        path.relative_to(ROOT).as_posix() + ("/" if path.is_dir() else "")
        for path in [*top, *second]
    }
