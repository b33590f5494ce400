"""Draws the rooms of the package from their imports, as docs/architecture.svg: python -m tools.architecture

A line leads down from a room to one that imports it. Imports that a longer way implies are left out.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs/architecture.svg"
WIDTH, BOX, FLOOR = 640, (110, 30), 70


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


def arrows(found: dict[str, set[str]]) -> list[tuple[str, str]]:
    """From a room to one that imports it, without those that a longer way implies."""
    lines: list[tuple[str, str]] = []
    for room in sorted(found):
        for other in sorted(found[room]):
            if not any(other in reached(between, found) for between in found[room] - {other}):
                lines.append((other, room))
    return lines


def floor(room: str, found: dict[str, set[str]]) -> int:
    """How many rooms lie below a room, along the longest way of arrows."""
    return max((1 + floor(other, found) for other in found[room]), default=0)


def drawing(found: dict[str, set[str]]) -> str:
    """The rooms as a picture: what imports nothing stands at the top."""
    floors: dict[int, list[str]] = {}
    for room in sorted(found):
        floors.setdefault(floor(room, found), []).append(room)
    place: dict[str, tuple[float, float]] = {}
    for number, rooms in floors.items():
        for i, room in enumerate(rooms, 1):
            place[room] = WIDTH * i / (len(rooms) + 1), FLOOR * (number + 0.5)
    size = f"0 0 {WIDTH} {FLOOR * len(floors)}"
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{size}" font-family="sans-serif" font-size="14">']
    for other, room in arrows(found):
        (x1, y1), (x2, y2) = place[other], place[room]
        ends = f'x1="{x1:.0f}" y1="{y1 + BOX[1] / 2:.0f}" x2="{x2:.0f}" y2="{y2 - BOX[1] / 2:.0f}"'
        parts.append(f'<line {ends} stroke="#888"/>')
    for room, (x, y) in place.items():
        box = f'x="{x - BOX[0] / 2:.0f}" y="{y - BOX[1] / 2:.0f}" width="{BOX[0]}" height="{BOX[1]}"'
        parts.append(f'<rect {box} rx="5" fill="#e8f1f8" stroke="#0072b2"/>')
        parts.append(f'<text x="{x:.0f}" y="{y + 5:.0f}" text-anchor="middle" fill="#1c1c1c">{room}</text>')
    return "\n".join([*parts, "</svg>\n"])


if __name__ == "__main__":
    PICTURE.write_text(drawing(imports(ROOT / "sinkscope")), encoding="utf-8")
