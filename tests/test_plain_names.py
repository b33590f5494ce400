"""A local, a parameter or a field of the package says what it holds: words that hold anything are none of its names."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "sinkscope"
EMPTY = {*"own seen some what given said others left there one each few whole here behind".split()}
KEPT = {
    "app/view/result.py others": "a field of the files of view",
    "bench/task.py given": "an argument of PromptFile",
    "conformance/checked.py seen": "a field of the files of check-cache",
    "sparse/lines.py whole": "the option --whole",
    "sinks/spikes/tables.py left": "columns of results",
    "sinks/spikes/why_tables.py left": "columns of results",
    "sinks/spikes/why_tables.py others": "a column of results",
}
"""Names that users have in files and commands."""
KERNELS = ("triton.py", "triton_sums.py")
"""Kernels have such names still: no other file may."""


@pytest.mark.parametrize("room", sorted(path.name for path in PACKAGE.iterdir() if path.is_dir()))
def test_names_say_what_they_hold(room):
    found = set()
    for file in PACKAGE.joinpath(room).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            is_bound = isinstance(getattr(node, "ctx", None), ast.Store)
            names = [getattr(node, "arg", None) if isinstance(node, ast.arg) else None]
            names += [getattr(node, field, None) for field in ("id", "attr") if is_bound]
            found |= {f"{file.relative_to(PACKAGE)} {name}" for name in EMPTY.intersection(names)}
    assert not [name for name in found - KEPT.keys() if not name.split()[0].endswith(KERNELS)]
