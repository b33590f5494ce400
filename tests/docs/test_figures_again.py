"""The quick figures are made again by the commands in their JSON, and the numbers are those that are committed."""

from __future__ import annotations

import json
from importlib import import_module

import pytest
from covering import slow
from repository import FIGURES
from same_kit import differences

from experiments import drawn
from experiments.papers.__main__ import main as papers
from experiments.script import run
from sinkscope.app.cli import main

NEAR = 2e-3  # processors add in different orders, and some values are stored with three digits
SLOW = (
    "barcode",
    "circuit",
    "clusters",
    "repeat",
    "lines",
    "patch-make",
    "repeat-attention",
    "papers/repeated_token_fig1_bundled",
)


@pytest.mark.parametrize("name", ["find_sinks", *map(slow, SLOW)])
def test_a_figure_is_what_its_command_makes(name, tmp_path, monkeypatch):
    monkeypatch.setattr(drawn, "write_png", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    recorded, made = json.loads((FIGURES / f"{name}.json").read_text()), tmp_path / f"{name}.json"
    words = recorded["provenance"]["argv"]
    if words[0] == "sinkscope":
        assert main([*words[1 : words.index("--json")], "--json", str(made)]) == 0
    elif words[2] == "experiments.papers":
        assert papers([*words[3:], "--out", str(made.parent)]) == 0
    else:
        run(import_module(words[2]).main, [*words[3:], "--out", str(tmp_path)])
    assert differences(recorded["result"], json.loads(made.read_text())["result"], NEAR) == []
