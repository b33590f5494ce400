"""Show all results of a folder as one HTML file."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from sinkscope.app.card import CARD
from sinkscope.app.commands import kind_modules
from sinkscope.app.pages import Section, document, result_section, save_document
from sinkscope.errors import SinkscopeError, one_line
from sinkscope.files.console import Progress, note, silent
from sinkscope.files.notation import counted
from sinkscope.files.options import Hidden, Option
from sinkscope.files.output import check_output, read_json
from sinkscope.files.plain import visible
from sinkscope.files.result import Result, known_kinds
from sinkscope.files.store import RECORDS, SETTINGS

FIRST_MODULES = ("sinkscope.sinks.first_token", "sinkscope.sinks")
"""Their results come first, in this order."""


@dataclass(frozen=True)
class Skipped:
    """A file that is not in the report.

    Attributes:
        file: Its path inside the folder, without control characters.
        reason: Why it was left out.
    """

    file: str
    reason: str

    def __str__(self) -> str:
        return f"{self.file}: {self.reason}"


@dataclass(frozen=True)
class Report:
    """What `report` wrote.

    Attributes:
        path: The HTML file.
        files: Files that hold a result, in the order of the report.
        skipped: JSON files and folders of runs that were left out.
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
        folder: Folder with the JSON files of results, also in its subfolders.
        out: The page; by default report.html in the folder.
        progress: Called as `progress(what, done, total)`.

    Example:
        sinkscope report results --out everything.html
    """
    written = report(folder, out, progress=progress)
    for skipped in written.skipped:
        note(f"left out: {skipped}")
    print(visible(f"{out or folder / 'report.html'}: {counted(len(written.files), 'result')}"))


def report(
    folder: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    *,
    progress: Progress = silent,
) -> Report:
    """Write all results found in a folder and its subfolders as one self-contained HTML file.

    Figures, tables, settings and provenance are included. JSON files that hold no result are listed at the end of the
    page; hidden files and all others are left out silently.

    Args:
        folder: Folder of files written by `--json` or `Result.save`, and of folders of `sinkscope bench`.
        out: The page; by default report.html in the folder.
        progress: Called as `progress("reading", done, total)`.

    Returns:
        The page, and what is in it.

    Raises:
        SinkscopeError: There is no such folder, it holds no result, or the page cannot be written.
    """
    root = Path(folder)
    if not root.is_dir():
        raise SinkscopeError(f"{folder} is no folder: give the folder that holds the JSON files of your results")
    target = check_output(out or root / "report.html", "report")
    files = _listed(root)
    sections: list[Section] = []
    skipped: list[Skipped] = []
    for number, path in enumerate(files):
        progress("reading", number, len(files))
        name = visible(path.relative_to(root).as_posix()).replace("\n", "\\n").replace("\t", "\\t")
        try:
            sections.append(result_section(_result(path, name), name))
        except SinkscopeError as error:
            message = one_line(str(error))
            for own in (str(path), path.name):  # the name stands before the reason
                message = message.removeprefix(one_line(own)).lstrip(": ")
            skipped.append(Skipped(name, visible(message)))
        except Exception as error:  # a damaged result can have the right types and fail anywhere
            skipped.append(Skipped(name, visible(f"cannot be shown ({type(error).__name__}: {one_line(str(error))})")))
    if not sections:
        reasons = "".join(f"; {one}" for one in skipped[:1])
        raise SinkscopeError(f"no results in {folder}: it should hold what --json or .save() wrote{reasons}")
    sections.sort(key=lambda section: (_place(section.kind), section.file))
    left_out = [(one.file, one.reason) for one in skipped]
    page = document(visible(root.resolve().name), sections, counted(len(sections), "result"), left_out)
    files_shown = tuple(section.file for section in sections)
    return Report(save_document(target, page), files_shown, tuple(skipped))


def _listed(root: Path) -> list[Path]:
    """The JSON files and the folders of runs in `root`, sorted; reading a pipe might never end."""
    listed: list[Path] = []
    for path in (root, *sorted(root.rglob("*"))):
        hidden = any(part.startswith(".") for part in path.relative_to(root).parts)
        of_run = path.name == SETTINGS and (path.parent / RECORDS).is_file()
        if hidden or of_run or (path / CARD).is_file():
            continue
        if (path / RECORDS).is_file() or (path.suffix.lower() == ".json" and path.is_file()):
            listed.append(path)
    return listed


def _place(kind: str) -> tuple[int, int]:
    """First tokens come first, then the other measurements of sinks, then all other kinds."""
    module = kind_modules().get(kind, "")
    place = len(FIRST_MODULES)
    for number, prefix in reversed(list(enumerate(FIRST_MODULES))):
        if module.startswith(prefix):
            place = number
    return place, known_kinds().index(kind)


def _result(path: Path, name: str) -> Result:
    """The result in a file; of a folder of runs, its table, as `sinkscope bench table` makes it."""
    if path.is_file():
        return Result.from_dict(read_json(path), path.name)
    from sinkscope.bench.table import bench_table  # imports torch, which the help need not wait for

    table = bench_table([path])
    argv = ("sinkscope", "bench", "table", name)
    provenance = replace(table.provenance, argv=argv, seconds=0.0, peak_memory_bytes=None)
    return replace(table, provenance=provenance)
