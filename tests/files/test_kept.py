"""No file of somebody else is emptied, cut short or replaced, and what a kill leaves of ours is carried on."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest
from refusals import refused

from sinkscope.files.output import check_writable, write_atomic, write_output
from sinkscope.files.store import Keyed, kept_in


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
    (tmp_path / name).write_text("my notes\n")
    with refused(rf"{name}|holds other files"):
        run(tmp_path)
    assert (tmp_path / name).read_text() == "my notes\n"


def test_a_run_without_records_begins_anew_but_not_in_place_of_foreign_settings(tmp_path: Path):
    with kept_in(tmp_path / "run", {"number": 0}, Entry):
        with refused(r"--out .*run is being written by another run"):
            kept_in(tmp_path / "run", {}, Entry).__enter__()
    assert len(run(tmp_path / "run")) == 3
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "settings.json").write_text('{"editor": "mine"}')
    with refused("editor was 'mine', now None, number was None, now 1"):
        run(tmp_path / "other")


def test_a_record_may_be_cut_anywhere(tmp_path: Path):
    want = run(tmp_path / "run")
    file = tmp_path / "run" / "runs.jsonl"
    whole = file.read_bytes()
    for length in range(0, len(whole), 3):
        file.write_bytes(whole[:length])
        assert run(tmp_path / "run") == want and file.read_bytes() == whole


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path, link = tmp_path / "a" / "b" / "x.json", tmp_path / "link"
    assert write_atomic(path, "ä\n") == path and path.read_bytes() == "ä\n".encode()
    link.symlink_to(path)
    before = path.stat().st_ino
    write_atomic(link, b"second")
    assert link.is_symlink() and path.read_bytes() == b"second" and path.stat().st_ino != before

    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_atomic(path, "new")
    assert os.listdir(path.parent) == ["x.json"] and path.read_bytes() == b"second"


def test_a_folder_without_permission_is_refused_before_the_work(tmp_path, monkeypatch):
    (tmp_path / "old").write_text("kept")
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    with refused("permission denied"):
        check_writable(tmp_path / "old")


def test_pipes_are_written_in_place():
    reading, writing = os.pipe()
    write_output(f"/dev/fd/{writing}", b"text")
    os.close(writing)
    with open(reading, "rb") as pipe:
        assert pipe.read() == b"text"
