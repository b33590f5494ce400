"""The command that measures everything on a GPU: limits, failures, going on; and a rehearsal of all parts on a CPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from experiments.gpu import all as script


def run(monkeypatch: pytest.MonkeyPatch, sources: dict[str, str], out: Path, total: float = 1.0) -> int:
    """The exit status of a call whose parts are these programs."""
    monkeypatch.setattr(script, "REHEARSALS", sources)
    monkeypatch.setattr(
        script, "command_of", lambda part, out, *_: [sys.executable, "-c", sources[part], str(out / part)]
    )
    try:
        script.main(out=out, total=total, dry=True)
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def test_a_failure_says_why_and_the_next_part_begins(tmp_path, monkeypatch, capsys):
    parts = {"bad": "raise SystemExit('error: no such shape')", "good": "print('here')"}
    assert run(monkeypatch, parts, tmp_path) == 1
    assert capsys.readouterr().out == "bad: exit code 1: error: no such shape\ngood: done\n"
    assert (tmp_path / "good.log").read_text() == "here\n"


def test_every_script_of_the_folder_is_a_part():
    folder = Path(script.__file__).parent
    assert set(script.PARTS) == {file.stem for file in folder.glob("*.py")} - {
        "__init__",
        "all",
        "steps",
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", script.REHEARSALS)
def test_rehearsal(name, tmp_path):
    """Every part runs on a CPU from the first line to the last, and its answers are right."""
    script.main(out=tmp_path, only=[name], dry=True)
    steps = json.loads((tmp_path / f"{name}.json").read_text())["result"]
    assert steps and all(step.get("right", True) for step in steps.values()), steps
