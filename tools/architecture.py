"""Draws the rooms of the package from their imports, into docs/design.md: python -m tools.architecture

An arrow leads from a room to one that imports it, so data flows along the arrows. Imports that a longer way of arrows implies are left out.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/design.md"
BEGIN, END = "<!-- made by tools.architecture -->\n", "<!-- end of tools.architecture -->"


def imports(package: Path) -> dict[str, set[str]]:
    """The rooms that each room imports, also inside functions; `errors` is left out, because all import it."""
    rooms = {folder.name for folder in package.iterdir() if folder.is_dir() and list(folder.glob("*.py"))}
    found: dict[str, set[str]] = {room: set() for room in rooms}
    for room in rooms:
        for path in (package / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{package.name}."):
                    other = str(node.module).split(".")[1]
                    if other in rooms and other != room:
                        found[room].add(other)
    return found


def reached(room: str, found: dict[str, set[str]]) -> set[str]:
    """All rooms to which arrows lead from a room."""
    seen: set[str] = set()
    left = [*found[room]]
    while left:
        one = left.pop()
        if one not in seen:
            seen.add(one)
            left += found[one]
    return seen


def drawing(found: dict[str, set[str]]) -> str:
    """The rooms as a Mermaid diagram."""
    lines = ["flowchart BT"]
    for room in sorted(found):
        for other in sorted(found[room]):
            if not any(other in reached(between, found) for between in found[room] - {other}):
                lines.append(f"  {other} --> {room}")
    return "\n".join(lines)


def page() -> str:
    """The page with the drawing of today's imports."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    return f"{before}{BEGIN}```mermaid\n{drawing(imports(ROOT / 'sinkscope'))}\n```\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
