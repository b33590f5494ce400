"""The scripts for a GPU, rehearsed on a CPU with tiny shapes."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import pytest

from experiments.gpu import planted
from experiments.script import run
from sinkscope.sinks.find.find import find_sinks

REHEARSED = {
    "users": "--shape tiny --rows 2 --prompt 112 --new 24 --repeats 200 --steps 8 --budget 96 --folder {out}",
    "overhead": "--shape lines-128 --contexts 96 --new 4 --pairs 2 --budget 72",
    "loopserve": "--shape lines-128 --lengths 128 256 --contexts 128 192 --new 8 --rounds 1 --budget 80 --shortest 0",
}


def test_every_script_of_the_folder_is_rehearsed():
    folder = Path(planted.__file__).parent
    scripts = {file.stem for file in folder.glob("*.py") if "\ndef main(" in file.read_text(encoding="utf-8")}
    assert scripts == {*REHEARSED}


def test_the_planted_sink_is_found(tmp_path):
    planted.make("tiny", tmp_path, "float32")
    truth = json.loads((tmp_path / "truth.json").read_text())
    found = find_sinks(tmp_path, tokens=["a"])
    assert (found.sink_layer, sorted(one.neuron for one in found.causal)) == (1, truth["neurons"])


@pytest.mark.slow
@pytest.mark.parametrize("name", REHEARSED)
def test_rehearsal(name, tmp_path):
    """A script runs from the first line to the last, and its answers are right."""
    out = tmp_path / "x.json"
    words = f"--device cpu --dtype float32 --out {out} {REHEARSED[name].format(out=tmp_path)}"
    run(import_module(f"experiments.gpu.{name}").main, words.split())
    steps = json.loads(out.read_text())["result"]
    assert steps and all(step.get("right", True) for step in steps.values()), steps
