"""Refuses a tree that is larger than `tools/ceilings.json` allows: python -m tools.size [--lower]

Code is counted in syntax nodes without docstrings, pages in words without the tables that declarations make. `--lower`
writes what was counted where it is less: ceilings only fall. Whoever needs more takes away elsewhere, or argues for it
in a commit that changes the file alone.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CEILINGS = Path(__file__).with_name("ceilings.json")
FOLDERS = {"package": "sinkscope", "tests": "tests", "experiments": "experiments"}
MADE = re.compile(r"^<!-- columns: .*?^<!-- end of columns -->", re.M | re.S)
"""Tables of columns, which tools/outputs.py writes from declarations."""
DENSEST = 12.7  # nodes a statement in the package, so that nothing becomes shorter by becoming dense


def counted(folder: Path) -> tuple[int, int]:
    """The syntax nodes and the statements of all modules in a folder, without docstrings."""
    nodes = statements = 0
    for file in folder.rglob("*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        docstrings = set()
        for node in ast.walk(tree):
            named = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            if named and ast.get_docstring(node, clean=False) is not None:
                docstrings.add(node.body[0])
        for node in ast.walk(tree):
            if node not in docstrings:
                nodes += 1
                statements += isinstance(node, ast.stmt)
    return nodes, statements


def sizes() -> tuple[dict[str, int], float]:
    """Each size by its name, and the nodes a statement of the package."""
    counts = {name: counted(ROOT / folder) for name, folder in FOLDERS.items()}
    found = {name: nodes for name, (nodes, _) in counts.items()}
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    found["docs"] = sum(len(MADE.sub("", page.read_text(encoding="utf-8")).split()) for page in pages)
    nodes, statements = counts["package"]
    return found, nodes / statements


if __name__ == "__main__":
    ceilings: dict[str, int] = json.loads(CEILINGS.read_text())
    found, dense = sizes()
    for name, size in found.items():
        print(f"{name} {size:,}, ceiling {ceilings[name]:,}{' words' if name == 'docs' else ''}")
    print(f"{dense:.2f} nodes a statement in the package, at most {DENSEST}")
    if "--lower" in sys.argv:
        CEILINGS.write_text(json.dumps({name: min(found[name], most) for name, most in ceilings.items()}) + "\n")
    too_large = dense > DENSEST or any(found[name] > most for name, most in ceilings.items())
    if too_large:
        print("larger than allowed: CONTRIBUTING.md says how a change gets room")
    sys.exit(int(too_large))
