"""The GPU script on a CPU: two steps of both models, measured for the card, and a run that is not done again."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from experiments import train_bundled
from experiments.bundled import card, entry
from experiments.gpu import train_bundled as script

TALE = (
    "Once there was a {0} dog. The {0} dog had a {1} ball. One day the ball rolled into the river. He was sad. The end."
)


@pytest.mark.slow
def test_script_runs_unattended_without_bridge_and_nnsight(tmp_path: Path, monkeypatch: Any) -> None:
    for name in ("transformer_lens", "nnsight"):
        monkeypatch.setitem(sys.modules, name, None)  # an import of it fails
    monkeypatch.setattr(train_bundled, "PASSAGES", 100)
    monkeypatch.setattr(entry, "DOCUMENTS", 2)
    told = tmp_path / "told.txt"
    told.write_text("".join(TALE.format(n, n % 7) * 6 + "\n<|end|>\n" for n in range(150)))
    out = tmp_path / "out"
    words = f"--out {out} --stories {told} --steps 2 --tokens-per-step 512 --size tiny --device cpu --no-loops".split()
    script.main(words)
    found = {name: json.loads((out / name / "measured.json").read_text()) for name in ("planted", "unplanted")}
    assert found["planted"]["fixed"]["unchanged"]
    assert "fixed" not in found["unplanted"]
    for run in found.values():
        assert run["training"]["settings"]["steps"] == 2
        # Two steps leave the first token's probability what it is by chance.
        assert run["conditions"]["ditto"]["16"]["8"] < 0.01
        assert run["conditions"]["sampled"]["openings"] == 20
    text = card.card(found["planted"], found["unplanted"])
    assert "130 short stories" in text and "The first 550 steps" in text
    before = (out / "planted" / "model.safetensors").stat().st_mtime_ns, (out / "planted" / "log.jsonl").read_text()
    script.main(words)
    assert (out / "planted" / "log.jsonl").read_text() == before[1]
