"""The GPU script end to end, on a CPU with a tiny shape: it must run unattended and find what was planted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_script_finds_what_was_planted(tmp_path: Path) -> None:
    words = [
        "-m",
        "experiments.gpu.find_sinks",
        "--shape",
        "tiny",
        "--device",
        "cpu",
        "--out",
        str(tmp_path / "r.json"),
    ]
    subprocess.run([sys.executable, *words], check=True, capture_output=True, cwd=Path(__file__).parents[2])
    result = json.loads((tmp_path / "r.json").read_text())["result"]
    assert result["found_what_was_planted"]
    assert result["streamed"]["sink_layer"] == result["in_memory"]["sink_layer"] == 1
