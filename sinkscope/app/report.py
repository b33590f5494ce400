"""Show all results of a folder as one HTML file; other files are listed."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from sinkscope.app.commands import kind_modules
from sinkscope.app.pages import Section, document, result_section, save_document
from sinkscope.bench.record import PROMPTS
from sinkscope.bench.table import bench_table
from sinkscope.errors import SinkscopeError
from sinkscope.files.console import note
from sinkscope.files.options import Hidden, Option
from sinkscope.files.output import check_output, check_writable, read_json
from sinkscope.files.plain import visible
from sinkscope.files.result import Result, known_kinds
from sinkscope.files.store import LOCK, RECORDS, SETTINGS

BESIDE_RESULTS = {".html", ".png"}
"""Suffixes of the files that commands write next to their JSON."""
FILES_OF_RUNS = {SETTINGS, RECORDS, LOCK, PROMPTS}
FIRST_MODULES = ("sinkscope.sinks.first_token", "sinkscope.sinks")
"""Their results come first, in this order."""
SKIPPED_IN_NOTES = 20
SKIPPED_IN_ERROR = 5


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
    target = out or folder / "report.html"
    written = report(folder, target, progress=progress)
    for skipped in written.skipped[:SKIPPED_IN_NOTES]:
        note(f"left out: {skipped}")
    if len(written.skipped) > SKIPPED_IN_NOTES:
        note(f"left out: {len(written.skipped) - SKIPPED_IN_NOTES} files more; the report names them all")
    print(visible(f"{target}: {_counted(len(written.files))}"))


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
    if not root.exists():
        raise SinkscopeError(f"{folder} does not exist: give the folder that holds the JSON files of your results")
    if not root.is_dir():
        raise SinkscopeError(f"{folder} is no folder: give the folder that holds the JSON files of your results")
    target = check_writable(out or root / "report.html")
    files, skipped = _listed(root)
    if target in {path.resolve() for path in files}:
        raise SinkscopeError(f"{out} is one of the files to be read: give the report another name")
    check_output(target, "report")
    sections: list[Section] = []
    for number, path in enumerate(files):
        if progress is not None:
            progress("reading", number, len(files))
        name = _name(path, root)
        try:
            sections.append(result_section(_result(path, name), name))
        except SinkscopeError as error:
            skipped.append(Skipped(name, _line(error, path)))
        except Exception as error:  # a damaged result can have the right types and fail anywhere
            skipped.append(Skipped(name, f"cannot be shown ({type(error).__name__}: {_line(error, path)})"))
    skipped.sort(key=lambda one: one.file)
    if not sections:
        raise SinkscopeError(f"no results in {folder}{_named(skipped)}: it should hold what --json or .save() wrote")
    sections.sort(key=lambda section: (_place(section.kind), section.file))
    left_out = [(one.file, one.reason) for one in skipped]
    page = document(visible(root.resolve().name), sections, _counted(len(sections)), left_out)
    files_shown = tuple(section.file for section in sections)
    return Report(save_document(target, page), files_shown, tuple(skipped))


def _counted(results: int) -> str:
    if results == 1:
        return "1 result"
    return f"{results} results"


def _listed(root: Path) -> tuple[list[Path], list[Skipped]]:
    """The JSON files and the folders of runs below `root`, sorted, and the other files."""
    files: list[Path] = []
    skipped: list[Skipped] = []

    def unreadable(error: OSError) -> None:
        reason = (error.strerror or "").lower()
        skipped.append(Skipped(_name(Path(error.filename), root), f"cannot be read: {reason}"))

    for folder, folders, names in os.walk(root, onerror=unreadable):
        folders[:] = [name for name in folders if not name.startswith(".")]
        of_runs: set[str] = set()
        if SETTINGS in names and RECORDS in names:
            files.append(Path(folder))
            of_runs = FILES_OF_RUNS
        for name in names:
            path = Path(folder, name)
            suffix = path.suffix.lower()
            if name.startswith(".") or name in of_runs or suffix in BESIDE_RESULTS:
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
    table = bench_table([path])
    argv = ("sinkscope", "bench", "table", name)
    provenance = replace(table.provenance, argv=argv, seconds=0.0, peak_memory_bytes=None)
    return replace(table, provenance=provenance)


def _line(error: Exception, path: Path) -> str:
    """The message without its leading file name, which is shown separately, and without all kinds that there are."""
    message = str(error).partition(": this version knows")[0]
    message = " ".join(message.split())
    for name in (str(path), path.name):
        message = message.removeprefix(" ".join(name.split()))
    return visible(message.lstrip(": "))


def _name(path: Path, root: Path) -> str:
    return visible(path.relative_to(root).as_posix()).replace("\n", "\\n").replace("\t", "\\t")


def _named(skipped: list[Skipped]) -> str:
    if not skipped:
        return ""
    names = "; ".join(str(one) for one in skipped[:SKIPPED_IN_ERROR])
    if len(skipped) > SKIPPED_IN_ERROR:
        names += f" and {len(skipped) - SKIPPED_IN_ERROR} more"
    return f" ({names})"
