"""Scans of small models with few parts, in this process and in those that it starts; there they die where planted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sinkscope.app import scan as scanning

PARTS = ("find_sinks", "repeat")
DIES_ONCE, HANGS = "dies-once", "hangs"
IN_WORKERS = """
import os, sys, time
from pathlib import Path

if sys.orig_argv[1:4] == ["-m", "sinkscope", "scan"]:
    from sinkscope.app import scan as scanning
    from sinkscope.sinks.find import attention_received

    attention_received.RATE_TEXTS = 8
    scanning.PARTS = [part for part in scanning.PARTS if part.name in {parts}]
    measured = scanning._measured

    def planted(part, setup, *rest):
        file = Path(__file__).with_name(setup.target.name.rpartition("/")[2] + ".planted")
        if part.name == "repeat" and file.exists():
            order = file.read_text()
            if order == "dies-once":
                file.unlink()
            elif order == "hangs":
                time.sleep(600)
            os._exit(9)
        return measured(part, setup, *rest)

    scanning._measured = planted
"""


def few_parts(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Scan with few parts alone, in other processes too: these run what `folder` holds as they start."""
    patch.setattr(scanning, "PARTS", [part for part in scanning.PARTS if part.name in PARTS])
    (folder / "sitecustomize.py").write_text(IN_WORKERS.replace("{parts}", repr(PARTS)))
    patch.syspath_prepend(folder)
    patch.setenv("PYTHONPATH", str(folder), prepend=":")


def plant(folder: Path, model: Path, order: str) -> None:
    """Let the process that scans a model do this when one part of two is finished."""
    (folder / f"{model.name}.planted").write_text(order)


def results(folder: Path) -> dict[str, Any]:
    """What every part found, without the time that it took."""
    found: dict[str, Any] = {}
    for file in sorted(folder.glob("*.json")):
        content = json.loads(file.read_text())
        content.pop("provenance", None)
        for group in content.get("result", {}).get("groups", ()):
            del group["metrics"]["time"]
        found[file.name] = content
        if file.name == "card.json":
            for part in content["result"]["parts"]:
                del part["seconds"], part["peak_memory_bytes"]
    return found
