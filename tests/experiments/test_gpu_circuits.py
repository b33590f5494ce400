"""The GPU script, on a small planted checkpoint and a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_it_finds_what_was_planted(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    options = "--shape tiny --device cpu --length 24 --sequences 32 --max-repeats 128".split()
    subprocess.run([sys.executable, "-m", "experiments.gpu.circuits", *options, "--out", str(out)], check=True)
    result = json.loads(out.read_text())["result"]
    assert result["found_sink_layer"] == result["planted_sink_layer"]
    assert result["tokens_in_their_planted_group"] == 1
    assert result["atlas"]["reached"] == result["atlas"]["tokens"] == 320
    shares = {(r["context"], r["source"]): r["most"] for r in result["attack"]["rows"]}
    assert shares["no BOS", "cluster"] == 1 and shares["no BOS", "random"] < 0.1 and shares["BOS", "cluster"] == 0
