"""Show all results of a folder as one HTML file."""

from __future__ import annotations

from pathlib import Path

from sinkscope.app.card import CARD
from sinkscope.errors import SinkscopeError, one_line
from sinkscope.files.arguments import checks_arguments
from sinkscope.files.output import check_output, read_json, write_output
from sinkscope.files.plain import visible
from sinkscope.files.store import RECORDS, SETTINGS, begun_by
from sinkscope.results.notation import count_of
from sinkscope.results.pages import Section, document, folded, text
from sinkscope.results.result import Result


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
    root = Path(folder)
    if not root.is_dir():
        raise SinkscopeError(f"{folder} is no folder: give the folder that holds the JSON files of your results")
    page = out or root / "report.html"
    target = check_output(page, ["report"])
    sections: list[Section] = []
    left_out: list[str] = []
    for path in _listed(root):
        name = visible(path.relative_to(root).as_posix())
        try:
            if path.is_file():
                result = Result.from_dict(read_json(path), path.name)
            elif begun_by(path) == "scan":
                raise SinkscopeError("a scan that has not ended; its command goes on with it")
            else:  # a folder of runs is shown as its table
                from sinkscope.bench.table import bench_table  # imports torch, which the help need not wait for

                result = bench_table([path])
            sections.append(folded(result.section(name), "Summary, figure, table, settings and provenance"))
        except SinkscopeError as error:
            left_out.append(f"{name}: {error}")
        except Exception as error:  # a damaged result can have the right types and fail anywhere
            left_out.append(one_line(f"{name}: {type(error).__name__}: {error}"))
    if not sections:
        raise SinkscopeError(f"no results in {folder}: it should hold what --json or .save() wrote")
    count = count_of(len(sections), "result")
    models = [section.about for section in sections]
    sections.sort(key=lambda section: models.index(section.about))  # those of one model stand together
    if left_out:
        rows = "".join(f"<li>{text(line)}</li>" for line in left_out)
        sections.append(Section(f"{count_of(len(left_out), 'file')} left out", f"<ul>{rows}</ul>"))
    write_output(target, document(visible(root.resolve().name), sections, count))
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
