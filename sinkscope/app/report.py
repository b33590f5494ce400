"""Show all results of a folder as one HTML file; other files are listed."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from sinkscope.app.commands import commands, kind_modules
from sinkscope.app.pages import Section, document, result_section, save_document
from sinkscope.bench.record import PROMPTS
from sinkscope.errors import SinkscopeError
from sinkscope.files.console import note
from sinkscope.files.options import Hidden, Option
from sinkscope.files.output import check_output, check_writable
from sinkscope.files.plain import visible
from sinkscope.files.result import Result, known_kinds, read_json
from sinkscope.files.store import LOCK, RECORDS, SETTINGS

_BESIDE = {".html", ".png"}  # files that commands write next to their JSON
_OF_RUNS = {SETTINGS, RECORDS, LOCK, PROMPTS}
_ROOMS = ("sinkscope.sinks.first_token", "sinkscope.sinks", "sinkscope")  # in this order
_TOLD = 20  # skipped files that the command names
_SHOWN = 5  # skipped files that an error names


@dataclass(frozen=True)
class Skipped:
    """A file that is not in the report.

    Attributes:
        file: Path of the file, relative to the folder.
        reason: Why the file was left out, in one line.
    """

    file: str
    reason: str

    def __str__(self) -> str:
        return f"{self.file}: {self.reason}"


@dataclass(frozen=True)
class Report:
    """What `report` wrote.

    Attributes:
        path: Path of the HTML file.
        files: Paths of the results, relative to the folder, in the order of the report.
        skipped: Files that are not in the report.
    """

    path: Path
    files: tuple[str, ...]
    skipped: tuple[Skipped, ...]


def write_report(
    folder: Annotated[Path, Option(metavar="DIR", argument=True)],
    *,
    out: Annotated[Path | None, Option(metavar="FILE", writes=True)] = None,
    progress: Hidden = None,
) -> None:
    """Write all results of a folder as one HTML file that needs nothing else, with figures, tables and provenance.

    Args:
        folder: Folder of results and runs; its subfolders are read too.
        out: File to write. By default report.html in the folder.
        progress: Called as `progress(stage, done, total)`.

    Example:
        sinkscope report results --out everything.html
    """
    made = report(folder, out, progress=progress)
    for skipped in made.skipped[:_TOLD]:
        note(f"left out: {skipped}")
    if len(made.skipped) > _TOLD:
        note(f"left out: {len(made.skipped) - _TOLD} files more; the report names them all")
    count = len(made.files)
    print(f"{folder / 'report.html' if out is None else out}: {count} result{'s' if count != 1 else ''}")


def report(
    folder: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    *,
    progress: Callable[[str, int, int], None] | None = None,
) -> Report:
    """Write all results found in a folder and its subfolders as one self-contained HTML file.

    Results are the files that `--json` and `.save()` write, and the folders that `sinkscope bench` writes, which are
    shown as their tables. Other files are left out and listed; hidden files, and the HTML and PNG that commands write
    beside their JSON, are left out silently.

    Args:
        folder: Folder with the results.
        out: File to write. By default `report.html` in the folder. An earlier page written by sinkscope is replaced.
        progress: Called as `progress(stage, done, total)`.

    Returns:
        The file that was written, the results in it, and the files left out with the reasons.

    Raises:
        SinkscopeError: The folder does not exist or holds no result, or the file cannot be written or would replace a
            result.
    """
    root = Path(folder)
    if not root.is_dir():
        there = "is no folder" if root.exists() else "does not exist"
        raise SinkscopeError(f"{folder} {there}: give the folder that holds the JSON files of your results")
    target = check_writable(root / "report.html" if out is None else out)
    files, skipped = _listed(root)
    if target in {path.resolve() for path in files}:
        raise SinkscopeError(f"{out} is one of the files to be read: give the report another name")
    check_output(target, "report")
    sections: list[Section] = []
    for i, path in enumerate(files):
        if progress is not None:
            progress("reading", i, len(files))
        name = _name(path, root)
        for part, data in _parts(path, name):
            try:
                if isinstance(data, SinkscopeError):
                    raise data
                sections.append(result_section(Result.from_dict(data, path.name), part))
            except SinkscopeError as error:
                skipped.append(Skipped(part, _line(error, path)))
            except Exception as error:  # a damaged result can have the right types and fail anywhere
                skipped.append(Skipped(part, f"cannot be shown ({type(error).__name__}: {_line(error, path)})"))
    skipped.sort(key=lambda s: s.file)
    if not sections:
        raise SinkscopeError(f"no results in {folder}{_named(skipped)}: it should hold what --json or .save() wrote")
    sections.sort(key=lambda s: (_place(s.kind), s.file))
    about = f"{len(sections)} result{'s' if len(sections) != 1 else ''}"
    left = [(s.file, s.reason) for s in skipped]
    whole = document(visible(root.resolve().name), sections, about, left)
    return Report(save_document(target, whole), tuple(s.file for s in sections), tuple(skipped))


def _listed(root: Path) -> tuple[list[Path], list[Skipped]]:
    """The JSON files and the folders of runs below `root`, sorted, and the other files."""
    files: list[Path] = []
    skipped: list[Skipped] = []

    def unreadable(error: OSError) -> None:
        skipped.append(Skipped(_name(Path(error.filename), root), f"cannot be read: {(error.strerror or '').lower()}"))

    for folder, folders, names in os.walk(root, onerror=unreadable):
        folders[:] = [name for name in folders if not name.startswith(".")]
        if {SETTINGS, RECORDS} <= {*names}:
            files.append(Path(folder))
            names = [name for name in names if name not in _OF_RUNS]
        for path in (Path(folder, name) for name in names if not name.startswith(".")):
            suffix = path.suffix.lower()
            if suffix in _BESIDE:
                continue
            if suffix != ".json":
                skipped.append(Skipped(_name(path, root), "is no .json file"))
            elif not path.is_file():  # reading a pipe would never end
                skipped.append(Skipped(_name(path, root), "is no file, or a link to none"))
            else:
                files.append(path)
    return sorted(files), skipped


def _place(kind: str) -> tuple[int, int]:
    """First tokens come first, then the other measurements of sinks, then all other kinds."""
    room = next((i for i, name in enumerate(_ROOMS) if kind_modules().get(kind, "").startswith(name)), len(_ROOMS))
    return room, list(known_kinds()).index(kind)


def _parts(path: Path, name: str) -> list[tuple[str, Any]]:
    """A file's result and those under further keys; for a file that is not JSON, the error."""
    try:
        data = _runs(path, name) if path.is_dir() else read_json(path)
    except SinkscopeError as error:
        return [(name, error)]
    beside = data.items() if isinstance(data, dict) else ()
    nested = [(key, v) for key, v in beside if isinstance(v, dict) and "schema" in v and "kind" in v]
    return [(name, data), *((f"{name}, {visible(key)}", v) for key, v in nested)]


def _runs(folder: Path, name: str) -> dict[str, Any]:
    """The tables of a folder of runs, as the benchmark's own command prints them."""
    settings = read_json(folder / SETTINGS)
    words = str(settings.get("command", "") if isinstance(settings, dict) else settings)
    table = commands().get(f"{words} table")
    if table is None:
        raise SinkscopeError(f"{name} is no folder of `sinkscope bench`")
    made: Result = table.load()([folder])
    data = made.to_dict()
    data["provenance"] |= {"argv": ["sinkscope", words, "table", name], "seconds": 0.0, "peak_memory_bytes": None}
    data["settings"]["runs"][0]["folder"] = name
    return data


def _line(error: Exception, path: Path) -> str:
    """The message without its leading file name, which is shown separately, and without all kinds that there are."""
    name, message = (" ".join(text.split()) for text in (path.name, str(error).partition(": this version knows")[0]))
    return visible(message.removeprefix(name).lstrip(": "))


def _name(path: Path, root: Path) -> str:
    return visible(path.relative_to(root).as_posix()).replace("\n", "\\n").replace("\t", "\\t")


def _named(skipped: list[Skipped]) -> str:
    if not skipped:
        return ""
    more = f" and {len(skipped) - _SHOWN} more" if len(skipped) > _SHOWN else ""
    return f" ({'; '.join(map(str, skipped[:_SHOWN]))}{more})"
