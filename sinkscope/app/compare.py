"""`compare`: two or more results of one kind side by side, text by text.

1. Read: each thing given is a result, a file of one, a folder of results or checkpoints, or a model that is measured.
2. Refuse: results of another kind or with other settings than the first have no common numbers. What can be refused is
   refused before a model is measured.
3. Merge and judge (`changes.py`): rows of one subject, table and key are one row, and a number changed if it moved by
   more than the margin of its change, and by 1 % of its value.
4. Say: how many numbers changed, beside what chance gives; for spikes, first what became of that which most heads read.
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
from typing import Any

import plotly.graph_objects as go

from sinkscope.app.card import CARD, SinkCard, subjects_beside
from sinkscope.app.changes import Change, InWords, Verdict, merge, without_texts
from sinkscope.errors import SinkscopeError
from sinkscope.files.arguments import checks_arguments
from sinkscope.files.envelope import UNKNOWN_MODEL, measurements, provenance
from sinkscope.files.output import path_of
from sinkscope.files.plain import pathless
from sinkscope.files.store import differing
from sinkscope.measure import Measurement, Setup
from sinkscope.measure.measurement import TEXT_READ
from sinkscope.results.console import ProgressBar, note
from sinkscope.results.mean import Mean
from sinkscope.results.notation import count_of, word_list
from sinkscope.results.result import Result
from sinkscope.results.style import BLUE, figure_of
from sinkscope.results.table import Subject
from sinkscope.sinks.spikes.kept import Kept, fates_of, with_one_set
from sinkscope.sinks.spikes.result import FindSinks

OF_THE_MODEL = {"revision", "model", "device", "dtype", "sinkscope", "decoding", "text", "text_said"}
"""Settings that say which model was measured and where, or what a text is called, not what was asked of the model."""
OF_THE_TEXTS = {TEXT_READ, "texts", "seed"}
"""Settings that say on which texts and draws a number rests; results of others are compared by both intervals."""
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
        """Return how many numbers of the last result changed, beside what chance gives, and what changed most."""
        last = self.results[-1]
        how = "text by text" if last.same_texts else "by both intervals (other texts)"
        counted = f"{len(last.moved)} of {len(last.judged)} judged numbers changed"
        chance = f"({BY_CHANCE * len(last.judged):.1g} by chance)"
        between = f"{last.name} against {self.first}"
        if last.fates:  # what became of the spike that most heads read comes first
            return f"{between}: {last.fates[0].sentence}. In all, {counted} {how} {chance}."
        if not last.judged:
            return f"{between}, {how}: no number has a margin."
        first = last.judged[0]
        return f"{between}, {how}: {counted} {chance}; {first.key} {first.text('change')}."

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
            for comparison in self.results:
                for row in comparison.judged:
                    if row.key == last.key:
                        names.append(html.escape(comparison.name))
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


@partial(checks_arguments, settings_of=Setup.open)
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
    things: list[Any] = []
    for result in results:
        things += expanded(result)
    if len(things) < 2:
        raise SinkscopeError(
            f"{count_of(len(things), 'result')} to compare: give two or more (files of results, folders of "
            "checkpoints, or models)"
        )
    all_known = [known_result(thing) for thing in things]
    refuse_known(all_known, measure)
    by_name: dict[str, Known] = {}
    for number, (thing, known) in enumerate(zip(things, all_known, strict=True), 1):
        result = known or measured_model(thing, measurement.load(), settings, progress)
        name = result.name
        if name in by_name:
            name = f"{name} ({number})"
        by_name[name] = result
        if known is None and out is not None:
            note(f"{name}: {result.result.save(Path(out) / f'{name}.json')}")
    return comparison_of(by_name, started)


def comparison_of(by_name: Mapping[str, Known], started: float) -> Comparison:
    """Compare results with the first of them.

    Args:
        by_name: The results, by what they are called.
        started: When it was begun.

    Raises:
        SinkscopeError: They differ in settings.
    """
    (first, base), *compared_with = by_name.items()
    compared: list[Compared] = []
    for name, other in compared_with:
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
