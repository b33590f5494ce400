"""The index of a corpus against plain search."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.repeated_token import corpus as module
from experiments.repeated_token.corpus import build_index, open_corpus
from sinkscope.errors import SinkscopeError

SMALL = st.text("ab \0é", max_size=30).map(str.encode)


def _longest(text: bytes, files: list[bytes]) -> int:
    pieces = (text[i:j] for i in range(len(text)) for j in range(i + 1, len(text) + 1) if b"\0" not in text[i:j])
    return max((len(p) for p in pieces if any(p in f for f in files)), default=0)


@given(st.lists(SMALL, min_size=1, max_size=4), SMALL)
def test_longest_piece_is_what_plain_search_finds(files, text):
    index = build_index([(str(i), f) for i, f in enumerate(files)], "x")
    found = index.longest(text)
    piece = text[found.start : found.start + found.length]
    assert found.length == len(piece) == _longest(text, files)
    assert not piece or piece in files[int(found.file)]
    data = index.data.tobytes()
    behind = [data[i:].ljust(len(data), b"\0") for i in index.order.tolist()]
    assert behind == sorted(behind)


def test_index_is_kept_and_used_again(tmp_path, monkeypatch):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "one.txt").write_text("to be or not to be")
    (folder / "two.bin").write_bytes(b"\xff\xfe")
    made = open_corpus(folder)
    kept = list(tmp_path.glob("*.npz"))
    assert len(kept) == 1
    monkeypatch.setattr(module, "build_index", None)  # a second sorting would fail
    again = open_corpus(folder)
    assert again.longest(b"is not to be?") == made.longest(b"is not to be?")
    assert (again.longest(b"is not to be?").length, again.names) == (len(b" not to be"), ("one.txt",))
    assert open_corpus(None, kept[0]).name == made.name  # pyright: ignore[reportOptionalMemberAccess]


def _saved(change: dict[str, object]) -> Callable[[Path, dict[str, Any]], None]:
    return lambda path, arrays: np.savez(path, **{**arrays, **change})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "damage",
    [
        _saved({"data": np.array([b"a"], dtype=object)}),
        _saved({"order": np.full(19, 10**6, np.int32)}),
        _saved({"ends": np.array([10**9], np.int64)}),
        lambda path, arrays: np.savez(path, data=arrays["data"]),
        lambda path, arrays: np.savez_compressed(path, **{**arrays, "data": np.zeros(10**8, np.uint8)}),
        lambda path, _: path.write_bytes(path.read_bytes()[:-50]),
        lambda path, _: path.write_bytes(path.read_bytes()[:200] + b"\xff" * 60 + path.read_bytes()[260:]),
    ],
)
def test_a_damaged_index_is_one_line(tmp_path, damage):
    """Wrong types, shapes and ranges, a cut file, and one that would unpack to any size."""
    path = tmp_path / "x.npz"
    index = build_index([("one.txt", b"to be or not to be")], "x")
    index.save(path)
    with np.load(path) as found:
        arrays = dict(found)
    damage(path, arrays)
    with pytest.raises(SinkscopeError, match=r"^x\.npz is not a corpus index: remove it, and give --corpus"):
        open_corpus(None, path)
