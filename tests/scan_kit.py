"""Scans of small models with few parts, in this process and in those that it starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from sinkscope.app import scan as scanning
from sinkscope.app.scan import scan_parts

PARTS = ("find_sinks", "repeat")
IN_WORKERS = """
import sys

if any("spawn_main" in word for word in sys.orig_argv):
    from sinkscope.app import scan as scanning

    parts = [part for part in scanning.scan_parts() if part.name in {parts}]
    scanning.scan_parts = lambda: parts
"""


def few_parts(patch: pytest.MonkeyPatch, folder: Path, more: str = "") -> None:
    """Scan with few parts alone, in spawned processes too: these run what `folder` says, and `more`, as they start."""
    parts = [part for part in scan_parts() if part.name in PARTS]
    patch.setattr(scanning, "scan_parts", lambda: parts)
    (folder / "sitecustomize.py").write_text(IN_WORKERS.format(parts=PARTS) + more)
    patch.syspath_prepend(folder)
    patch.setenv("PYTHONPATH", str(folder), prepend=":")
