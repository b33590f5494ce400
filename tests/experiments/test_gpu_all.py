"""The command that measures everything on a GPU: limits, failures, going on; and a rehearsal of all parts on a CPU."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from experiments.gpu import all as script
from experiments.gpu.all import Part


def part(name: str, source: str, **more) -> Part:
    return Part(name, (), (sys.executable, "-c", source, "{json}", "{dir}"), **more)


WRITES = "import json, sys; json.dump({{'result': 1}}, open(sys.argv[1], 'w'))"  # braces as the commands have them
CHILD = """
import subprocess, sys, pathlib, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
(pathlib.Path(sys.argv[2]) / "pids").write_text(str(child.pid))
open(sys.argv[1], "w").write('{{"result": "half"}}')
time.sleep(60)
"""


def run(parts: list[Part], out: Path, minutes: float = 1, total: float = 9) -> dict[str, Any]:
    return script.run_all(parts, out, minutes, total, {}, dry=True)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_part_that_takes_too_long_is_ended_with_its_children_and_keeps_what_it_wrote(tmp_path):
    began = time.monotonic()
    state = run([part("long", CHILD), part("next", WRITES)], tmp_path, minutes=0.05)
    assert time.monotonic() - began < 50
    assert state["long"]["state"] == "ended" and "0.1 minutes" in state["long"]["why"]
    assert not alive(int((tmp_path / "pids").read_text()))
    assert json.loads((tmp_path / "long.json").read_text())["result"] == "half"
    assert state["next"]["state"] == "done"


def test_a_failure_says_why_and_the_next_part_begins(tmp_path):
    state = run([part("bad", "raise SystemExit('error: no such shape')"), part("good", WRITES)], tmp_path)
    assert state["bad"]["state"] == "failed" and state["bad"]["why"] == "exit code 1: error: no such shape"
    found = json.loads((tmp_path / "good.json").read_text())
    here = found["machine"]
    assert found["result"] == 1 and {"device", "memory_bytes", "versions", "began", "ended", "seconds"} <= set(here)
    assert {"python", "torch", "transformers", "triton", "accelerate"} <= set(here["versions"])
    assert json.loads((tmp_path / "state.json").read_text()) == state


def test_what_is_done_is_not_done_again_and_what_failed_is(tmp_path):
    adds = "import sys, pathlib; f = pathlib.Path(sys.argv[2]) / 'n'; f.open('a').write('%s'); "
    fails = "sys.exit(3 if f.read_text().count('2') < 2 else 0)"
    parts = [part("one", adds % 1), part("two", adds % 2 + fails)]
    assert [s["state"] for s in run(parts, tmp_path).values()] == ["done", "failed"]
    assert [s["state"] for s in run(parts, tmp_path).values()] == ["done", "done"]
    run(parts, tmp_path)
    assert (tmp_path / "n").read_text() == "122"


def test_a_call_that_is_cut_off_goes_on_in_the_next(tmp_path):
    """The part that was running keeps what it wrote, and those after it have not begun."""
    writes = "import pathlib, sys, time; f = pathlib.Path(sys.argv[2]) / 'n'; had = f.exists(); f.open('a').write('1');"
    parts = [part("long", writes + "time.sleep(0 if had else 60)"), part("next", WRITES)]
    assert {name: about["state"] for name, about in run(parts, tmp_path, total=0.03).items()} == {"long": "ended"}
    assert {name: about["state"] for name, about in run(parts, tmp_path).items()} == {"long": "done", "next": "done"}
    assert (tmp_path / "n").read_text() == "11"


def test_every_script_of_the_folder_is_a_part():
    folder = Path(script.__file__).parent
    named = {"train_bundled" if p.name == "train" else p.name for p in script.PARTS}
    assert named == {file.stem for file in folder.glob("*.py")} - {"__init__", "all", "steps"}


@pytest.mark.slow
@pytest.mark.parametrize("name", [p.name for p in script.PARTS])
def test_rehearsal(name, tmp_path):
    """Every part runs on a CPU from the first line to the last, and its answers are right."""
    script.main(out=tmp_path, only=[name], dry=True)
    assert json.loads((tmp_path / "state.json").read_text())[name]["state"] == "done"
    if name != "train":
        steps = json.loads((tmp_path / f"{name}.json").read_text())["result"]
        assert steps and all(step.get("right", True) for step in steps.values()), steps
