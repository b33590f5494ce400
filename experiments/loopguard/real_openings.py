"""Openings of prose, dialogue, code and tables that real models continue; every second one is for choosing."""

from __future__ import annotations

import json
from pathlib import Path

KINDS: dict[str, list[str]] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
HALVES = ("choose", "report")


def openings_of(half: str, count: int = 12) -> list[tuple[str, str]]:
    """The openings of a half, so many of each kind, with their kinds; the halves take turns within each kind."""
    found: list[tuple[str, str]] = []
    for kind, texts in KINDS.items():
        for text in texts[HALVES.index(half) :: len(HALVES)][:count]:
            found.append((kind, text))
    return found
