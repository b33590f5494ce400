"""`report`: all results of a folder on one page, and the sections of a page, which a scan shares."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

from sinkscope.app.card import CARD
from sinkscope.errors import SinkscopeError, is_out_of_memory
from sinkscope.files.arguments import checks_arguments
from sinkscope.files.output import check_output, write_output
from sinkscope.files.plain import pathless, visible
from sinkscope.files.store import RECORDS, SETTINGS
from sinkscope.results.notation import count_of
from sinkscope.results.pages import Section, document, render
from sinkscope.results.result import Result


def why_missing(error: Exception) -> str:
    """Return in one line why there is no result: the message of a SinkscopeError, or the type of any other error."""
    if is_out_of_memory(error):
        return "there is not enough memory for it"
    message = visible(pathless(str(error).partition("\n")[0]))
    if isinstance(error, SinkscopeError):
        return message
    return f"it failed ({type(error).__name__}: {message:.200})"


def not_measured(why: str) -> str:
    """Return the clause that stands in place of a conclusion, of what `why_missing` says."""
    return f"not measured, because {why.rstrip('.')}."


def sections_of(results: Mapping[str, Result | str], opened: Collection[str] = ()) -> tuple[list[Section], list[str]]:
    """Return the sections of a page, grouped by model, and a line for each result that is missing.

    Args:
        results: Results by their displayed names, or why there is none.
        opened: Names of the results whose sections are open; a closed section shows its conclusion alone.
    """
    sections: list[Section] = []
    missing: list[str] = []
    for name, result in results.items():
        if isinstance(result, Result):
            try:
                sections.append(replace(result.section(name), closed=name not in opened))
            except Exception as error:  # a damaged result can have the right types and fail anywhere
                result = why_missing(error)
        if isinstance(result, str):
            missing.append(f"{name}: {result}")
    models = [section.about for section in sections]
    return sorted(sections, key=lambda section: models.index(section.about)), missing


@checks_arguments
def report(
    folder: str | Path,
    out: str | Path | None = None,
) -> None:
    """Write all results of a folder as one HTML file that needs nothing else, with figures, tables and provenance.

    JSON files that hold no result are named at the end of the page; hidden files and all others are left out silently.

    Args:
        folder: Folder with the JSON files of results and folders of `sinkscope bench`, also in its subfolders.
        out: The page; by default report.html in the folder.

    Raises:
        SinkscopeError: There is no such folder, it holds no result, or the page cannot be written.
    """
    from sinkscope.bench.table import bench_table  # imports torch, which the help need not wait for

    root = Path(folder)
    if not root.is_dir():
        raise SinkscopeError(f"{folder} is no folder: give the folder that holds the JSON files of your results")
    page = out or root / "report.html"
    target = check_output(page, ["report"])
    results: dict[str, Result | str] = {}
    for path in _listed(root):
        try:
            result = Result.load(path) if path.is_file() else bench_table([path])
        except Exception as error:
            result = why_missing(error)
        results[path.relative_to(root).as_posix()] = result
    sections, missing = sections_of(results)
    if not sections:
        raise SinkscopeError(f"no results in {folder}: it should hold what --json or .save() wrote")
    count = count_of(len(sections), "result")
    if missing:
        left_out = render("results/pages/left_out.html", lines=missing)
        sections.append(Section(f"{count_of(len(missing), 'file')} left out", left_out))
    write_output(target, document(root.resolve().name, sections, count))
    print(visible(f"{page}: {count}, {len(missing)} left out"))


def _listed(root: Path) -> list[Path]:
    """The JSON files and the folders of runs in `root`, sorted; a folder with a card is shown by its files."""
    listed: list[Path] = []
    for path in (root, *sorted(root.rglob("*"))):
        if any(part.startswith(".") for part in path.relative_to(root).parts):
            continue
        if path.is_file():
            of_run = path.name == SETTINGS and (path.parent / RECORDS).is_file()
            if path.suffix.lower() == ".json" and not of_run:
                listed.append(path)
        elif (path / RECORDS).is_file() and not (path / CARD).is_file():
            listed.append(path)
    return listed
