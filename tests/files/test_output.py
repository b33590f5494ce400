from __future__ import annotations

import os

import pytest
from refusals import refused

from sinkscope.files.output import check_writable, write_atomic
from sinkscope.files.plain import as_utf8, check_encodable


def test_writes_whole_file_and_makes_folders(tmp_path):
    path = tmp_path / "a" / "b" / "x.json"
    assert write_atomic(path, "ä\n") == path
    assert path.read_bytes() == "ä\n".encode()
    write_atomic(path, b"second")
    assert path.read_bytes() == b"second"
    assert os.listdir(path.parent) == ["x.json"]


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    write_atomic(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"


def test_a_folder_without_permission_is_refused_before_the_work(tmp_path, monkeypatch):
    (tmp_path / "old").write_text("kept")
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    with refused("permission denied"):
        check_writable(tmp_path / "old")


def test_interrupt_while_writing_leaves_nothing(tmp_path, monkeypatch):
    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_atomic(tmp_path / "x", "new")
    assert os.listdir(tmp_path) == []


def test_an_argument_in_utf_8_is_read_as_such_whatever_the_terminal_says():
    typed = "naïve 🙂".encode().decode("ascii", "surrogateescape")
    assert as_utf8(typed) == "naïve 🙂" and as_utf8("naïve") == "naïve"
    latin = b"na\xefve".decode("ascii", "surrogateescape")
    assert as_utf8(latin) == latin
    with refused(words=["a byte that is not UTF-8, character 3"]):
        check_encodable(latin, "the prompt")
    with refused(words=["half of a surrogate pair, character 2"]):
        check_encodable("a\ud83d", "the prompt")
