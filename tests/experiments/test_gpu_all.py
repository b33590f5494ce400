"""The command that measures everything on a GPU: all of its parts are there, and a rehearsal of each on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.gpu import all as script


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
