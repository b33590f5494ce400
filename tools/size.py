"""Refuses a tree that is larger or denser than `tools/ceilings.json` allows: python -m tools.size [--lower]

Code is counted in syntax nodes without docstrings, pages in words without comments and the tables that declarations
make. Sums are bounds and no goal: what reads plainly may grow. So nodes a statement and the largest function are
refused as well, and nothing becomes shorter by becoming dense. Kernels of Triton are counted in the sums alone.

`--lower` writes what was counted where it is less: ceilings only fall. Whoever needs more takes away elsewhere, or
argues for it in a commit that changes the file alone.
"""

from __future__ import annotations

import ast
import json
import math
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CEILINGS = Path(__file__).with_name("ceilings.json")
FOLDERS = {"package": "sinkscope", "tests": "tests", "experiments": "experiments"}
DENSITIES = {
    "package": ["sinkscope"],
    "sinks and opening": ["sinkscope/sinks", "sinkscope/opening"],
    "tests": ["tests"],
}
"""Folders whose nodes a statement are refused, by what they are called."""
KERNELS = {
    "sinkscope/sparse/triton.py": ("_add", "_own_tile", "_in_bands", "_in_turn", "_attend"),
    "sinkscope/sparse/triton_sums.py": ("_sampled", "_scores", "_normalisers", "_step", "_sums", "_held"),
}
"""Functions that Triton compiles, by file: it takes no objects, so they have long rows of arguments."""
MADE = re.compile(r"^<!-- columns: .*?^<!-- end of columns -->|<!--.*?-->", re.M | re.S)
"""Tables of columns, which tools/outputs.py writes from declarations, and comments, which bind numbers to figures."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


def modules(folders: Iterable[str]) -> Iterator[tuple[str, ast.Module]]:
    """Yield the path and the syntax tree of each module in some folders."""
    for folder in folders:
        for file in sorted((ROOT / folder).rglob("*.py")):
            yield str(file.relative_to(ROOT)), ast.parse(file.read_text(encoding="utf-8"))


def counted(tree: ast.AST) -> tuple[int, int]:
    """Return the syntax nodes and the statements of a tree, without docstrings."""
    docstrings = set[ast.AST]()
    nodes = statements = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | Function) and ast.get_docstring(node, clean=False) is not None:
            docstrings.add(node.body[0])
        if node not in docstrings:
            nodes += 1
            statements += isinstance(node, ast.stmt)
    return nodes, statements


def functions(tree: ast.AST) -> Iterator[Function]:
    """Yield the functions of a tree; functions inside another one are part of it."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function):
            yield node
        else:
            yield from functions(node)


def sizes() -> dict[str, int]:
    """Return the syntax nodes of each folder, and the words of pages."""
    found: dict[str, int] = {}
    for name, folder in FOLDERS.items():
        found[name] = sum(counted(tree)[0] for _, tree in modules([folder]))
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    found["docs"] = sum(len(MADE.sub("", page.read_text(encoding="utf-8")).split()) for page in pages)
    return found


def density(folders: Iterable[str]) -> float:
    """Return the nodes a statement of some folders, without kernels."""
    nodes = statements = 0
    for path, tree in modules(folders):
        nodes_of_file, statements_of_file = counted(tree)
        nodes += nodes_of_file
        statements += statements_of_file
        for function in functions(tree):
            if function.name in KERNELS.get(path, ()):
                nodes_of_kernel, statements_of_kernel = counted(function)
                nodes -= nodes_of_kernel
                statements -= statements_of_kernel
    return nodes / statements


def largest_function() -> tuple[int, str]:
    """Return the nodes of the largest function of the package that is no kernel, and where it is."""
    found: list[tuple[int, str]] = []
    for path, tree in modules(["sinkscope"]):
        for function in functions(tree):
            if function.name not in KERNELS.get(path, ()):
                found.append((counted(function)[0], f"{path}:{function.lineno} {function.name}"))
    return max(found)


def measured() -> list[tuple[str, float, str]]:
    """Return the name of each number in `ceilings.json`, what it is now, and what is said of it."""
    rows: list[tuple[str, float, str]] = []
    for name, size in sizes().items():
        unit = "words" if name == "docs" else "nodes"
        rows.append((name, size, f"{name}: {size:,} {unit}"))
    for name, folders in DENSITIES.items():
        dense = density(folders)
        rows.append((f"{name}, nodes a statement", dense, f"{name}: {dense:.3f} nodes a statement"))
    nodes, where = largest_function()
    rows.append(("largest function", nodes, f"largest function of the package: {nodes} nodes, {where}"))
    return rows


def main(arguments: list[str]) -> int:
    """Print each number beside its ceiling; return 1 if one is above it."""
    ceilings: dict[str, float] = json.loads(CEILINGS.read_text())
    is_too_large = False
    for name, number, words in measured():
        print(f"{words}, at most {ceilings[name]:,}")
        is_too_large = is_too_large or number > ceilings[name]
        if isinstance(number, float):
            number = math.ceil(number * 100) / 100  # of two digits, so that a small change has room
        if "--lower" in arguments:
            ceilings[name] = min(number, ceilings[name])
    if "--lower" in arguments:
        CEILINGS.write_text(json.dumps(ceilings, indent=2) + "\n")
    if is_too_large:
        print("larger than allowed: CONTRIBUTING.md says how a change gets room")
    return int(is_too_large)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
