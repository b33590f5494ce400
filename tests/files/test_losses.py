"""No file of somebody else is emptied, cut short or replaced, and what a kill leaves of ours is carried on."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest
from refusals import refused

from sinkscope.files.output import write_output
from sinkscope.files.store import Keyed, kept_in

MINE = b"my notes\n"


@dataclass(frozen=True)
class Entry(Keyed):
    name: str
    value: int


def run(folder: Path, names: str = "abc") -> list[Entry]:
    with kept_in(folder, {"number": 1}, Entry) as kept:
        for number, name in enumerate(names):
            kept.append([Entry(name, number)])
        return list(kept.records.values())


@pytest.mark.parametrize("name", ["runs.jsonl", "settings.json"])
def test_a_foreign_file_in_the_folder_is_kept(tmp_path: Path, name: str):
    folder, mine = tmp_path / "run", tmp_path / "mine"
    folder.mkdir()
    mine.write_bytes(MINE)
    mine.rename(folder / name)
    with refused(rf"{name}|run holds other files"):
        run(folder)
    assert (folder / name).read_bytes() == MINE


def test_a_run_without_records_begins_anew_but_not_in_place_of_foreign_settings(tmp_path: Path):
    with kept_in(tmp_path / "run", {"number": 0}, Entry):
        pass
    assert len(run(tmp_path / "run")) == 3
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "settings.json").write_text('{"editor": "mine"}')
    with refused('editor was "mine", now null, number was null, now 1'):
        run(tmp_path / "other")


def test_a_record_may_be_cut_anywhere(tmp_path: Path):
    want = run(tmp_path / "run")
    file = tmp_path / "run" / "runs.jsonl"
    whole = file.read_bytes()
    for length in range(0, len(whole), 3):
        file.write_bytes(whole[:length])
        assert run(tmp_path / "run") == want and file.read_bytes() == whole


def test_pipes_are_written_in_place():
    reading, writing = os.pipe()
    write_output(f"/dev/fd/{writing}", b"text")
    os.close(writing)
    with open(reading, "rb") as pipe:
        assert pipe.read() == b"text"


def test_a_second_writer_of_a_folder_is_refused(tmp_path: Path):
    with kept_in(tmp_path / "r", {}, Entry, option="--resume"):
        with refused(r"--resume .*r is being written by another run"):
            kept_in(tmp_path / "r", {}, Entry, option="--resume").__enter__()
