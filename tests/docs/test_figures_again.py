"""The quick figures are made again by the commands in their JSON, and the numbers are those that are committed."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from repository import FIGURES
from same_kit import differences

from experiments import drawn
from experiments.script import run
from sinkscope.app.cli import main

QUICKEST = ("find_sinks",)  # run by default
QUICK = ("barcode", "circuit", "clusters", "repeat")
QUICK += ("lines", "patch-make", "repeat-attention", "separate")
OUTPUTS = ("--json", "--html", "--png")


def recorded(name: str) -> Any:
    return json.loads((FIGURES / f"{name}.json").read_text())


def make_again(name: str, folder: Path) -> Any:
    """What the command of a figure writes, without its picture."""
    words = recorded(name)["provenance"]["argv"]
    options = [word for number, word in enumerate(words) if word not in OUTPUTS and words[number - 1] not in OUTPUTS]
    if words[:2] == ["python", "-m"]:
        if "--out" in options:
            options = options[: options.index("--out")]
        run(import_module(words[2]).main, [*options[3:], "--out", str(folder)])
        made = folder / f"{name}.json"
    else:
        made = folder / f"{name}-again.json"
        assert main([*options[1:], "--json", str(made)]) == 0
    return json.loads(made.read_text())["result"]


@pytest.mark.parametrize("name", [*QUICKEST, *(pytest.param(name, marks=pytest.mark.slow) for name in QUICK)])
def test_a_figure_is_what_its_command_makes(name, tmp_path, monkeypatch):
    monkeypatch.setattr(drawn, "write_png", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    assert differences(recorded(name)["result"], make_again(name, tmp_path), 1e-4) == []
