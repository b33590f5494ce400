"""The index of a corpus against plain search."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.bundled.corpus import is_validation, library_files
from experiments.repeated_token import corpus as module
from experiments.repeated_token.corpus import CorpusIndex, build_index, library_texts, open_corpus
from sinkscope.errors import SinkscopeError

SMALL = st.text("ab \0é", max_size=30).map(str.encode)


def _longest(text: bytes, files: list[bytes]) -> int:
    pieces = (text[i:j] for i in range(len(text)) for j in range(i + 1, len(text) + 1) if b"\0" not in text[i:j])
    return max((len(p) for p in pieces if any(p in f for f in files)), default=0)


@given(st.lists(SMALL, min_size=1, max_size=4), SMALL)
def test_longest_piece_is_what_plain_search_finds(files: list[bytes], text: bytes) -> None:
    index = build_index([(str(i), f) for i, f in enumerate(files)], "x")
    found = index.longest(text)
    piece = text[found.start : found.start + found.length]
    assert found.length == len(piece) == _longest(text, files)
    assert not piece or piece in files[int(found.file)]
    data = index.data.tobytes()
    behind = [data[i:].ljust(len(data), b"\0") for i in index.order.tolist()]
    assert behind == sorted(behind)


def test_long_repetitions_are_sorted_too() -> None:
    """Suffixes that agree for hundreds of bytes need all the doublings."""
    files = [("a", b"ab" * 700 + b"c"), ("b", b"ab" * 300 + b"d"), ("c", b"x" * 1500)]
    index = build_index(files, "x")
    for text, length, file in ((b"zz" + b"ab" * 400 + b"c", 801, "a"), (b"ab" * 200 + b"d" * 2, 401, "b")):
        found = index.longest(text)
        assert (found.length, found.file) == (length, file)
    assert index.longest(b"x" * 2000).length == 1500


def test_index_is_kept_and_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "one.txt").write_text("to be or not to be")
    (folder / "two.bin").write_bytes(b"\xff\xfe")
    made = open_corpus(folder)
    assert made is not None
    kept = list(tmp_path.glob("*.npz"))
    assert len(kept) == 1
    monkeypatch.setattr(module, "build_index", None)  # a second sorting would fail
    again = open_corpus(folder)
    assert again is not None
    assert again.longest(b"is not to be?") == made.longest(b"is not to be?")
    assert (again.longest(b"is not to be?").length, again.names) == (len(b" not to be"), ("one.txt",))
    assert open_corpus(None, kept[0]).name == made.name  # pyright: ignore[reportOptionalMemberAccess]


def test_changed_text_is_sorted_anew(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "one.txt").write_text("old words")
    open_corpus(folder)
    (folder / "one.txt").write_text("new words")
    found = open_corpus(folder)
    assert found is not None
    assert found.longest(b"new").length == 3
    with pytest.raises(SinkscopeError, match="is the index of"):
        open_corpus(folder, next(p for p in tmp_path.glob("*.npz") if CorpusIndex.load(p).longest(b"old").length == 3))


def test_the_library_is_what_the_bundled_model_was_trained_on() -> None:
    wanted = [p.as_posix() for p in library_files() if not is_validation(p)]
    names = [name for name, _ in library_texts()]
    assert [n for n in wanted if n in set(names)] == names
    assert len(wanted) - len(names) <= 5  # those that are not UTF-8


@pytest.mark.parametrize(
    ("corpus", "index", "says"),
    [
        (None, "none.npz", "none.npz is not there: give --corpus DIR or --corpus stdlib"),
        (None, "broken.npz", "is not a corpus index: remove it"),
        ("nowhere", None, "--corpus 'nowhere' is not a folder"),
        ("empty", None, "has no UTF-8 text in it: expected files of"),
    ],
)
def test_bad_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, corpus: str | None, index: str | None, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.npz").write_bytes(b"PK")
    with pytest.raises(SinkscopeError, match=says.replace("(", r"\(")):
        open_corpus(corpus, index)
