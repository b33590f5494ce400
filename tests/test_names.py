"""A local, a parameter or a field of the package says what it holds: words that hold anything are none of its names."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOMS = sorted(folder for folder in (Path(__file__).parents[1] / "sinkscope").iterdir() if folder.is_dir())
EMPTY = {*"own seen some what given said others left there one each few whole here behind".split()}
KEPT = {
    ("app", "others"): "a field of the files of view",
    ("bench", "given"): "an argument of PromptFile",
    ("conformance", "seen"): "a field of the files of check-cache",
    ("sparse", "whole"): "the option --whole",
}
"""Names that users have in files and commands."""
KERNELS = ("triton.py", "triton_sums.py")
"""Files of kernels, which have such names still: none may join."""


def is_column(node: ast.AST) -> bool:
    """Whether a field is a column of results, whose name files have."""
    value = node.value if isinstance(node, ast.AnnAssign) else None
    return isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in COLUMNS


COLUMNS = ("column", "optional", "detail")


def empty_names(tree: ast.AST) -> list[tuple[int, str]]:
    columns = {node.target for node in ast.walk(tree) if is_column(node)}
    found = []
    for node in ast.walk(tree):
        name = None
        if isinstance(node, ast.arg):
            name = node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node not in columns:
            name = node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            name = node.attr
        if name in EMPTY:
            found.append((node.lineno, name))
    return found


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.name)
def test_names_say_what_they_hold(room):
    found = {}
    for file in room.rglob("*.py"):
        names = empty_names(ast.parse(file.read_text(encoding="utf-8")))
        names = [(line, name) for line, name in names if (room.name, name) not in KEPT]
        if names and file.name not in KERNELS:
            found[file.relative_to(room).as_posix()] = names
    assert not found
