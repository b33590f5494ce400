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


def run(folder: Path) -> list[Entry]:
    with kept_in(folder, {"number": 1}, Entry) as kept:
        for name in "abc":
            kept.append([Entry(name)])
        return list(kept.records.values())


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("runs.jsonl", "my notes\n", "holds other files"),
        ("settings.json", "my notes\n", "settings.json"),
        ("settings.json", '{"editor": "mine"}', "editor was 'mine', now None, number was None, now 1"),
    ],
)
def test_a_foreign_file_in_the_folder_is_kept(tmp_path, name, content, says):
    (tmp_path / name).write_text(content)
    with refused(says):
        run(tmp_path)
    assert (tmp_path / name).read_text() == content


@pytest.mark.parametrize("settings", ['{"editor": "mine"}', "my settings"])
def test_a_foreign_line_without_an_end_is_kept(tmp_path, settings):
    (tmp_path / "settings.json").write_text(settings)
    (tmp_path / "runs.jsonl").write_text("my notes")
    with refused("settings"):
        run(tmp_path)
    assert (tmp_path / "runs.jsonl").read_text() == "my notes"


def test_a_run_without_records_begins_anew_and_no_two_write_at_once(tmp_path):
    with kept_in(tmp_path, {"number": 0}, Entry):
        with refused("is being written by another run"):
            kept_in(tmp_path, {}, Entry).__enter__()
    assert len(run(tmp_path)) == 3


def test_a_record_may_be_cut_anywhere(tmp_path):
    want, file = run(tmp_path), tmp_path / "runs.jsonl"
    whole = file.read_bytes()
    for length in range(0, len(whole), 3):
        file.write_bytes(whole[:length])
        assert run(tmp_path) == want and file.read_bytes() == whole


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path, link = tmp_path / "a" / "b" / "x.json", tmp_path / "link"
    assert write_atomic(path, "ä\n") == path and path.read_bytes() == "ä\n".encode()
    link.symlink_to(path)
    write_atomic(link, b"second")
    assert link.is_symlink() and path.read_bytes() == b"second"

    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_atomic(path, "new")
    assert os.listdir(path.parent) == ["x.json"] and path.read_bytes() == b"second"
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    with refused("permission denied"):
        check_writable(path)


def test_pipes_are_written_in_place():
    reading, writing = os.pipe()
    write_output(f"/dev/fd/{writing}", b"text")
    os.close(writing)
    with open(reading, "rb") as pipe:
        assert pipe.read() == b"text"
