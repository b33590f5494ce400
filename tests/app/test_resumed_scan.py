"""A scan that was stopped and resumed writes the files of one that ran through."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from sinkscope.app.scan import PARTS, scan
from sinkscope.models.draws import seed_of

pytestmark = pytest.mark.few_texts


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


def compare_resumed(model: Path | None, tmp_path: Path) -> None:
    """Stop a scan after each of its parts, go on, and compare all files."""
    whole = tmp_path / "whole"
    scan(model, out=whole, quick=True)
    expected = results(whole)
    parts = [part for part in PARTS if part.quick is not None]
    assert len(parts) > 1 and len(expected) > len(parts)
    for number in range(1, len(parts)):
        stopped = tmp_path / f"stopped{number}"
        shutil.copytree(whole, stopped)
        for part in parts[number:]:
            (stopped / part.file).unlink()
        scan(model, out=stopped, quick=True)
        for name, content in results(stopped).items():
            assert content == expected[name], f"{name} after a stop behind {parts[number - 1].name}"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_scan_of_the_bundled_model_is_the_same_after_a_stop_behind_each_part(tmp_path):
    compare_resumed(None, tmp_path)


def test_the_seed_of_a_draw_is_the_same_in_every_process_and_differs_by_purpose():
    assert seed_of(0, "controls of layer 3") == 17197100875551572
    seeds = {seed_of(seed, purpose) for seed in range(20) for purpose in ("a", "b", "")}
    assert len(seeds) == 60 and all(0 <= seed < 1 << 63 for seed in seeds)
