"""Show all results of a folder as one HTML file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Annotated

from sinkscope.app.card import CARD, SinkCard, part_file
from sinkscope.app.pages import Section, document, folded, result_section, text
from sinkscope.errors import SinkscopeError, one_line
from sinkscope.files.output import check_output, read_json, write_output
from sinkscope.files.plain import visible
from sinkscope.files.store import RECORDS, SETTINGS, begun_by
from sinkscope.results.notation import count_of, word_list
from sinkscope.results.options import Option, command
from sinkscope.results.result import Result


@command(
    words="report",
    group="Look",
    help="Write all results of a folder as one HTML file.",
)
def report(
    folder: Annotated[str | Path, Option(metavar="DIR", argument=True)],
    out: Annotated[str | Path | None, Option(metavar="FILE", writes=True)] = None,
) -> None:
    """Write all results of a folder as one HTML file that needs nothing else, with figures, tables and provenance.

    JSON files that hold no result are named at the end of the page; hidden files and all others are left out silently.

    Args:
        folder: Folder with the JSON files of results and folders of `sinkscope bench`, also in its subfolders.
        out: The page; by default report.html in the folder.

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
    results: dict[str, Result] = {}
    sections: dict[str, Section] = {}
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
            sections[name] = _section(result, name)
            results[name] = result
        except SinkscopeError as error:
            left_out.append(f"{name}: {error}")
        except Exception as error:  # a damaged result can have the right types and fail anywhere
            left_out.append(one_line(f"{name}: {type(error).__name__}: {error}"))
    if not sections:
        raise SinkscopeError(f"no results in {folder}: it should hold what --json or .save() wrote")
    of_scans = said_of_scans(results)
    shown = in_order(sections, of_scans)
    count = count_of(len(shown), "result")
    alike = several_of_one([result for name, result in results.items() if name not in of_scans])
    for title, lines in (
        (f"{count_of(len(left_out), 'file')} left out", left_out),
        ("Results of one kind and model", alike),
    ):
        if lines:
            rows = "".join(f"<li>{text(line)}</li>" for line in lines)
            shown.append(Section(title, f"<ul>{rows}</ul>"))
    write_output(target, document(visible(root.resolve().name), shown, count))
    print(visible(f"{page}: {count}, {len(left_out)} left out"))


def _section(result: Result, file: str) -> Section:
    """The section of a result, closed, because the contents say what it concludes."""
    section = folded(result_section(result, file), "Summary, figure, table, settings and provenance")
    return replace(section, about=result.model.name, conclusion=result.conclusion())


def said_of_scans(results: Mapping[str, Result]) -> dict[str, str]:
    """Return what cards say of the files beside them, in the order of each card; a table alone names only its best row.

    Args:
        results: The results, by the names of their files.
    """
    said: dict[str, str] = {}
    for name, card in results.items():
        if isinstance(card, SinkCard):
            compared = card.conclusion() if card.against else ""
            said[name] = compared or "All numbers of the parts below, each with its control."
            for part in card.parts:
                said[str(PurePosixPath(name).parent / part_file(part.name))] = part.conclusion
    return said


def in_order(sections: Mapping[str, Section], said: Mapping[str, str]) -> list[Section]:
    """Return the sections of one model together, those of a scan first and with the sentences of its card.

    Args:
        sections: The sections, by the names of their files.
        said: The sentences of cards, likewise.
    """
    models = list(dict.fromkeys(section.about for section in sections.values()))
    names = [name for name in said if name in sections] + [name for name in sections if name not in said]
    names.sort(key=lambda name: models.index(sections[name].about))
    return [replace(sections[name], conclusion=said.get(name, sections[name].conclusion)) for name in names]


def several_of_one(results: Sequence[Result]) -> list[str]:
    """Return a remark for each kind and model of which there are several results: in which settings these differ."""
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        groups.setdefault((result.kind, result.model.name), []).append(result)
    remarks: list[str] = []
    for (kind, model), alike in groups.items():
        names = sorted({name for result in alike for name in result.settings})
        differing = [name for name in names if len({repr(result.settings.get(name)) for result in alike}) > 1]
        if len({result.model.fingerprint for result in alike}) > 1:
            differing.append("weights")
        said = f"differ in {word_list(differing)}" if differing else "are the same"
        if len(alike) > 1:
            remarks.append(f"{count_of(len(alike), 'result')} of kind {kind} on {model}: their settings {said}.")
    return remarks


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
