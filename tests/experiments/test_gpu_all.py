"""The command that measures everything on a GPU: limits, failures, going on; and a rehearsal of all parts on a CPU."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from experiments.gpu import all as script
from experiments.gpu.tables import main as tables

CHILD = """
import os, sys, time
child = os.fork()
if child:
    with open(sys.argv[1], "w") as file:
        file.write(str(child))
time.sleep(60)
"""


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


@dataclass(frozen=True)
class Program(script.Part):
    """A part whose words are a program, which is given a path."""

    path: Path = Path()

    def command(self, seconds: float) -> list[str]:
        return [sys.executable, "-c", self.words, str(self.path)]


def run(monkeypatch: pytest.MonkeyPatch, sources: dict[str, str], out: Path, total: float = 1.0) -> int:
    """The exit status of a call whose parts are these programs."""
    parts = {part: Program(source, path=out / part) for part, source in sources.items()}
    monkeypatch.setattr(script, "parts_of", lambda *_: parts)
    try:
        script.main(out=out, total=total, dry=True)
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def test_a_part_that_takes_too_long_is_ended_with_its_children_and_keeps_what_it_wrote(tmp_path, monkeypatch, capsys):
    assert run(monkeypatch, {"long": CHILD}, tmp_path, total=0.04) == 1
    assert "long: not done in time" in capsys.readouterr().out
    child, end = int((tmp_path / "long").read_text()), time.monotonic() + 20
    while alive(child) and time.monotonic() < end:  # it was told to end, and nobody waits for it
        time.sleep(0.05)
    assert not alive(child)


def test_a_failure_says_why_and_the_next_part_begins(tmp_path, monkeypatch, capsys):
    parts = {"bad": "raise SystemExit('error: no such shape')", "good": "print('here')"}
    assert run(monkeypatch, parts, tmp_path) == 1
    assert capsys.readouterr().out == "bad: exit code 1: error: no such shape\ngood: done\n"
    assert (tmp_path / "good.log").read_text() == "here\n"


def test_what_is_done_is_not_done_again_and_what_failed_is(tmp_path, monkeypatch):
    adds = "import sys, pathlib; f = pathlib.Path(sys.argv[1]).with_name('n'); f.open('a').write('%s'); "
    fails = "sys.exit(3 if f.read_text().count('2') < 2 else 0)"
    parts = {"one": adds % 1, "two": adds % 2 + fails}
    assert [run(monkeypatch, parts, tmp_path) for _ in range(3)] == [1, 0, 0]
    assert (tmp_path / "n").read_text() == "122"


MEETS = """
import pathlib, sys, time
here = pathlib.Path(sys.argv[1])
here.touch()
while len(list(here.parent.glob("meets-?"))) < 2:
    time.sleep(0.02)
"""


def test_what_is_not_timed_runs_at_the_same_time(tmp_path):
    parts: dict[str, script.Part] = {name: Program(MEETS, path=tmp_path / name) for name in ("meets-1", "meets-2")}
    assert script.make(parts, tmp_path, time.monotonic() + 60, dry=False) == []


def test_a_part_that_runs_alone_leaves_time_for_the_others(tmp_path, monkeypatch):
    monkeypatch.setitem(script.AT_MOST, "bands", 0.2)
    parts: dict[str, script.Part] = {"bands": Program("import time; time.sleep(60)", alone=True)}
    problems = script.make(parts, tmp_path, time.monotonic() + 500, dry=False)
    assert problems == ["not done in time; give the command again to go on"]  # of its own limit


def test_every_script_of_the_folder_is_a_part():
    folder = Path(script.__file__).parent
    helpers = {"__init__", "all", "steps", "flex", "tables"}
    alone = {"real", "last_token"}  # commands of their own
    assert {*script.SCRIPTS} == {file.stem for file in folder.glob("*.py")} - helpers - alone
    for room in script.ROOMS:
        assert list((folder.parents[1] / "tests" / room).glob("test_*.py")), room


def test_what_no_page_has_yet_is_made_by_default_and_what_is_timed_comes_first():
    parts = script.parts_of(Path("out"), [Path("real/m.gguf")], Path("teacher"), dry=False)
    default = [name for name, part in parts.items() if not part.by_name]
    assert default[:5] == ["bands", "overhead", "fault", "net-float32", "net-bfloat16"]
    assert default[5:] == ["suite-kernels", "suite", "family-48m", "family-120m", "loops-m"]
    assert [name for name in default if parts[name].alone] == ["bands", "overhead"]
    assert parts["bands"].command(99.6)[-1].endswith("--seconds 100")
    family = parts["family-48m"].command(1)[-1]
    assert "--teacher teacher --out out/family-48m.txt" in family and "--stories out/family-48m.txt" in family


def test_models_that_are_given_are_read_by_the_commands_of_the_package():
    parts = script.parts_of(Path("out"), [Path("real/m.gguf")], Path("teacher"), dry=False)
    assert {*script.COMMANDS, *script.OF_REAL} == {name.removesuffix("-m") for name in parts if name.endswith("-m")}
    for name, part in parts.items():
        on_its_own = name in ("shape", "adapters") or name.startswith(("suite", "fault"))
        assert on_its_own or re.search("--device cuda|device=cuda", part.words), name


def planted_is_needed(model: Path, result: Path) -> bool:
    """Whether a spike of a result of `find-sinks` needs the neurons that were planted, and no others."""
    planted = json.loads((model / "circuit.json").read_text())["neurons"]
    sites = [(one["layer"], one["neuron"]) for one in planted]
    for spike in json.loads(result.read_text())["result"]["spikes"]:
        if [(one["layer"], one["neuron"]) for one in (spike["needed"] or {"neurons": []})["neurons"]] == sites:
            return True
    return False


@pytest.mark.slow
def test_rehearsal(tmp_path, capsys):
    """Every part runs on a CPU from the first line to the last, and its answers are right."""
    script.main(out=tmp_path, dry=True, total=60)
    script.main(out=tmp_path, dry=True, total=60, only=["adapters", "shape", "find-sinks-shape"])
    assert planted_is_needed(tmp_path / "shape", tmp_path / "find-sinks-shape.json")
    results: dict[str, dict[str, dict[str, Any]]] = {}
    for name in script.SCRIPTS:
        if (file := tmp_path / f"{name}.json").is_file():
            results[name] = json.loads(file.read_text())["result"]
            assert all(step.get("right", True) for step in results[name].values()), name
    assert "overhead" in results
    for size in ("tiny", "small"):
        assert planted_is_needed(tmp_path / f"family-{size}", tmp_path / f"family-{size}.json")
        assert json.loads((tmp_path / f"family-{size}/training.json").read_text())["step"] == 70
    capsys.readouterr()
    tables(tmp_path)
    said = capsys.readouterr().out
    assert [line for line in said.splitlines() if line.startswith("## ")][-3:] == [
        "## A token over stock attention",
        "## Checks",
        "## Models",
    ]
    assert " draws, 0 kinds of failures" in said and " passed" in said and "family-small-answers" in said
