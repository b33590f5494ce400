"""Exact search in a known text: the longest piece of a new text that occurs in it word for word."""

from __future__ import annotations

import hashlib
import os
import sysconfig
import zipfile
import zlib
from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sinkscope.errors import SinkscopeError
from sinkscope.files.output import check_writable, write_atomic
from sinkscope.files.progress import Progress

STDLIB = "stdlib"
_SUFFIXES = frozenset({".txt", ".md", ".rst", ".py", ".json", ".jsonl", ".csv", ".html", ".tex", ".c", ".h", ".js"})
_FIRST, _DEPTH = 8, 4096  # suffixes are sorted by their first 8 bytes, then 16, 32, ... up to this many
# Parts of the standard library that do not count: tests, third parties, tables, the text kept for measuring
# (`pydoc_data`), and a description of the machine that Python was built on.
_OTHER = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data", "__pycache__"}
)


@dataclass(frozen=True)
class Match:
    """The longest piece of a text that occurs in the corpus.

    Attributes:
        start: Start of the piece in the text, in bytes.
        length: Length in bytes, at most 4,096.
        file: First file of the corpus, in the order of the index, that contains the piece; "" for length 0.
    """

    start: int
    length: int
    file: str


@dataclass(frozen=True, eq=False)
class CorpusIndex:
    """Suffix array of a corpus in bytes: `order` lists every position of `data`, sorted by the text that follows it.

    Attributes:
        data: The concatenated files, each followed by a zero byte, so that no match crosses files.
        order: Suffix array, by the first 4,096 bytes of each suffix.
        names: Names of the files.
        ends: End of each file in `data`.
        name: Name of the corpus.
    """

    data: npt.NDArray[np.uint8]
    order: npt.NDArray[np.int32]
    names: tuple[str, ...]
    ends: npt.NDArray[np.int64]
    name: str

    @cached_property
    def _bytes(self) -> bytes:
        return self.data.tobytes()

    def longest(self, text: bytes) -> Match:
        """The longest piece of `text` that occurs in the corpus; the first one if there are several."""
        best = 0
        length = 0
        where = -1
        for start in range(len(text)):
            if len(text) - start <= length:
                break
            # A zero byte ends a file: no piece reaches across one.
            found, place = self._at(text[start : start + _DEPTH].partition(b"\0")[0], length)
            if found > length:
                best = start
                length = found
                where = place
        if where < 0:
            file = ""
        else:
            file = self.names[int(np.searchsorted(self.ends, where, side="right"))]
        return Match(best, length, file)

    def _at(self, text: bytes, least: int) -> tuple[int, int]:
        """How many bytes from the start of `text` occur in the corpus, and one such place."""
        data = self._bytes
        found = 0
        where = -1
        # The first suffix that is not below the text, or its neighbour, shares the longest start.
        order: Any = self.order
        low = bisect_left(order, text, key=lambda place: data[int(place) : int(place) + len(text)])
        for i in (low - 1, low):
            if 0 <= i < len(self.order):
                place = int(self.order[i])
                both = zip(text, data[place : place + len(text)], strict=False)  # a zero byte differs, at the latest
                length = next((n for n, (one, other) in enumerate(both) if one != other), len(text))
                if length > max(found, least):
                    found = length
                    where = place
        return found, where

    def check(self) -> None:
        """Refuse arrays that are no index.

        Raises:
            ValueError: A type, shape or range is wrong.
        """
        kinds = (self.data.dtype, self.order.dtype, self.ends.dtype)
        if kinds != (np.uint8, np.int32, np.int64) or any(one.ndim != 1 for one in (self.data, self.order, self.ends)):
            raise ValueError("types and shapes")
        size = len(self.data)
        if len(self.order) != size or len(self.ends) != len(self.names):
            raise ValueError("lengths")
        for places, top in ((self.order, size - 1), (self.ends, size)):
            if len(places) and (places.min() < 0 or places.max() > top):
                raise ValueError("ranges")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the index; the file is written completely or not at all.

        Raises:
            SinkscopeError: The file cannot be written.
        """
        import io

        out = io.BytesIO()
        np.savez(out, data=self.data, order=self.order, names=np.array(self.names), ends=self.ends, name=self.name)
        write_atomic(path, out.getvalue())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CorpusIndex:
        """Read a file that `save` wrote.

        Raises:
            SinkscopeError: The file is missing or is not an index; the message names the option that creates one.
        """
        name = Path(path).name
        try:
            with zipfile.ZipFile(path) as archive:
                if any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist()):
                    raise ValueError("compressed: a small file could hold any number of zeros")
            with np.load(path, allow_pickle=False) as found:
                members = []
                for n in found["names"]:
                    members.append(str(n))
                names = tuple(members)
                index = cls(found["data"], found["order"], names, found["ends"], str(found["name"]))
            index.check()
            return index
        except FileNotFoundError:
            raise SinkscopeError(
                f"the index {name} is not there: give --corpus DIR or --corpus stdlib to make it"
            ) from None
        except (
            OSError,
            ValueError,
            KeyError,
            EOFError,
            MemoryError,
            NotImplementedError,
            zipfile.BadZipFile,
            zlib.error,
        ):
            raise SinkscopeError(
                f"{name} is not a corpus index: remove it, and give --corpus DIR or --corpus stdlib to make it again"
            ) from None


def open_corpus(
    corpus: str | os.PathLike[str] | None, index: str | os.PathLike[str] | None = None, progress: Progress | None = None
) -> CorpusIndex | None:
    """Open the index of a corpus, which is built once and then reused.

    Args:
        corpus: A folder of text files, or "stdlib": the running interpreter's Python library minus the validation
            files, which is the text that the bundled model was trained on. None reads `index`.
        index: File that stores the index. None uses a file next to the folder or, for the library, in the user's cache
            folder; its name depends on the text.
        progress: Called while the index is sorted.

    Returns:
        None if neither is given.

    Raises:
        SinkscopeError: The folder is missing or has no text, or neither a corpus nor an index file was given.
    """
    if corpus is None:
        if index is None:
            return None
        return CorpusIndex.load(index)
    files, name, home = _read(corpus)
    digest = hashlib.sha256(b"\0".join(part for file, text in files for part in (file.encode(), text))).hexdigest()
    if index is not None:
        path = Path(index)
    else:
        path = home / f"{name}-{digest[:12]}.sinkscope-index.npz"
    if path.exists():
        found = CorpusIndex.load(path)
        if found.name == f"{name} {digest[:12]}":
            return found
        if index is not None:
            raise SinkscopeError(f"{path.name} is the index of {found.name!r}, not of {name}: give another --index")
    made = build_index(files, f"{name} {digest[:12]}", progress)
    try:
        check_writable(path)
        made.save(path)
    except SinkscopeError:  # the place may be read-only: then the corpus is sorted again next time
        if index is not None:
            raise
    return made


def build_index(files: list[tuple[str, bytes]], name: str, progress: Progress | None = None) -> CorpusIndex:
    """Sort every position of the files by the text that follows it.

    Args:
        files: Name and content of each file.
        name: Name of the corpus.
        progress: Called after each doubling of the sorted length.

    Raises:
        SinkscopeError: The files exceed 2 GB.
    """
    parts = []
    for _, text in files:
        parts.append(text + b"\0")
    joined = b"".join(parts)
    size = len(joined)
    if size >= 1 << 31:
        raise SinkscopeError(f"the corpus {name} has {size} bytes; at most 2,147,483,647 can be searched: give a part")
    # The 8 bytes from every position on, as numbers whose first byte counts most.
    key = np.ndarray(size, ">u8", joined + bytes(_FIRST), strides=(1,)).astype(np.uint64)
    rank = np.empty_like(key)
    order = key.argsort(kind="stable")
    length = _FIRST
    while True:
        key = key[order]
        rank[order] = np.cumsum(np.append(True, key[1:] != key[:-1]))  # counts from 1
        if length >= _DEPTH or rank[order[-1]] == size:
            break
        if progress is not None:
            progress("index", length, _DEPTH)
        # Twice the length: the rank, and that of what follows it; the end of the text, 0, sorts first.
        key = rank << np.uint64(32) | np.append(rank, np.zeros(length, np.uint64))[length:]
        order = order[key[order].argsort(kind="stable")]  # fast, because it is nearly sorted
        length *= 2
    ends = np.cumsum([len(text) + 1 for _, text in files]).astype(np.int64)
    members = []
    for file, _ in files:
        members.append(file)
    names = tuple(members)
    return CorpusIndex(np.frombuffer(joined, np.uint8), order.astype(np.int32), names, ends, name)


def library_texts(root: Path | None = None) -> list[tuple[str, bytes]]:
    """The Python files that the bundled model was trained on: (name, content), in order."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    items = []
    for path in root.rglob("*.py"):
        items.append(path.relative_to(root))
    found = sorted(items)
    kept = [
        path
        for path in found
        if not _OTHER & set(path.parts)
        and not path.parts[0].startswith("config-")
        and not path.name.startswith("_sysconfigdata")
        and hashlib.sha256(path.as_posix().encode()).digest()[0] >= 8  # about 3 % are kept for validation
    ]
    texts = ((path.as_posix(), _utf8(root / path)) for path in kept)
    rows = []
    for name, text in texts:
        if text is not None:
            rows.append((name, text))
    return rows


def _read(corpus: str | os.PathLike[str]) -> tuple[list[tuple[str, bytes]], str, Path]:
    if corpus == STDLIB and not Path(corpus).is_dir():
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return library_texts(), STDLIB, cache / "sinkscope"
    folder = Path(corpus)
    if not folder.is_dir():
        raise SinkscopeError(
            f"--corpus {os.fspath(corpus)!r} is not a folder: give a folder of text files, or {STDLIB}"
        )
    items = []
    for p in folder.rglob("*"):
        if p.suffix.lower() in _SUFFIXES and p.is_file():
            items.append(p)
    paths = sorted(items)
    texts = ((path.relative_to(folder).as_posix(), _utf8(path)) for path in paths)
    files = []
    for name, text in texts:
        if text:
            files.append((name, text))
    if not files:
        kinds = ", ".join(sorted(_SUFFIXES))
        raise SinkscopeError(f"--corpus {os.fspath(corpus)!r} has no UTF-8 text in it: expected files of {kinds}")
    whole = folder.resolve()
    return files, whole.name or "corpus", whole.parent


def _utf8(path: Path) -> bytes | None:
    try:
        return path.read_text(encoding="utf-8").encode()  # line ends become those that a tokenizer saw
    except (UnicodeDecodeError, OSError):
        return None
