"""Show all results of a folder as one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from sinkscope.app.card import CARD
from sinkscope.app.pages import Section, document, result_section
from sinkscope.errors import SinkscopeError, one_line
from sinkscope.files.output import check_output, read_json, write_output
from sinkscope.files.plain import visible
from sinkscope.files.progress import silent
from sinkscope.files.store import RECORDS, SETTINGS
from sinkscope.results.console import end_bar
from sinkscope.results.notation import count_of
from sinkscope.results.options import Hidden, Option, command
from sinkscope.results.result import Result


@command(
    words="report",
    group="Look",
    help="Write all results of a folder as one HTML file.",
)
def report(
    folder: Annotated[str | Path, Option(metavar="DIR", argument=True)],
    out: Annotated[str | Path | None, Option(metavar="FILE", writes=True)] = None,
    *,
    progress: Hidden = None,
) -> None:
    """Write all results of a folder as one HTML file that needs nothing else, with figures, tables and provenance.

    JSON files that hold no result are named at the end of the page; hidden files and all others are left out silently.

    Args:
        folder: Folder with the JSON files of results and folders of `sinkscope bench`, also in its subfolders.
        out: The page; by default report.html in the folder.
        progress: Called as `progress(what, done, total)`.

    Example:
        sinkscope report results --out everything.html

    Raises:
        SinkscopeError: There is no such folder, it holds no result, or the page cannot be written.
    """
    root = Path(folder)
    if not root.is_dir():
        raise SinkscopeError(f"{folder} is no folder: give the folder that holds the JSON files of your results")
    page = out or root / "report.html"
    target = check_output(page, ["report"])
    sections: list[Section] = []
    left_out: dict[str, str] = {}
    files = _listed(root)
    for number, path in enumerate(files):
        (progress or silent)("reading", number, len(files))
        name = visible(path.relative_to(root).as_posix())
        try:
            if path.is_file():
                result = Result.from_dict(read_json(path), path.name)
            else:  # a folder of runs is shown as its table
                from sinkscope.bench.table import bench_table  # imports torch, which the help need not wait for

                result = bench_table([path])
            sections.append(result_section(result, name))
        except SinkscopeError as error:
            left_out[name] = str(error)
        except Exception as error:  # a damaged result can have the right types and fail anywhere
            left_out[name] = visible(one_line(f"{type(error).__name__}: {error}"))
    if not sections:
        raise SinkscopeError(f"no results in {folder}: it should hold what --json or .save() wrote")
    count = count_of(len(sections), "result")
    write_output(target, document(visible(root.resolve().name), sections, count, left_out))
    end_bar(progress)
    print(visible(f"{page}: {count}, {len(left_out)} left out"))


def _listed(root: Path) -> list[Path]:
    """The JSON files and the folders of runs in `root`, sorted, without the parts of cards beside them."""
    listed: list[Path] = []
    for path in (root, *sorted(root.rglob("*"))):
        hidden = any(part.startswith(".") for part in path.relative_to(root).parts)
        of_run = path.name == SETTINGS and (path.parent / RECORDS).is_file()
        if hidden or of_run or (path / CARD).is_file():
            continue
        if (path / RECORDS).is_file() or (path.suffix.lower() == ".json" and path.is_file()):
            listed.append(path)
    return listed
