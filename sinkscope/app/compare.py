"""`compare`: two or more results of one kind side by side, text by text.

1. Read: each thing given is a result, a file of one, a folder of results or checkpoints, or a model that is measured.
2. Refuse: results of other kinds, settings or texts than the first have no common numbers.
3. Compare: each result with the first, number by number.
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
from sinkscope.files.store import begun_by
from sinkscope.measure import Setup
from sinkscope.measure.margin import Interval, in_points
from sinkscope.measure.measurement import TEXT_READ
from sinkscope.measure.merge import CAME, CHANGED, SAME, SMALL, UNJUDGED, WENT, by_chance, merge
from sinkscope.results.console import note
from sinkscope.results.notation import count_of, short_sentence, word_list
from sinkscope.results.result import Result
from sinkscope.results.row import Card, Row, table_of
from sinkscope.results.style import BLUE, GREY, figure_of, panels
from sinkscope.results.tables import Table, cell

OF_THE_MODEL = frozenset(
    {"revision", "unknown_tokens", "model", "device", "dtype", "sinkscope", "decoding", "text_said"}
)
"""Settings that say which model was measured and where, not what was asked of it."""
MOST_PANELS = 8
EQUAL = 1e-3  # of a change, by which it may differ between texts and is the same in all
RULE = (
    "A number changed if the 95 % interval of its change leaves out zero and it moved by 1 % of its value. The change "
    "is the mean of the differences text by text, and without values for each text that of both margins together."
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
        """The numbers that have an interval."""
        return [row for row in self.rows if "lower" in row.numbers]

    @property
    def moved(self) -> list[Row]:
        """The numbers of these that changed."""
        return [row for row in self.judged if row.table == CHANGED]

    @property
    def headline(self) -> Row:
        """The first number that changed in some texts more than in others; controls come last."""
        every = self.moved or self.judged
        return min(every, key=lambda row: (row.note.endswith("controls"), is_constant(row)))


@dataclass(frozen=True, kw_only=True)
class Comparison(Result):
    """Results of one kind side by side: what changed from the first to each other.

    Attributes:
        of: The kind of the results.
        first: Name of the first result, with which the others are compared.
        results: The other results.
    """

    kind = "compare"
    columns = ("result", "name", "before", "after", "change", "lower", "upper")
    drawing: ClassVar[Any] = "sinkscope.app.compare:draw"
    glossary: ClassVar = {
        "result": "the result that is compared with the first",
        "table": "whether the number changed, came, went, or is not judged",
        "change": "how far the number moved: after less before",
        "lower": "lower end of the 95 % interval of the change; empty if the change is not judged",
        "upper": "upper end of the interval",
        "texts": "texts that are compared one by one; 0: the interval is that of both margins together",
    }

    of: str
    first: str
    results: tuple[Compared, ...]

    def conclusion(self) -> str:
        """Return how many numbers of the last result changed, beside what chance gives, and the first that did."""
        last = self.results[-1]
        start, judged = f"{last.name} against {self.first}: ", len(last.judged)
        if not judged:
            words = [row for row in last.rows if row.table == CHANGED]
            return f"{start}no number has an interval; {count_of(len(words), 'word')} changed."
        named = last.headline
        counted = f"{len(last.moved)} of {judged} judged numbers changed ({by_chance(judged)} by chance)"
        short = f"{start}{counted}; {named.name} {moved_words(named)}"
        texts = int(named.get("texts"))
        return short_sentence([f"{short}, {texts} texts." if texts else f"{short}.", f"{short}."])

    def cards(self) -> list[Card]:
        """Return a card for each thing that is compared: what changed, then what did not."""
        made: list[Card] = []
        for compared in self.results:
            for about in dict.fromkeys(row.about for row in compared.rows):
                own = [row for row in compared.rows if row.about == about]
                title = f"{about or self.of}: {compared.name}, compared with {self.first}"
                made.append(Card(title, tuple(card_rows(own))))
        return made

    def details(self) -> list[str]:
        """Return the rule by which a number counts as changed, and how many changed in each result but the last."""
        lines = [RULE]
        for compared in self.results[:-1]:
            lines.append(f"{compared.name}: {len(compared.moved)} of {len(compared.judged)} judged numbers changed.")
        return lines

    def rows(self) -> Table:
        """Return one row for each number or word of each result."""
        names = [compared.name for compared in self.results for _ in compared.rows]
        rows = table_of(row for compared in self.results for row in compared.rows)
        return [{"result": name, **row} for name, row in zip(names, rows, strict=True)]


def card_rows(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Return what a card says of some rows: what changed, what did not, and the names of all that stayed the same.

    A number that is not judged is said if it moved, and no other number of its row is judged.
    """
    judged = {row.name.partition(":")[0] for row in rows if "lower" in row.numbers}
    said = [(row.name, sentence(row)) for row in rows if row.table in (CHANGED, CAME, WENT)]
    for row in rows:
        if row.table == UNJUDGED and row.get("change") and row.name.partition(":")[0] not in judged:
            said.append((f"{row.name} ({UNJUDGED})", sentence(row)))
    said += [(f"{row.name} ({row.table})", sentence(row)) for row in rows if row.table in (SMALL, SAME) and row.numbers]
    same = [row.name for row in rows if row.table == SAME and not row.numbers]
    same += [row.name for row in rows if row.table == UNJUDGED and not row.get("change")]
    return [*said, ("the same", word_list(same, len(same)))] if same else said


def sentence(row: Row) -> str:
    """Return what is before and after, and how far it moved; a word, and what came or went, is in the note."""
    if not row.numbers:
        return ": ".join(filter(None, [row.table if row.table in (CAME, WENT) else "", row.note]))
    share, texts = is_share(row), int(row.get("texts"))
    old, new = (cell(row.get(side), percent=share) for side in ("before", "after"))
    moved = f"{moved_words(row)}; {texts} texts" if texts else moved_words(row)
    if is_constant(row):
        moved = f"{in_points(row.get('change'), None, share)} in each of {texts} texts"
    return f"{old} -> {new} ({moved})"


def moved_words(row: Row) -> str:
    """Return how far a number moved, with its interval."""
    interval = None
    if "lower" in row.numbers:
        interval = Interval(row.get("change"), row.get("lower"), row.get("upper"))
    return in_points(row.get("change"), interval, is_share(row))


def is_share(row: Row) -> bool:
    """Return whether the number of a merged row is a share."""
    return row.numbers["before"].kind == "share"


def is_constant(row: Row) -> bool:
    """Return whether it is the same change in every text, as at a first token that sees itself alone."""
    return bool(row.get("texts")) and row.get("upper") - row.get("lower") <= EQUAL * abs(row.get("change"))


# --- what is compared ---


@partial(checks_arguments, others=Setup.open)
def compare(
    *results: Any, measure: str = "find-sinks", out: str | Path | None = None, progress: Any = None, **settings: Any
) -> Comparison:
    """Compare results of one kind with the first one: two models, or the checkpoints of a training.

    A result is a JSON file, a folder of such files, of scans or of checkpoints, or a model, which is then measured.
    Numbers are compared text by text, with the 95 % interval of the mean difference. Neurons, places and conditions
    that came, went or changed are listed. Results of other kinds, settings or texts are refused.

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
    return comparison_of(by_name, started)


def comparison_of(results: Mapping[str, Result], started: float | None = None) -> Comparison:
    """Compare results with the first one.

    Args:
        results: The results by their names.
        started: `time.perf_counter()` at the beginning.

    Raises:
        SinkscopeError: They differ in kind, settings or texts, or have no number in common.
    """
    (first, base), *others = results.items()
    compared: list[Compared] = []
    for name, result in others:
        refuse_other(first, base, name, result)
        rows = merge(base.findings(), result.findings())
        if not any(row.numbers for row in rows):
            raise SinkscopeError(
                f"{first} and {name} have no number in common: results of {base.kind} are not compared"
            )
        compared.append(Compared(name, tuple(rows)))
    model = replace(UNKNOWN_MODEL, name=f"{first} and {count_of(len(compared), 'other')}")
    made = provenance(started=time.perf_counter() if started is None else started)
    settings = {**base.settings, "results": list(results)}
    return Comparison(
        model=model, settings=settings, provenance=made, of=base.kind, first=first, results=tuple(compared)
    )


def refuse_other(first: str, base: Result, name: str, result: Result) -> None:
    """Refuse a result whose kind, settings or texts differ from those of the first one.

    Raises:
        SinkscopeError: They differ.
    """
    if result.kind != base.kind:
        raise SinkscopeError(f"{first} holds {base.kind}, and {name} holds {result.kind}: give results of one kind")
    differing: list[str] = []
    known = TEXT_READ in base.settings and TEXT_READ in result.settings  # older files do not say it
    left_out = OF_THE_MODEL | ({"text"} if known else {TEXT_READ})  # a file may have two names
    for key in sorted({*base.settings, *result.settings} - left_out):
        value, other = base.settings.get(key), result.settings.get(key)
        if value != other:
            differing.append(f"{key} is {value!r:.40} and {other!r:.40}")
    if differing:
        raise SinkscopeError(
            f"{first} and {name} were measured with other settings or texts ({'; '.join(differing)}): measure both in "
            "the same way"
        )


# --- reading ---


def expanded(thing: Any) -> list[Any]:
    """Return what a thing stands for: a folder of results or checkpoints for these, in the order of their numbers."""
    if not isinstance(thing, str | PathLike):
        return [thing]
    folder = Path(thing).expanduser()
    if not folder.is_dir() or (folder / "config.json").is_file() or (folder / CARD).is_file():
        return [thing]
    inside: list[Path] = []
    for path in sorted(folder.iterdir(), key=natural_key):
        is_result = path.suffix == ".json" and path.is_file()
        if is_result or (path / "config.json").is_file() or (path / CARD).is_file():
            inside.append(path)
        elif path.is_dir() and begun_by(path) == "scan":
            note(f"{path.name} is left out: its scan has not ended, and the same command goes on with it")
    if not inside:
        raise SinkscopeError(
            f"{pathless(str(thing))} holds no results and no checkpoints: give the folder of JSON files, of scans, or "
            "of checkpoints"
        )
    return list(inside)


def natural_key(path: Path) -> str:
    """Return the key that sorts step9 before step10."""
    return re.sub(r"\d+", lambda number: number[0].zfill(16), path.name)


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
    """Draw how far the first number and those that changed moved from the first result, a panel for each."""
    drawn: dict[tuple[str, str], dict[str, Row]] = {}
    for compared in result.results:
        for row in compared.judged:
            drawn.setdefault((row.about, row.name), {})[compared.name] = row
    first, *others = drawn or [("", "nothing is judged")]
    changed = [key for key in others if any(row.table == CHANGED for row in drawn[key].values())]
    shown = [first, *changed][:MOST_PANELS]
    fig = panels([f"{html.escape(name)}<br><sup>{html.escape(about)}</sup>" for about, name in shown], columns=2)
    for number, key in enumerate(shown):
        place = {"row": number // 2 + 1, "col": number % 2 + 1}
        rows = drawn.get(key, {})
        scale, unit = (100, " in points") if any(map(is_share, rows.values())) else (1, "")
        ends = [[scale * row.get(name) for name in ("change", "lower", "upper")] for row in rows.values()]
        margins = {"array": [upper - at for at, _, upper in ends], "arrayminus": [at - lower for at, lower, _ in ends]}
        names = list(map(html.escape, rows))
        fig.add_scatter(
            x=names, y=[at for at, *_ in ends], error_y=margins, marker_color=BLUE, showlegend=False, **place
        )
        fig.add_hline(0, line={"color": GREY, "dash": "dot"}, **place)
        fig.update_yaxes(title_text=f"change{unit}", **place)
    return figure_of(fig, result, width=960, height=160 + 280 * -(-len(shown) // 2), bottom=70)
