"""Scans of small models with few parts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sinkscope.app import scan as scanning

PARTS = ("find_sinks", "repeat")


def few_parts(patch: pytest.MonkeyPatch, names: tuple[str, ...] = PARTS) -> None:
    """Scan with these parts alone."""
    patch.setattr(scanning, "PARTS", [part for part in scanning.PARTS if part.name in names])


def results(folder: Path) -> dict[str, Any]:
    """What every part found, without the time that it took."""
    found: dict[str, Any] = {}
    for file in sorted(folder.glob("*.json")):
        content = json.loads(file.read_text())
        content.pop("provenance", None)
        found[file.name] = content
    return found
