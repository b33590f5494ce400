"""`compare`: two or more results of one kind side by side, text by text.

1. Read: each thing given is a result, a file of one, a folder of results or checkpoints, or a model that is measured.
2. Refuse: results of another kind or with other settings than the first have no common numbers. What can be refused is
   refused before a model is measured.
3. Merge: rows of one subject, table and name are one row. Two subjects are one if their names differ in numbers alone;
   if they name layers, those with most common layers are one.
4. Judge: a number changed if it moved by more than the margin of its change, and by 1 % of its value. The change is the
   mean of the differences over the texts that both have; without values for each text, the margin is that of both
   together (the root of the sum of their squares). A number without a margin is not judged. A word changed if it is
   another.
"""

from __future__ import annotations

import html
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import hypot
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go

from sinkscope.app.card import CARD, SinkCard
from sinkscope.errors import SinkscopeError
from sinkscope.files.arguments import checks_arguments
from sinkscope.files.envelope import UNKNOWN_MODEL, measurements, provenance
from sinkscope.files.output import path_of
from sinkscope.files.plain import pathless
from sinkscope.files.store import differing
from sinkscope.measure import Setup
from sinkscope.measure.margin import DIFFERENCES, margin_of
from sinkscope.measure.measurement import TEXT_READ
from sinkscope.results.console import note
from sinkscope.results.notation import count_of, word_list
from sinkscope.results.result import Result
from sinkscope.results.row import Card, Mean, Row, table_of
from sinkscope.results.style import BLUE, bars, figure_of
from sinkscope.results.tables import Table, cell

OF_THE_MODEL = {"revision", "model", "device", "dtype", "sinkscope", "decoding", "text", "text_said"}
"""Settings that say which model was measured and where, or what a text is called, not what was asked of the model."""
OF_THE_TEXTS = {TEXT_READ, "texts", "seed"}
"""Settings that say on which texts and draws a number rests; results of others are compared by both intervals."""
SMALLEST_CHANGE = 0.01  # of its value that a number moves by at least before it counts as changed
COMES = 0.05  # share of a whole, under which the coming or going of a row is left to the search that found it
CHANGED, CAME, WENT, UNJUDGED, SAME = "changed", "came", "went", "not judged", "no change"
VERDICTS = (CHANGED, CAME, WENT, UNJUDGED, SAME)
"""The tables of a comparison, in the order in which they are read."""
BY_CHANCE = 0.05  # of judged numbers seem to change where none does
RULE = (
    "A number changed if it moved by more than the margin of its change, and by 1 % of its value. The change is the "
    "mean of the differences text by text, and without values for each text the margin is that of both together."
)
_LAYERS = re.compile(r"layers? (\d+)(?:-(\d+))?$")


@dataclass(frozen=True)
class Compared:
    """What differs between the first result and another one.

    Attributes:
        name: Name of the other result.
        rows: Both merged: the table of each row is its verdict.
        same_texts: Whether both read the same texts. False: numbers are compared by both intervals.
    """

    name: str
    rows: tuple[Row, ...]
    same_texts: bool = True

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

    of: str
    first: str
    results: tuple[Compared, ...]

    def conclusion(self) -> str:
        """Return how many numbers of the last result changed, beside what chance gives, and the first that did."""
        last = self.results[-1]
        how = "text by text" if last.same_texts else "by both intervals (other texts)"
        compared = f"{last.name} against {self.first}, {how}"
        if not last.judged:
            return f"{compared}: no number has a margin."
        counted = f"{len(last.moved)} of {len(last.judged)} judged numbers changed"
        chance = f"{BY_CHANCE * len(last.judged):.1g} by chance"
        first = last.judged[0]
        return f"{compared}: {counted} ({chance}); {first.name} {moved_words(first)}."

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
        other_texts = [compared.name for compared in self.results if not compared.same_texts]
        if not other_texts:
            return [RULE]
        return [RULE, f"{word_list(other_texts)} read other texts than {self.first}, so each margin is that of both."]

    def rows(self) -> Table:
        """Return one row for each number or word of each result."""
        names = [compared.name for compared in self.results for _ in compared.rows]
        rows = table_of(row for compared in self.results for row in compared.rows)
        return [{"result": name, **row} for name, row in zip(names, rows, strict=True)]

    def figure(self) -> Any:
        """Draw how far the number of the conclusion moved from the first result to each other."""
        fig = go.Figure()
        for last in self.results[-1].judged[:1]:
            same = [(one.name, row) for one in self.results for row in one.judged if row.name == last.name]
            bars(fig, [replace(row, name=name) for name, row in same if row.about == last.about], "change", BLUE)
            fig.update_yaxes(title_text=f"change of {html.escape(last.name)}")
        return figure_of(fig, self, width=960, height=440)


def sentence(row: Row) -> str:
    """Return what is before and after, and how far it moved; of a word, and of what came or went, the note."""
    if not row.numbers:
        return row.note if row.table == CHANGED else ": ".join(filter(None, [row.table, row.note]))
    share = row.numbers["before"].kind == "share"
    old, new = (cell(row.get(side), percent=share) for side in ("before", "after"))
    words = f"{old} -> {new} ({moved_words(row)})"
    return f"{words}, {UNJUDGED}" if row.table == UNJUDGED else words


def moved_words(row: Row) -> str:
    """Return how far a number moved, with its margin: "-10.0 points ± 4.0"; of a number that is no share "-2.5 ± 1"."""
    is_share = row.numbers["before"].kind == "share"
    scale, form, unit = (100.0, ".1f", " points") if is_share else (1.0, ".3g", "")
    words = f"{scale * row.get('change'):+{form}}{unit}"
    if row.table == UNJUDGED:
        return words
    return f"{words} ± {scale * row.margin('change'):{form}}"


# --- what is compared ---


@partial(checks_arguments, others=Setup.open)
def compare(
    *results: Any, measure: str = "find-sinks", out: str | Path | None = None, progress: Any = None, **settings: Any
) -> Comparison:
    """Compare results of one kind with the first one: two models, or the checkpoints of a training.

    A result is a JSON file, a folder of such files, of scans or of checkpoints, or a model, which is then measured.
    Numbers are compared text by text, with the margin of the mean difference, and by both intervals where the texts are
    others. Neurons, places and conditions that came, went or changed are listed. Results of other kinds or settings are
    refused.

    Args:
        results: Two or more: results, their JSON files, folders of results or of checkpoints, or models, which are then
            measured. The others are compared with the first.
        measure: What models are measured with: a measurement that needs no arguments.
        out: Folder to which the result of each model that is measured is written as it finishes.
        progress: Called as `progress(what, done, total)`.
        settings: How models are opened, as for `sinkscope.measure.Setup.open`.

    Raises:
        SinkscopeError: There are fewer than two results, or they differ in kind or settings.
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
    all_known = [known_result(thing) for thing in things]
    refuse_known(all_known, measure)
    by_name: dict[str, Result] = {}
    for number, (thing, known) in enumerate(zip(things, all_known, strict=True)):
        found = known[1] if known else measurement.load()(thing, **settings, progress=progress)
        name = known[0] if known else Path(found.model.name).name
        if name in by_name:
            name = f"{name} ({number + 1})"
        by_name[name] = found
        if not known and out is not None:
            note(f"{name}: {found.save(Path(out) / f'{name}.json')}")
    (first, base), *others = by_name.items()
    compared: list[Compared] = []
    for name, result in others:
        refuse_other(first, base, name, result)
        compared.append(compare_pair(name, base, result))
    return Comparison(
        model=replace(UNKNOWN_MODEL, name=f"{first} and {count_of(len(compared), 'other')}"),
        settings={**base.settings, "results": list(by_name)},
        provenance=provenance(started),
        of=base.kind,
        first=first,
        results=tuple(compared),
    )


def compare_pair(name: str, base: Result, result: Result) -> Compared:
    """Return what differs between two results: text by text if both read the same texts, else by both intervals."""
    before, after = base.findings(), result.findings()
    same_texts = base.settings.get(TEXT_READ) == result.settings.get(TEXT_READ)
    if not same_texts:
        before, after = without_texts(before), without_texts(after)
    return Compared(name, tuple(merge(before, after)), same_texts)


def without_texts(rows: Sequence[Row]) -> list[Row]:
    """Return rows without the numbers of single texts."""
    changed: list[Row] = []
    for row in rows:
        numbers = {name: replace(mean, by_text=()) for name, mean in row.numbers.items()}
        changed.append(replace(row, numbers=numbers, texts=()))
    return changed


def refuse_known(results: Sequence[tuple[str, Result] | None], measure: str) -> None:
    """Refuse results that do not go together, or not with what models will be measured with.

    Args:
        results: Results with their names; None of a model that is to be measured.
        measure: With what.

    Raises:
        SinkscopeError: They do not.
    """
    known = [named for named in results if named is not None]
    for name, result in known[1:]:
        refuse_other(*known[0], name, result)
    for name, result in known[:1]:
        if None in results and result.kind != measure:
            raise SinkscopeError(
                f"{name} holds {result.kind}, and models are measured with {measure}: give --measure {result.kind}, or "
                "results of one kind"
            )


def refuse_other(first: str, base: Result, name: str, result: Result) -> None:
    """Refuse a result whose kind or settings differ from those of the first one.

    Raises:
        SinkscopeError: They differ.
    """
    if result.kind != base.kind:
        raise SinkscopeError(f"{first} holds {base.kind}, and {name} holds {result.kind}: give results of one kind")
    other = differing(asked_settings(base), asked_settings(result))
    if other:
        raise SinkscopeError(
            f"{first} and {name} were measured with other settings ({other}): measure both in the same way"
        )


def asked_settings(result: Result) -> dict[str, Any]:
    """Return the settings of a result that were asked for, without those of the model and of the texts."""
    return {name: value for name, value in result.settings.items() if name not in OF_THE_MODEL | OF_THE_TEXTS}


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


def known_result(thing: Any) -> tuple[str, Result] | None:
    """Return a result, that in a file, or the card of a scan, and its name; None of a model that is to be measured."""
    if isinstance(thing, Result):
        return thing.model.name, thing
    if isinstance(thing, str | PathLike):
        path = path_of(thing)
        if (path / CARD).is_file():
            return path.name, SinkCard.load(path / CARD)
        if path.suffix == ".json":
            return path.stem, Result.load(path)
    return None


# --- merging ---


def merge(before: Sequence[Row], after: Sequence[Row]) -> list[Row]:
    """Return a row for each number and word that both have, and for each row and subject that came or went.

    The table of a row is its verdict, and the note of a number the table that it is from. The numbers are before,
    after, change with its margin, and texts (those that are compared).
    """
    names = partners([row.about for row in before], [row.about for row in after])
    old = {(row.about, row.table, row.name): row for row in before}
    new = {(names[row.about], row.table, row.name): row for row in after}
    known = {about for about, _, _ in old}
    found = {about for about, _, _ in new}
    rows = [Row(WENT if about in known else CAME, about) for about in sorted(known ^ found)]
    for key in dict.fromkeys([*old, *new]):
        if key[0] in known & found:
            rows += of_one(old.get(key), new.get(key), key[0])
    return sorted(rows, key=lambda row: VERDICTS.index(row.table))


def of_one(first: Row | None, second: Row | None, about: str) -> list[Row]:
    """Return what is said of a row of a subject that both have: its word and its numbers, or that it came or went."""
    row = first or second
    assert row is not None
    if first is None or second is None:
        if "share" in row.numbers and abs(row.get("share")) < COMES:
            return []
        return [Row(CAME if first is None else WENT, row.name, {}, row.words() or row.table, about)]
    rows: list[Row] = []
    if first.note != second.note:
        rows.append(Row(CHANGED, row.name, {}, f"{first.note or 'none'} -> {second.note or 'none'}", about))
    elif first.note:
        rows.append(Row(SAME, row.name, {}, first.note, about))
    for number in first.numbers:
        if number in second.numbers and number != "control":
            rows.append(moved(first, second, number))
    return rows


def moved(first: Row, second: Row, number: str) -> Row:
    """Return how far a number of a row moved, text by text where both have one of each, and the verdict."""
    before = first.numbers[number]
    after = second.numbers[number]
    old = dict(zip(first.texts or range(len(before.by_text)), before.by_text, strict=False))
    new = dict(zip(second.texts or range(len(after.by_text)), after.by_text, strict=False))
    pairs = np.array([(old[text], new[text]) for text in old if text in new]).reshape(-1, 2)
    pairs = pairs[np.isfinite(pairs).all(1)]
    scores = before.kind == "share" and {*pairs.flat} <= {0.0, 1.0}  # right or wrong
    margin = margin_of(pairs[:, 1] - pairs[:, 0], DIFFERENCES if scores else None)
    ends = before.value, after.value
    texts = 0
    if margin is not None:
        ends, texts = pairs.mean(0).tolist(), len(pairs)
    elif before.margin is not None and after.margin is not None:
        margin = hypot(before.margin, after.margin)
    start, end = ends
    verdict = UNJUDGED if end != start else SAME
    if margin is not None:
        verdict = CHANGED if abs(end - start) > max(margin, SMALLEST_CHANGE * abs(before.value)) else SAME
    name = first.name if first.table == "findings" else f"{first.name}: {number.replace('_', ' ')}"
    numbers = {"before": Mean(start, kind=before.kind), "after": Mean(end, kind=before.kind)}
    numbers |= {"change": Mean(end - start, margin, kind=before.kind), "texts": Mean(texts, kind="count")}
    return Row(verdict, name, numbers, first.table, first.about)


def partners(before: Sequence[str], after: Sequence[str]) -> dict[str, str]:
    """Return the name that each later subject has among the earlier ones; one without a partner keeps its own."""
    names = {about: about for about in after}
    pairs: list[tuple[int, str, str]] = []
    for own in {*before} - {*after}:
        for other in {*after} - {*before}:
            (name, layers), (other_name, other_layers) = in_layers(own), in_layers(other)
            if name == other_name and layers & other_layers:
                pairs.append((-len(layers & other_layers), own, other))
    for _, own, other in sorted(pairs):  # those with most common layers first
        if own not in names.values() and names[other] == other:
            names[other] = own
    return names


def in_layers(about: str) -> tuple[str, set[int]]:
    """Return a subject without numbers, and the layers that it names; one and the same layer if it names none."""
    found = _LAYERS.search(about)
    layers = {-1} if found is None else {*range(int(found[1]), int(found[2] or found[1]) + 1)}
    return re.sub(r"\d+", "", _LAYERS.sub("", about)), layers
