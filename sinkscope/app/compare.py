"""`compare`: two or more results of one kind side by side, text by text.

1. Read: each thing given is a result, a file of one, a folder of results or checkpoints, or a model that is measured.
2. Refuse: results of another kind or with other settings than the first have no common numbers. What can be refused is
   refused before a model is measured.
3. Merge: rows of one subject, table and key are one row. Two subjects are one if their keys are equal, or share most:
   spikes at one place, layers.
4. Judge: a number changed if it moved by more than the margin of its change, and by 1 % of its value. The change is the
   mean of the differences over the texts that both have; without values for each text, the margin is that of both
   together (the root of the sum of their squares). A number without a margin is not judged. A word changed if it is
   another.
"""

from __future__ import annotations

import html
import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from math import hypot
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go

from sinkscope.app.card import CARD, SinkCard, subjects_beside
from sinkscope.errors import SinkscopeError
from sinkscope.files.arguments import checks_arguments
from sinkscope.files.envelope import UNKNOWN_MODEL, measurements, provenance
from sinkscope.files.output import path_of
from sinkscope.files.plain import pathless
from sinkscope.files.store import differing
from sinkscope.measure import Measurement, Setup
from sinkscope.measure.margin import DIFFERENCES, margin_of
from sinkscope.measure.measurement import TEXT_READ
from sinkscope.results.console import ProgressBar, note
from sinkscope.results.mean import Mean
from sinkscope.results.notation import count_of, word_list
from sinkscope.results.result import Result
from sinkscope.results.style import BLUE, figure_of
from sinkscope.results.table import SIGNED, Cell, Column, Kind, Row, Subject, detail, optional, whole
from sinkscope.sinks.spikes.kept import Kept, fates_of, with_one_set
from sinkscope.sinks.spikes.result import FindSinks

OF_THE_MODEL = {"revision", "model", "device", "dtype", "sinkscope", "decoding", "text", "text_said"}
"""Settings that say which model was measured and where, or what a text is called, not what was asked of the model."""
OF_THE_TEXTS = {TEXT_READ, "texts", "seed"}
"""Settings that say on which texts and draws a number rests; results of others are compared by both intervals."""
SMALLEST_CHANGE = 0.01  # of its value that a number moves by at least before it counts as changed
COMES = 0.05  # share of a whole, under which the coming or going of a row is left to the search that found it
BY_CHANCE = 0.05  # of judged numbers seem to change where none does
RULE = (
    "A number changed if it moved by more than the margin of its change, and by 1 % of its value. The change is the "
    "mean of the differences text by text, and without values for each text the margin is that of both together."
)


class Verdict(StrEnum):
    """What became of a number, a word or a row, in the order in which it is read."""

    CHANGED = "changed"
    CAME = "came"
    WENT = "went"
    UNJUDGED = "not judged"
    SAME = "no change"


@dataclass(frozen=True)
class Place:
    """Where something stands in both results.

    Attributes:
        about: The name of the subject.
        row: What the row is called.
        column: What the column is called; empty: the whole row.
    """

    about: str
    row: str
    column: str = ""

    def __str__(self) -> str:
        return ": ".join(filter(None, [self.row, self.column]))


@dataclass(frozen=True, kw_only=True)
class Change(Row, table="changes", title="what changed"):
    """What became of a number, a word or a row.

    Attributes:
        kind: What the number is.
    """

    key: Place
    verdict: Verdict
    kind: Kind = "word"

    before: Mean | None = optional("before", "number", "The number of the first result.")
    after: Mean | None = optional("after", "number", "The number of the other result.")
    change: Mean | None = optional("change", "number", "The mean difference over the texts that both have.")
    texts: Mean | None = detail("texts", "count", "Texts over which the difference is taken.")
    words: str | None = optional("in words", "word", "What a word was, and is.")

    @property
    def group(self) -> str:
        """The heading under which it stands."""
        return self.verdict

    @property
    def in_words(self) -> str:
        """What became of something that is no number: "went: share 20%"."""
        if self.verdict is Verdict.CHANGED and self.words:
            return self.words
        return f"{self.verdict}: {self.words}" if self.words else str(self.verdict)

    @property
    def margin(self) -> float | None:
        """The margin of the change; None: it is not judged."""
        return None if self.change is None else self.change.margin

    def cell(self, column: Column) -> Cell:
        """Return a number with the digits of its own kind, and a change with its sign."""
        if column.key in ("texts", "words"):
            return super().cell(column)
        if column.key != "change":
            return replace(column, kind=self.kind).cell(getattr(self, column.key))
        kind: Kind = "points" if self.kind in ("share", "fine_share") else self.kind
        found = replace(column, kind=kind).cell(self.change)
        if kind in SIGNED or self.change is None or self.change.value <= 0:
            return found
        return found._replace(value=f"+{found.value}")


@dataclass(frozen=True, kw_only=True)
class InWords(Change, table="words", title="what changed in words", form="title"):
    """What became of a word or a whole row, which stands in words above the table."""


@dataclass(frozen=True)
class Compared:
    """What differs between the first result and another one.

    Attributes:
        name: Name of the other result.
        rows: Both merged.
        same_texts: Whether both read the same texts. False: numbers are compared by both intervals.
        fates: What became of the spikes of the first model, where the results are about spikes.
        measured_again: Whether what the first model's needed neurons do was measured in the other model.
    """

    name: str
    rows: tuple[Change, ...]
    same_texts: bool = True
    fates: tuple[Kept, ...] = ()
    measured_again: bool = False

    @property
    def judged(self) -> list[Change]:
        """The numbers whose change has a margin, those that changed first."""
        return [row for row in self.rows if row.margin is not None]

    @property
    def moved(self) -> list[Change]:
        """The numbers of these that changed."""
        return [row for row in self.judged if row.verdict is Verdict.CHANGED]


@dataclass(frozen=True, kw_only=True)
class Comparison(Result):
    """Results of one kind side by side: what changed from the first to each other.

    Attributes:
        of: The kind of the results.
        first: Name of the first result, with which the others are compared.
        results: The other results.
    """

    kind = "compare"

    of: str
    first: str
    results: tuple[Compared, ...]

    def conclusion(self) -> str:
        """Return how many numbers of the last result changed, beside what chance gives, and the first that did."""
        last = self.results[-1]
        if last.fates:
            return self.fate_words(last)
        how = "text by text" if last.same_texts else "by both intervals (other texts)"
        compared = f"{last.name} against {self.first}, {how}"
        if not last.judged:
            return f"{compared}: no number has a margin."
        counted = f"{len(last.moved)} of {len(last.judged)} judged numbers changed"
        chance = f"{BY_CHANCE * len(last.judged):.1g} by chance"
        first = last.judged[0]
        return f"{compared}: {counted} ({chance}); {first.key} {first.text('change')}."

    def fate_words(self, compared: Compared) -> str:
        """Return what became of the spike that most heads read, then how many numbers changed."""
        how = "text by text" if compared.same_texts else "by both intervals (other texts)"
        counted = f"{len(compared.moved)} of {len(compared.judged)} judged numbers changed"
        chance = f"{BY_CHANCE * len(compared.judged):.1g} by chance"
        first = compared.fates[0].sentence
        return f"{compared.name} against {self.first}: {first}. In all, {counted} {how} ({chance})."

    def subjects(self) -> list[Subject]:
        """Return what became of spikes, then a table for each thing that is compared, and the names of what stayed."""
        subjects: list[Subject] = []
        for compared in self.results:
            if compared.fates:
                title = f"The norm spikes of {self.first} in {compared.name}"
                subjects.append(Subject(title, compared.fates, f"{compared.name}: spikes"))
            for about in dict.fromkeys(row.key.about for row in compared.rows):
                rows = [row for row in compared.rows if row.key.about == about]
                same = dict.fromkeys(row.key.row for row in rows if row.verdict is Verdict.SAME)
                shown: list[Change] = []
                words: list[tuple[str, str]] = []
                for row in rows:
                    if row.verdict is Verdict.SAME:
                        continue
                    if row.before is None:
                        words.append((str(row.key), row.in_words))
                        row = InWords(key=row.key, verdict=row.verdict, words=row.words)
                    shown.append(row)
                if same:
                    numbers = sum(row.verdict is Verdict.SAME for row in rows)
                    words.append(("no change", f"{count_of(numbers, 'number')} in {count_of(len(same), 'row')}"))
                title = f"{about or self.of}: {compared.name}, compared with {self.first}"
                subjects.append(Subject(title, tuple(shown), about, words=tuple(words)))
        return subjects

    def details(self) -> list[str]:
        """Return the rule by which a number counts as changed."""
        lines = [RULE]
        other_texts = [compared.name for compared in self.results if not compared.same_texts]
        if other_texts:
            lines.append(
                f"{word_list(other_texts)} read other texts than {self.first}, so each margin is that of both."
            )
        for compared in self.results:
            for fate in compared.fates:
                before, after = fate.needed
                if before != after and fate.now is not None:
                    lines.append(set_words(compared, self.first, fate))
        return lines

    def figure(self) -> Any:
        """Draw how far the number of the conclusion moved from the first result to each other."""
        fig = go.Figure()
        for last in self.results[-1].judged[:1]:
            names: list[str] = []
            changes: list[Mean] = []
            for one in self.results:
                for row in one.judged:
                    if row.key == last.key:
                        names.append(html.escape(one.name))
                        changes.append(row["change"])
            margins = {"type": "data", "array": [change.margin for change in changes]}
            fig.add_bar(x=names, y=[change.value for change in changes], error_y=margins, marker_color=BLUE)
            fig.update_yaxes(title_text=f"change of {html.escape(str(last.key))}")
        return figure_of(fig, self, width=960, height=440)


def set_words(compared: Compared, first: str, fate: Kept) -> str:
    """Return that another set of neurons was chosen, and of which set effects are compared."""
    before, after = fate.needed
    chosen = f"At {fate.key}, {first} needs {before} and {compared.name} needs {after}"
    if compared.measured_again:
        return f"{chosen}: effects are those of {before} in both models."
    return f"{chosen}: their effects are not compared. Give the model in place of its file to zero {before} in it, too."


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
    by_name: dict[str, Known] = {}
    for number, (thing, known) in enumerate(zip(things, all_known, strict=True)):
        if known is None:
            known = measured_model(thing, measurement.load(), settings, progress)
        name = known.name
        if name in by_name:
            name = f"{name} ({number + 1})"
        by_name[name] = known
        if all_known[number] is None and out is not None:
            note(f"{name}: {known.result.save(Path(out) / f'{name}.json')}")
    (first, base), *others = by_name.items()
    compared: list[Compared] = []
    for name, other in others:
        refuse_other(first, base.result, name, other.result)
        compared.append(compare_pair(name, base, other))
    return Comparison(
        model=replace(UNKNOWN_MODEL, name=f"{first} and {count_of(len(compared), 'other')}"),
        settings={**base.result.settings, "results": list(by_name)},
        provenance=provenance(started),
        of=base.result.kind,
        first=first,
        results=tuple(compared),
    )


@dataclass(frozen=True)
class Known:
    """A result that is compared.

    Attributes:
        name: What it is called.
        result: The result.
        subjects: Its tables; of a scan those of its parts.
        setup: The open model. None: the result was there.
    """

    name: str
    result: Result
    subjects: Sequence[Subject]
    setup: Setup | None = None


def measured_model(thing: Any, measurement: Measurement, settings: dict[str, Any], progress: Any) -> Known:
    """Return the result of a model that is measured now, with the open model."""
    with ProgressBar() as bar:
        setup = Setup.open(thing, **settings, progress=progress or bar, loading=measurement.loading)
        found = measurement.on(setup)
    return Known(Path(found.model.name).name, found, found.compared(), setup)


def compare_pair(name: str, base: Known, other: Known) -> Compared:
    """Return what differs between two results: text by text if both read the same texts, else by both intervals."""
    before, after = base.subjects, other.subjects
    fates: tuple[Kept, ...] = ()
    if isinstance(base.result, FindSinks) and isinstance(other.result, FindSinks):
        fates = tuple(fates_of(base.result, other.result))
        before, after = (result.compared() for result in with_one_set(base.result, other.result, other.setup))
    same_texts = base.result.settings.get(TEXT_READ) == other.result.settings.get(TEXT_READ)
    if not same_texts:
        before, after = without_texts(before), without_texts(after)
    rows = tuple(merge(before, after))
    return Compared(name, rows, same_texts, fates, measured_again=other.setup is not None)


def without_texts(subjects: Sequence[Subject]) -> list[Subject]:
    """Return subjects whose numbers hold nothing of single texts."""
    changed: list[Subject] = []
    for subject in subjects:
        rows: list[Row] = []
        for row in subject.rows:
            numbers: dict[str, Mean] = {}
            for name, value in row.values().items():
                if isinstance(value, Mean):
                    numbers[name] = replace(value, by_text=())
            rows.append(replace(row, **numbers))
        changed.append(replace(subject, rows=tuple(rows), texts=()))
    return changed


def refuse_known(results: Sequence[Known | None], measure: str) -> None:
    """Refuse results that do not go together, or not with what models will be measured with.

    Args:
        results: The results; None of a model that is to be measured.
        measure: With what.

    Raises:
        SinkscopeError: They do not.
    """
    known = [result for result in results if result is not None]
    if not known:
        return
    first = known[0]
    for other in known[1:]:
        refuse_other(first.name, first.result, other.name, other.result)
    kind = first.result.kind
    if None in results and kind != measure:
        raise SinkscopeError(
            f"{first.name} holds {kind}, and models are measured with {measure}: give --measure {kind}, or results of "
            "one kind"
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


def known_result(thing: Any) -> Known | None:
    """Return a result, that in a file, or a scan with the tables of its parts; None of a model that is measured."""
    if isinstance(thing, Result):
        return Known(thing.model.name, thing, thing.compared())
    if isinstance(thing, str | PathLike):
        path = path_of(thing)
        if (path / CARD).is_file():
            card = SinkCard.load(path / CARD)
            return Known(path.name, card, subjects_beside(card, path))
        if path.suffix == ".json":
            result = Result.load(path)
            return Known(path.stem, result, result.compared())
    return None


# --- merging ---


def merge(before: Sequence[Subject], after: Sequence[Subject]) -> list[Change]:
    """Return what became of each number and word that both have, and of each row and subject that came or went."""
    pairs = partners(before, after)
    went = [Change(key=Place("", one.name), verdict=Verdict.WENT) for one in before if one.name not in pairs]
    known = {other.name for other in pairs.values()}
    came = [Change(key=Place("", other.name), verdict=Verdict.CAME) for other in after if other.name not in known]
    changes = [*went, *came]
    for one in before:
        if one.name in pairs:
            changes += of_subject(one, pairs[one.name])
    order = [*Verdict]
    return sorted(changes, key=lambda row: order.index(row.verdict))


def partners(before: Sequence[Subject], after: Sequence[Subject]) -> dict[str, Subject]:
    """Return the later subject of each earlier one that has a partner, by the earlier one's name."""
    pairs: list[tuple[float, str, Subject]] = []
    for one in before:
        for other in after:
            common = common_of(one.key, other.key)
            if common:
                pairs.append((-common, one.name, other))
    found: dict[str, Subject] = {}
    for _, name, other in sorted(pairs, key=lambda pair: pair[:2]):  # those that share most first
        if name not in found and other not in found.values():
            found[name] = other
    return found


def common_of(one: Any, other: Any) -> float:
    """Return how much the keys of two subjects share; equal keys share everything."""
    if one == other:
        return math.inf
    return one.shared(other) if type(one) is type(other) and hasattr(one, "shared") else 0


def of_subject(one: Subject, other: Subject) -> list[Change]:
    """Return what became of a subject, and of its rows."""
    changes: list[Change] = []
    if other.key != one.key:
        words = f"{one.name} -> {other.name}"
        changes.append(Change(key=Place(one.name, "where it is"), verdict=Verdict.CHANGED, words=words))
    old = {(row.table, row.key): row for row in one.rows}
    new = {(row.table, row.key): row for row in other.rows}
    for key in dict.fromkeys([*old, *new]):
        if key in old and key in new:
            texts = one.texts, other.texts
            changes += of_row(one.name, old[key], new[key], texts)
        else:
            row = old.get(key) or new[key]
            if row.is_control:  # what it is the control of is compared
                continue
            share = row.values().get("share")
            if not isinstance(share, Mean) or abs(share.value) >= COMES:
                verdict = Verdict.WENT if key in old else Verdict.CAME
                said = ", ".join(f"{row.column(name).name} {row.text(name)}" for name in row.values())
                changes.append(Change(key=Place(one.name, row.full_label), verdict=verdict, words=said or row.table))
    return changes


def of_row(about: str, first: Row, second: Row, texts: tuple[Sequence[str], Sequence[str]]) -> list[Change]:
    """Return what became of the words and numbers of a row that both have."""
    changes: list[Change] = []
    later = second.values()
    for name, before in first.values().items():
        after = later.get(name)
        column = first.column(name)
        key = Place(about, first.full_label, column.name)
        if isinstance(before, str):
            verdict = Verdict.SAME if after == before else Verdict.CHANGED
            changes.append(Change(key=key, verdict=verdict, words=f"{before} -> {after or 'none'}"))
        elif isinstance(after, Mean) and name != "control":
            changes.append(moved(key, column.kind, before, after, texts))
    return changes


def moved(key: Place, kind: Kind, before: Mean, after: Mean, texts: tuple[Sequence[str], Sequence[str]]) -> Change:
    """Return how far a number moved, text by text where both have one of each, and the verdict."""
    old = dict(zip(texts[0] or range(len(before.by_text)), before.by_text, strict=False))
    new = dict(zip(texts[1] or range(len(after.by_text)), after.by_text, strict=False))
    pairs = np.array([(old[text], new[text]) for text in old if text in new]).reshape(-1, 2)
    pairs = pairs[np.isfinite(pairs).all(1)]
    scores = kind == "share" and {*pairs.flat} <= {0.0, 1.0}  # right or wrong
    margin = margin_of(pairs[:, 1] - pairs[:, 0], DIFFERENCES if scores else None)
    start, end = before.value, after.value
    count = 0
    if margin is not None:
        start, end = pairs.mean(0).tolist()
        count = len(pairs)
    elif before.margin is not None and after.margin is not None:
        margin = hypot(before.margin, after.margin)
    verdict = Verdict.UNJUDGED if end != start else Verdict.SAME
    if margin is not None:
        far = abs(end - start) > max(margin, SMALLEST_CHANGE * abs(before.value))
        verdict = Verdict.CHANGED if far else Verdict.SAME
    change = Mean(end - start, margin)
    return Change(
        key=key, verdict=verdict, kind=kind, before=Mean(start), after=Mean(end), change=change, texts=whole(count)
    )
