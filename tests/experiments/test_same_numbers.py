"""The comparison of recordings finds what changed and passes over settings, provenance and times."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from experiments.same_numbers import app

RECORDED: dict[str, Any] = {
    "exit": 0,
    "schema": 1,
    "kind": "repeat",
    "model": {"name": "m", "n_layers": 2},
    "result": {"rows": [{"norm": 1.5, "seconds": 3.0}, {"norm": 0.1}], "layer": 4, "found": True},
    "settings": {"seed": 0},
    "provenance": {"seconds": 1.0},
    "massive": {"kind": "massive", "result": {"peak": 2}, "settings": {}, "provenance": {"seed": 1}},
}


def compared(tmp_path: Path, after: Any, *options: str) -> tuple[int, str]:
    for folder, content in (("before", RECORDED), ("after", after)):
        file = tmp_path / folder / "llama/repeat.json"
        file.parent.mkdir(parents=True)
        if content is not None:
            file.write_text(json.dumps(content))
    done = CliRunner().invoke(app, ["compare", str(tmp_path / "before"), str(tmp_path / "after"), *options])
    return done.exit_code, done.output


def changed(*path: Any, to: Any = None) -> dict[str, Any]:
    """The recording with the value at `path` replaced, or taken away."""
    whole = copy.deepcopy(RECORDED)
    inner: Any = whole
    for step in path[:-1]:
        inner = inner[step]
    if to is None:
        del inner[path[-1]]
    else:
        inner[path[-1]] = to
    return whole


@pytest.mark.parametrize(
    ("after", "line"),
    [
        (changed("result", "rows", 1, "norm", to=0.10000000000000002), "result.rows[1].norm: 0.1, now 0.100000000000"),
        (changed("result", "layer", to=4.0), "result.layer: 4, now 4.0"),
        (changed("result", "layer"), "result.layer: missing, was 4"),
        (changed("result", "rows", 1), "result.rows: 2 items, now 1"),
        (changed("massive", "result", "peak", to=3), "massive.result.peak: 2, now 3"),
        ({"exit": 2, "refused": "error: no"}, "exit: 0, now 2"),
        (None, "result: missing"),
    ],
)
def test_a_difference_is_found(tmp_path: Path, after: Any, line: str) -> None:
    code, output = compared(tmp_path, after)
    assert code == 1
    assert "DIFFERS llama/repeat" in output and f"    {line}" in output
    assert "0 of 1 results are equal" in output


@pytest.mark.parametrize(
    "after",
    [
        RECORDED,
        changed("settings", to={"seed": 1}),
        changed("provenance", "seconds", to=9.0),
        changed("massive", "provenance"),
        changed("result", "rows", 0, "seconds", to=4.0),
    ],
)
def test_settings_provenance_and_times_may_differ(tmp_path: Path, after: Any) -> None:
    code, output = compared(tmp_path, after)
    assert (code, output.splitlines()[-1]) == (0, "1 of 1 results are equal."), output


def test_only_one_command_is_compared_and_nothing_to_compare_is_no_success(tmp_path: Path) -> None:
    assert compared(tmp_path / "a", changed("kind", to="x"), "--only", "repeat")[0] == 1
    code, output = compared(tmp_path / "b", RECORDED, "--only", "atlas")
    assert code == 1 and "0 of 0" in output
