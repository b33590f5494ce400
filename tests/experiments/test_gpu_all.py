"""The command that measures everything on a GPU: limits, failures, going on; and a rehearsal of all parts on a CPU."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest

from experiments.gpu import all as script

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


def run(monkeypatch: pytest.MonkeyPatch, sources: dict[str, str], out: Path, total: float = 1.0) -> int:
    """The exit status of a call whose parts are these programs."""
    parts = {part: [sys.executable, "-c", source, str(out / part)] for part, source in sources.items()}
    monkeypatch.setattr(script, "parts_of", lambda *_: parts)
    try:
        script.main(out=out, total=total, dry=True)
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def test_a_part_that_takes_too_long_is_ended_with_its_children_and_keeps_what_it_wrote(tmp_path, monkeypatch, capsys):
    began = time.monotonic()
    assert run(monkeypatch, {"long": CHILD}, tmp_path, total=0.04) == 1
    assert time.monotonic() - began < 50
    assert "long: not done after 0.0 minutes" in capsys.readouterr().out
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


def test_every_script_of_the_folder_is_a_part():
    folder = Path(script.__file__).parent
    helpers = {"__init__", "all", "steps", "flex"}
    alone = {"bands", "real", "last_token"}  # commands of their own
    assert set(script.REHEARSALS) == {file.stem for file in folder.glob("*.py")} - helpers - alone


def test_models_that_are_given_are_read_by_the_commands_of_the_package():
    parts = script.parts_of(Path("out"), [Path("real/m.gguf")], dry=False)
    assert {*script.COMMANDS, *script.OF_REAL} == {name.removesuffix("-m") for name in parts if name.endswith("-m")}
    for name, words in parts.items():
        assert name == "shape" or words[-4:] == ["--device", "cuda", "--dtype", "bfloat16"]


@pytest.mark.slow
def test_rehearsal(tmp_path):
    """Every part runs on a CPU from the first line to the last, and its answers are right."""
    script.main(out=tmp_path, dry=True)
    planted = json.loads((tmp_path / "shape/truth.json").read_text())["neurons"]
    needed = json.loads((tmp_path / "find-sinks-shape.json").read_text())["result"]["spikes"][0]["needed"]["neurons"]
    assert sorted(one["neuron"] for one in needed) == sorted(one["neuron"] for one in planted)
    for name in script.REHEARSALS:
        steps = json.loads((tmp_path / f"{name}.json").read_text())["result"]
        assert steps and all(step.get("right", True) for step in steps.values()), steps
