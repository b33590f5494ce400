"""Scans of small models with few parts."""

from __future__ import annotations

import pytest

from sinkscope.app import scan as scanning

PARTS = ("find_sinks", "repeat")


def few_parts(patch: pytest.MonkeyPatch, names: tuple[str, ...] = PARTS) -> None:
    """Scan with these parts alone."""
    patch.setattr(scanning, "PARTS", [part for part in scanning.PARTS if part.name in names])
