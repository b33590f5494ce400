from __future__ import annotations

import ast
import gc
import multiprocessing
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from contextlib import redirect_stdout
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import jaxtyping
import pytest
import torch
from repository import ROOT, python, ran

import sinkscope

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
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


def test_import_loads_nothing_heavy():
    heavy = {"torch", "transformers", "numpy", "click", "rich", "pydantic"}
    assert python(f"import sys, sinkscope; print({heavy} & set(sys.modules))").stdout == "set()\n"


def test_shapes_are_checked_while_tests_run():
    from sinkscope.sparse.attention import slash_sums

    with pytest.raises(jaxtyping.TypeCheckError):
        slash_sums(torch.ones(3, 4), torch.arange(3))  # no heads


def test_public_names_are_there():
    for name in sinkscope.__all__:
        assert getattr(sinkscope, name) is not None


def test_type_checkers_see_the_same_names():
    tree = ast.parse((ROOT / "sinkscope/__init__.pyi").read_text())
    stated = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    seen = {a.asname for n in stated for a in n.names if a.asname}
    assert seen | {"__version__"} == set(dir(sinkscope)), "__init__.pyi has a line for each public name"


NAMED = "sinkscope.generation.generate, sinkscope.hooks.trace, sinkscope.sparse.choice; import sinkscope as ss"
CALLABLE = "print(all(map(callable, (ss.load, ss.trace, ss.generate, ss.lines))))"
ORDERS = {
    f"import sinkscope, {NAMED}\n{CALLABLE}": "True",
    f"import sinkscope.opening.load, {NAMED}\n{CALLABLE}": "True",
    # A saved result is drawn by a program that imports no more than results.
    "from sinkscope.results.result import Result\n"
    "print(len(Result.load('figures/find_sinks.json').figure().data) > 3)": "True",
}
ORDERS[
    "import sys, sinkscope\nsinkscope.find_sinks\nprint([name for name in sys.modules if 'sinkscope.kv' in name])"
] = "[]"
for module in ("sparse.lines", "generation.generate"):
    ORDERS[f"import sinkscope.{module} as other; print(other.__name__)"] = f"sinkscope.{module}"


def anew(code: str, out: Path) -> None:
    """Run a program in a process that has loaded the libraries, as if nothing of the package were loaded."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "sinkscope"]:
        del sys.modules[name]
    os.chdir(ROOT)
    gc.disable()  # it would look through all that the process holds
    with out.open("w") as file, redirect_stdout(file):
        exec(code, {})


def test_modules_and_functions_of_one_name_can_be_imported_in_every_order(tmp_path):
    said: list[str] = []
    for number, code in enumerate(ORDERS):
        out = tmp_path / str(number)
        fork = multiprocessing.get_context("fork").Process(target=anew, args=(code, out))
        fork.start()
        fork.join()
        said.append(out.read_text().strip())
    assert said == list(ORDERS.values())


def _module(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


FILES = {_module(f): f for f in sorted((ROOT / "sinkscope").rglob("*.py"))}


MODULE_STRING = re.compile(
    r"(sinkscope(?:\.\w+)+)(?::\w+)?"
)  # "module" or "module:function", as import_module takes it


@cache
def _used(name: str) -> tuple[set[str], set[str]]:
    """What a file imports of the package, also inside functions and for type checkers; and modules in its strings.

    By these it could import what they name, unless it lies there itself.
    """
    imported, named = set(), set()
    for node in ast.walk(ast.parse(FILES[name].read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "sinkscope":
            imported |= {f"{node.module}.{a.name}" for a in node.names}
        elif isinstance(node, ast.Import):
            imported |= {a.name for a in node.names if a.name.startswith("sinkscope.")}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            match = MODULE_STRING.fullmatch(node.value)
            if match is not None and not f"{name}.".startswith(f"{_file_of(match[1])}."):
                named.add(match[1])
    return imported, named


def _file_of(path: str) -> str:
    """The module that a dotted path lies in."""
    while path not in FILES:
        path = path.rpartition(".")[0]
    return path


def _edges(name: str) -> set[str]:
    """The modules that a file imports, or could import by a string."""
    return {_file_of(path) for path in set.union(*_used(name))} - {name}


STRANGERS = {"sinks", "sparse", "loops"}  # each paper has its room, which knows nothing of the others
LAZY = {"sinkscope", "sinkscope.files.envelope"}  # they name modules; what is asked for is imported


def test_imports_go_one_way():
    """No file imports, by any way, one that imports it; a string that names a module counts as an import of it."""
    TopologicalSorter({name: _edges(name) - LAZY for name in FILES.keys() - LAZY}).prepare()  # an error names a circle


def test_packages_import_only_what_is_above_them():
    for name in FILES.keys() - LAZY:
        part = name.split(".")[1]
        assert part in ORDER, f"{name}: say in ORDER where it stands"
        for used in {other.split(".")[1] for other in _edges(name) - LAZY} - {part}:
            above = ORDER.index(used) < ORDER.index(part)
            assert above and not {part, used} <= STRANGERS, f"{name} imports sinkscope.{used}"


def test_nothing_reads_a_module_off_the_package():
    """The package names all modules, so a name that is read off it may be one from above."""
    for name in FILES:
        assert {path for path in _used(name)[0] if _file_of(path) == "sinkscope"} <= {"sinkscope.__version__"}, name


@pytest.mark.parametrize("file", ["constraints.txt", "constraints-newest.txt"])
def test_the_tested_sets_fit_the_ranges_and_name_no_host(file):
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    lines = [line for line in (ROOT / file).read_text().splitlines() if line and not line.startswith("#")]
    pins = {canonicalize_name(r.name): r.specifier for r in map(Requirement, lines)}
    assert not any(word in line for line in lines for word in ("://", "--", "@", "+"))
    wanted = list(PROJECT["project"]["dependencies"])
    for extra in PROJECT["project"]["optional-dependencies"].values():
        wanted += extra
    for requirement in map(Requirement, wanted):
        (pin,) = pins[canonicalize_name(requirement.name)]
        assert pin.operator == "=="
        assert requirement.specifier.contains(pin.version), f"{requirement} does not allow {pin.version}"


@pytest.mark.slow
def test_site_builds_strictly(tmp_path):
    pytest.importorskip("mkdocs", reason="needs the extra docs")
    pytest.importorskip("mkdocstrings", reason="needs the extra docs")
    done = ran([sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path])
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
def test_wheel_and_sdist_hold_what_runs_elsewhere(tmp_path, monkeypatch):
    subprocess.run(
        [sys.executable, "-m", "build", "--outdir", str(tmp_path), str(ROOT)], check=True, capture_output=True
    )
    (wheel,) = tmp_path.glob("*.whl")
    (sdist,) = tmp_path.glob("*.tar.gz")
    folders = "models/bundled", "models/recall", "models/text", "bench/tasks/data", "results/pages", "app/view"
    data = {
        str(file.relative_to(ROOT))
        for folder in folders
        for file in (ROOT / "sinkscope" / folder).iterdir()
        if file.is_file()
    } | {"sinkscope/py.typed"}
    assert data <= set(zipfile.ZipFile(wheel).namelist())
    assert data <= {name.partition("/")[2] for name in tarfile.open(sdist).getnames()}

    monkeypatch.delenv("PYTHONPATH", raising=False)
    # Another environment, which sees the dependencies of this one but not this tree.
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv/bin/python"
    here = tmp_path / "elsewhere"
    here.mkdir()
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", str(wheel)], check=True)
    site = next(p for p in sys.path if p.endswith("site-packages"))
    next((tmp_path / "venv/lib").glob("python*/site-packages")).joinpath("parent.pth").write_text(site + "\n")
    code = "import sinkscope, sys; sys.exit(0 if 'venv/lib' in sinkscope.__file__ else sinkscope.__file__)"
    subprocess.run([python, "-c", code], check=True, cwd=here)
    done = subprocess.run([tmp_path / "venv/bin/sinkscope", "find-sinks"], cwd=here, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Conclusion: L1.N338 suffices for the spike at the first token" in done.stdout
