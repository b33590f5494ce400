"""Files that benchmarks are made from, and the sets that are made of them, each with a manifest."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from sinkscope.errors import SinkscopeError
from sinkscope.output import check_writable, write_atomic

T = TypeVar("T")
HUB = "hub"


class FoundFile(NamedTuple):
    """A benchmark's file.

    Attributes:
        path: where it lies.
        name: base name, or `repo/file`.
        commit: the hub's, None for a local file.
    """

    path: Path
    name: str
    commit: str | None = None


@dataclass(frozen=True)
class BuiltSet(Generic[T]):
    """A set of prompts or dialogues, and how it came about.

    Attributes:
        made: the prompts or dialogues, in order.
        manifest: settings, source with its sha256, numbers reached and the paper's; knows no paths.
        rows: the same for the reader: name and value.
    """

    made: tuple[T, ...]
    manifest: dict[str, Any]
    rows: tuple[tuple[str, str], ...]

    def text(self) -> str:
        """A few lines for the reader."""
        return "\n".join(f"{name:<16} {value}" for name, value in self.rows)


def find_file(
    source: str | os.PathLike[str], names: Sequence[str], expected: str, *, repo: str, file: str, revision: str | None
) -> FoundFile:
    """The file of a benchmark.

    Args:
        source: the file, a folder that holds it (or its folder `data`), or "hub".
        names: what the file may be called in a folder; the first that is there is taken.
        expected: what to give, for errors.
        repo: dataset on the hub.
        file: its file there.
        revision: branch, tag or commit of the dataset.

    Raises:
        SinkscopeError: there is no such file.
    """
    if os.fspath(source) == HUB:
        from sinkscope.models.checkpoint import hub_file

        try:
            local = hub_file(repo, file, revision, kind="dataset")
        except FileNotFoundError:
            raise SinkscopeError(f"the dataset {repo} has no {file}: give --source with a local copy") from None
        # The cache names a snapshot after its commit.
        return FoundFile(local, f"{repo}/{file}", local.parents[len(Path(file).parts) - 1].name)
    path = Path(source).expanduser()
    if path.is_dir():
        places = [path / below / name for name in names for below in ("", "data")]
        found = next((place for place in places if place.is_file()), None)
        if found is None:
            raise SinkscopeError(f"the folder {path.resolve().name} has no {' or '.join(names)}: give {expected}")
        path = found
    if not path.is_file():
        raise SinkscopeError(f"there is no file or folder {os.fspath(source)!r}: give {expected}")
    return FoundFile(path, path.name)


def manifest_path(made: str | os.PathLike[str]) -> Path:
    """Where the manifest of a set lies: dc.jsonl has dc.manifest.json."""
    path = Path(made)
    return path.with_name(f"{path.stem if path.suffix == '.jsonl' else path.name}.manifest.json")


def check_out(out: str | os.PathLike[str], *, force: bool = False) -> None:
    """Refuse before the work what `write_set` would refuse after it.

    Raises:
        SinkscopeError: as `write_set`.
    """
    if os.fspath(out) == "-":
        raise SinkscopeError("--out -: give the set a file of its own, such as set.jsonl")
    check_writable(out)
    for path in (Path(out), manifest_path(out)):
        check_writable(path)
        if path.is_file() and not force:
            raise SinkscopeError(f"{path.name} is there already: give another --out, or --force to replace it")


def write_set(
    lines: Sequence[str], manifest: dict[str, Any], out: str | os.PathLike[str], *, force: bool = False
) -> tuple[Path, Path]:
    """Write a set as JSON lines and its manifest beside it, each whole or not at all.

    Returns:
        Paths of the set and of the manifest.

    Raises:
        SinkscopeError: one of them is there already and `force` is not given, or cannot be written.
    """
    check_out(out, force=force)
    content = "".join(line + "\n" for line in lines).encode()
    manifest = {**manifest, "prompts_sha256": hashlib.sha256(content).hexdigest()}
    path = write_atomic(out, content)
    return path, write_atomic(manifest_path(out), json.dumps(manifest, indent=1, ensure_ascii=False) + "\n")
