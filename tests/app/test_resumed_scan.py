"""A scan that was stopped and resumed writes the files of one that ran through."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

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


def test_the_seed_of_a_draw_is_the_same_in_every_process_and_differs_by_purpose():
    assert seed_of(0, "controls of layer 3") == 17197100875551572
    seeds = {seed_of(seed, purpose) for seed in range(20) for purpose in ("a", "b", "")}
    assert len(seeds) == 60 and all(0 <= seed < 1 << 63 for seed in seeds)
