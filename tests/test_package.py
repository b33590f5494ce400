from __future__ import annotations

import ast
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from graphlib import TopologicalSorter
from pathlib import Path

import jaxtyping
import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from repository import ROOT, python, ran

import sinkscope
from sinkscope.errors import SinkscopeWarning, warn

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# A package imports only what stands above it.
ORDER = (
    "errors",
    "files",
    "results",
    "models",
    "engine",
    "opening",
    "hooks",
    "kv",
    "generation",
    "measure",
    "sinks",
    "sparse",
    "loops",
    "conformance",
    "bench",
    "app",
    "__main__",
)
STRANGERS = {"sinks", "sparse", "loops"}  # each paper has its room, which knows nothing of the others


def test_shapes_are_checked_while_tests_run():
    from sinkscope.sparse.attention import slash_sums

    with pytest.raises(jaxtyping.TypeCheckError):
        slash_sums(torch.ones(3, 4), torch.arange(3))  # no heads


def test_a_warning_is_at_the_line_of_the_user_that_led_to_it():
    with pytest.warns(SinkscopeWarning) as caught:
        line = sys._getframe().f_lineno + 1
        sorted([2, 1], key=lambda _: warn("once") or 0)
    assert {(one.filename, one.lineno) for one in caught} == {(__file__, line)}


def test_type_checkers_see_the_names_that_are_there():
    tree = ast.parse((ROOT / "sinkscope/__init__.pyi").read_text())
    stated = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    seen = {name.asname for node in stated for name in node.names if name.asname}
    assert seen | {"__version__"} == set(dir(sinkscope)), "__init__.pyi has a line for each public name"
    for name in sinkscope.__all__:
        assert getattr(sinkscope, name) is not None


def test_modules_and_functions_of_one_name_can_be_imported_in_every_order():
    """And a saved result is drawn by a program that imports no more than results."""
    code = """
from sinkscope.results.result import Result
print(len(Result.load('figures/find_sinks.json').figure().data) > 3)
import sinkscope as ss
ss.load, ss.lines
import sinkscope.opening.load, sinkscope.sparse.lines, sinkscope.hooks.trace
import sinkscope.generation.generate as other
print(other.__name__, all(map(callable, (ss.load, ss.trace, ss.generate, ss.lines))))
"""
    assert python(code).stdout == "True\nsinkscope.generation.generate True\n"


def _module(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


FILES = {_module(file): file for file in sorted((ROOT / "sinkscope").rglob("*.py"))}


def imported(name: str) -> set[str]:
    """The modules that a file imports, also inside functions and for type checkers."""
    paths: list[str] = []
    for node in ast.walk(ast.parse(FILES[name].read_text())):
        if isinstance(node, ast.ImportFrom):
            paths += [f"{node.module}.{one.name}" for one in node.names]
        elif isinstance(node, ast.Import):
            paths += [one.name for one in node.names]
    found = set[str]()
    for path in paths:
        if path.startswith("sinkscope.") and path != "sinkscope.__version__":
            while path not in FILES:
                path = path.rpartition(".")[0]
            found.add(path)
    return found


def test_imports_go_one_way():
    """From the package itself no file takes a name: it names all modules, also those from above."""
    edges = {name: imported(name) for name in FILES if name != "sinkscope"}
    TopologicalSorter(edges).prepare()  # an error names a circle
    for name, others in edges.items():
        part = name.split(".")[1]
        for used in {other.split(".")[1] for other in others} - {part}:
            above = ORDER.index(used) < ORDER.index(part)
            assert above and not {part, used} <= STRANGERS, f"{name} imports sinkscope.{used}"


@pytest.mark.parametrize("file", ["constraints.txt", "constraints-newest.txt"])
def test_the_tested_sets_fit_the_ranges(file):
    lines = [line for line in (ROOT / file).read_text().splitlines() if line and not line.startswith("#")]
    pins = {canonicalize_name(one.name): one.specifier for one in map(Requirement, lines)}
    for requirement in map(Requirement, sum(PROJECT["optional-dependencies"].values(), PROJECT["dependencies"])):
        (pin,) = pins[canonicalize_name(requirement.name)]
        assert pin.operator == "==" and requirement.specifier.contains(pin.version), requirement


@pytest.mark.slow
def test_site_builds_strictly(tmp_path):
    pytest.importorskip("mkdocs", reason="needs the extra docs")
    pytest.importorskip("mkdocstrings", reason="needs the extra docs")
    done = ran([sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path])
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
def test_wheel_and_sdist_hold_what_runs_elsewhere(tmp_path):
    subprocess.run([sys.executable, "-m", "build", "--outdir", tmp_path, ROOT], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    (sdist,) = tmp_path.glob("*.tar.gz")
    files = [file for file in (ROOT / "sinkscope").rglob("*") if file.is_file() and file.suffix != ".pyc"]
    names = {file.relative_to(ROOT).as_posix() for file in files}
    assert names <= set(zipfile.ZipFile(wheel).namelist())
    assert names <= {name.partition("/")[2] for name in tarfile.open(sdist).getnames()}
    there = tmp_path / "there"
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", there, wheel]
    subprocess.run(install, check=True)
    code = "import sinkscope; print(sinkscope.__file__)"
    assert ran([sys.executable, "-c", code], tmp_path, PYTHONPATH=str(there)).stdout.startswith(str(there))
    done = ran([there / "bin/sinkscope", "find-sinks"], tmp_path, PYTHONPATH=str(there))
    assert (done.returncode, done.stderr) == (0, "")
    assert "Conclusion: Zeroing L1.N338 at the first token leaves 0% of its norm spike" in done.stdout
