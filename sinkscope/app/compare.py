"""`compare`: two or more results of one kind side by side, text by text.

1. Read: each thing given is a result, a file of one, a folder of results or checkpoints, or a model that is measured.
2. Refuse: results of other kinds, settings or texts than the first have no common numbers.
3. Merge: the rows of each result with those of the first.
"""

from __future__ import annotations

import html
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar

from sinkscope.app.card import CARD, SinkCard
from sinkscope.errors import SinkscopeError
from sinkscope.files.arguments import checks_arguments
from sinkscope.files.envelope import measurements
from sinkscope.files.output import path_of
from sinkscope.files.plain import pathless
from sinkscope.files.provenance import UNKNOWN_MODEL, provenance
from sinkscope.files.store import differing
from sinkscope.measure import Setup
from sinkscope.measure.measurement import TEXT_READ
from sinkscope.measure.merge import CHANGED, SAME, UNJUDGED, merge
from sinkscope.results.console import note
from sinkscope.results.notation import count_of, word_list
from sinkscope.results.result import Result
from sinkscope.results.row import Card, Row, table_of
from sinkscope.results.style import BLUE, bars, figure_of, panels
from sinkscope.results.tables import Table, cell

OF_THE_MODEL = {"revision", "unknown_tokens", "model", "device", "dtype", "sinkscope", "decoding", "text_said"}
"""Settings that say which model was measured and where, not what was asked of it."""
MOST_PANELS = 8
BY_CHANCE = 0.05  # of judged numbers seem to change where none does
RULE = (
    "A number changed if it moved by more than the margin of its change, and by 1 % of its value. The change is the "
    "mean of the differences text by text, and without values for each text the margin is that of both together."
)


@dataclass(frozen=True)
class Compared:
    """What differs between the first result and another one.

    Attributes:
        name: Name of the other result.
        rows: Both merged: the table of each row is its verdict.
    """

    name: str
    rows: tuple[Row, ...]

    @property
    def judged(self) -> list[Row]:
        """The numbers whose change has a margin, those that changed first."""
        return [row for row in self.rows if row.numbers and row.numbers["change"].margin is not None]

    @property
    def moved(self) -> list[Row]:
        """The numbers of these that changed."""
        return [row for row in self.judged if row.table == CHANGED]


@dataclass(frozen=True, kw_only=True)
class Comparison(Result):
    """Results of one kind side by side: what changed from the first to each other.

    Attributes:
        of: The kind of the results.
        first: Name of the first result, with which the others are compared.
        results: The other results.
    """

    kind = "compare"
    columns = ("result", "name", "before", "after", "change", "change_margin")
    drawing: ClassVar[Any] = "sinkscope.app.compare:draw"
    glossary: ClassVar = {
        "result": "the result that is compared with the first",
        "table": "whether the number changed, came, went, or is not judged",
        "change": "how far the number moved: after less before",
        "change_margin": "half of the 95 % interval of the change; empty if the change is not judged",
        "texts": "texts that are compared one by one; 0: the margin is that of both together",
    }

    of: str
    first: str
    results: tuple[Compared, ...]

    def conclusion(self) -> str:
        """Return how many numbers of the last result changed, beside what chance gives, and the first that did."""
        last = self.results[-1]
        if not last.judged:
            return f"{last.name} against {self.first}: no number has a margin."
        counted = f"{len(last.moved)} of {len(last.judged)} judged numbers changed"
        chance = f"{BY_CHANCE * len(last.judged):.1g} by chance"
        first = last.judged[0]
        return f"{last.name} against {self.first}: {counted} ({chance}); {first.name} {moved_words(first)}."

    def cards(self) -> list[Card]:
        """Return a card for each thing that is compared: what changed, then the names of what did not."""
        made: list[Card] = []
        for compared in self.results:
            for about in dict.fromkeys(row.about for row in compared.rows):
                rows = [row for row in compared.rows if row.about == about]
                said = [(row.name, sentence(row)) for row in rows if row.table != SAME]
                same = dict.fromkeys(row.name for row in rows if row.table == SAME)
                if same:
                    said.append((SAME, word_list([*same])))
                made.append(Card(f"{about or self.of}: {compared.name}, compared with {self.first}", tuple(said)))
        return made

    def details(self) -> list[str]:
        """Return the rule by which a number counts as changed."""
        return [RULE]

    def rows(self) -> Table:
        """Return one row for each number or word of each result."""
        names = [compared.name for compared in self.results for _ in compared.rows]
        rows = table_of(row for compared in self.results for row in compared.rows)
        return [{"result": name, **row} for name, row in zip(names, rows, strict=True)]


def sentence(row: Row) -> str:
    """Return what is before and after, and how far it moved; of a word, and of what came or went, the note."""
    if not row.numbers:
        return row.note if row.table == CHANGED else ": ".join(filter(None, [row.table, row.note]))
    share = is_share(row)
    old, new = (cell(row.get(side), percent=share) for side in ("before", "after"))
    words = f"{old} -> {new} ({moved_words(row)})"
    return f"{words}, {UNJUDGED}" if row.table == UNJUDGED else words


def moved_words(row: Row) -> str:
    """Return how far a number moved, with its margin: "-10.0 points ± 4.0"; of a number that is no share "-2.5 ± 1"."""
    share = is_share(row)
    scale, form, unit = (100.0, ".1f", " points") if share else (1.0, ".3g", "")
    words = f"{scale * row.get('change'):+{form}}{unit}"
    if row.table == UNJUDGED:
        return words
    return f"{words} ± {scale * row.margin('change'):{form}}"


def is_share(row: Row) -> bool:
    """Return whether the number of a merged row is a share."""
    return row.numbers["before"].kind == "share"


# --- what is compared ---


@partial(checks_arguments, others=Setup.open)
def compare(
    *results: Any, measure: str = "find-sinks", out: str | Path | None = None, progress: Any = None, **settings: Any
) -> Comparison:
    """Compare results of one kind with the first one: two models, or the checkpoints of a training.

    A result is a JSON file, a folder of such files, of scans or of checkpoints, or a model, which is then measured.
    Numbers are compared text by text, with the margin of the mean difference. Neurons, places and conditions that came,
    went or changed are listed. Results of other kinds, settings or texts are refused.

    Args:
        results: Two or more: results, their JSON files, folders of results or of checkpoints, or models, which are then
            measured. The others are compared with the first.
        measure: What models are measured with: a measurement that needs no arguments.
        out: Folder to which the result of each model that is measured is written as it finishes.
        progress: Called as `progress(what, done, total)`.
        settings: How models are opened, as for `sinkscope.measure.Setup.open`.

    Raises:
        SinkscopeError: There are fewer than two results, or they differ in kind, settings or texts.
    """
    started = time.perf_counter()
    measurement = measurements().get(measure)
    if measurement is None:
        raise SinkscopeError(f"--measure {measure}: expected {', '.join(measurements())}")
    things = [item for thing in results for item in expanded(thing)]
    if len(things) < 2:
        raise SinkscopeError(
            f"{count_of(len(things), 'result')} to compare: give two or more (files of results, folders of "
            "checkpoints, or models)"
        )
    by_name: dict[str, Result] = {}
    for number, thing in enumerate(things):
        name = name_of(thing)
        if name in by_name:
            name = f"{name} ({number + 1})"
        found = result_of(thing)
        if found is None:
            found = measurement.load()(thing, **settings, progress=progress)
            if out is not None:
                note(f"{name}: {found.save(Path(out) / f'{name}.json')}")
        by_name[name] = found
    (first, base), *others = by_name.items()
    compared: list[Compared] = []
    for name, result in others:
        refuse_other(first, base, name, result)
        rows = merge(base.findings(), result.findings())
        if not any(row.numbers for row in rows):
            raise SinkscopeError(
                f"{first} and {name} have no number in common: results of {base.kind} are not compared"
            )
        compared.append(Compared(name, tuple(rows)))
    return Comparison(
        model=replace(UNKNOWN_MODEL, name=f"{first} and {count_of(len(compared), 'other')}"),
        settings={**base.settings, "results": list(by_name)},
        provenance=provenance(started=started),
        of=base.kind,
        first=first,
        results=tuple(compared),
    )


def refuse_other(first: str, base: Result, name: str, result: Result) -> None:
    """Refuse a result whose kind, settings or texts differ from those of the first one.

    Raises:
        SinkscopeError: They differ.
    """
    if result.kind != base.kind:
        raise SinkscopeError(f"{first} holds {base.kind}, and {name} holds {result.kind}: give results of one kind")
    known = TEXT_READ in base.settings and TEXT_READ in result.settings  # older files do not say it
    left_out = OF_THE_MODEL | {"text" if known else TEXT_READ}  # a file may have two names
    asked: list[Mapping[str, Any]] = []
    for settings in (base.settings, result.settings):
        asked.append({key: value for key, value in settings.items() if key not in left_out})
    other = differing(*asked)
    if other:
        raise SinkscopeError(
            f"{first} and {name} were measured with other settings or texts ({other}): measure both in the same way"
        )


# --- reading ---


def expanded(thing: Any) -> Sequence[Any]:
    """Return what a thing stands for: a folder of results or checkpoints for these, in the order of their numbers."""
    if not isinstance(thing, str | PathLike):
        return [thing]
    folder = Path(thing).expanduser()
    if not folder.is_dir() or _is_one(folder):
        return [thing]
    inside = [path for path in folder.iterdir() if path.suffix == ".json" or _is_one(path)]
    if not inside:
        raise SinkscopeError(
            f"{pathless(str(thing))} holds no results and no checkpoints: give the folder of JSON files, of scans, or "
            "of checkpoints"
        )
    return sorted(inside, key=lambda path: re.sub(r"\d+", lambda number: number[0].zfill(16), path.name))


def _is_one(folder: Path) -> bool:
    """Whether a folder is a checkpoint, or a scan that has ended."""
    return (folder / "config.json").is_file() or (folder / CARD).is_file()


def name_of(thing: Any) -> str:
    """Return the name of a result: that of its file, folder or model."""
    if isinstance(thing, Result):
        return thing.model.name
    if isinstance(thing, str | PathLike):
        path = Path(thing)
        return path.stem if path.suffix in (".json", ".gguf") else path.name or str(thing)
    return str(getattr(thing, "sinkscope_name", type(thing).__name__))


def result_of(thing: Any) -> Result | None:
    """Return a result, that in a file, or the card of a scan; None of a model, which is to be measured."""
    if isinstance(thing, Result):
        return thing
    if isinstance(thing, str | PathLike):
        path = path_of(thing)
        if (path / CARD).is_file():
            return SinkCard.load(path / CARD)
        if path.suffix == ".json":
            return Result.load(path)
    return None


# --- drawing ---


def draw(result: Comparison) -> Any:
    """Draw how far the numbers that changed moved from the first result, a panel for each; or the first number."""
    drawn: dict[tuple[str, str], list[Row]] = {}
    for compared in result.results:
        for row in compared.judged:
            drawn.setdefault((row.about, row.name), []).append(replace(row, name=compared.name))
    changed = [key for key, rows in drawn.items() if any(row.table == CHANGED for row in rows)]
    shown = (changed or [*drawn][:1] or [("", "nothing is judged")])[:MOST_PANELS]
    fig = panels([f"{html.escape(name)}<br>{html.escape(about)}" for about, name in shown], columns=2)
    for number, key in enumerate(shown):
        place = {"row": number // 2 + 1, "col": number % 2 + 1}
        rows = drawn.get(key, [])
        bars(fig, rows, "change", BLUE, "", **place)
        fig.update_yaxes(title_text="change", tickformat=".3~p" if any(map(is_share, rows)) else None, **place)
    return figure_of(fig, result, width=960, height=160 + 280 * -(-len(shown) // 2), bottom=70)
