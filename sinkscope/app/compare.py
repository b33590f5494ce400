"""`compare`: two or more results of one kind side by side, text by text.

1. Read: each thing given is a result, a file of one, a folder of results or checkpoints, or a model that is measured.
2. Refuse: results of other kinds, settings or texts than the first have no common numbers.
3. Compare: each result with the first, number by number.
"""

from __future__ import annotations

import html
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import EntryPoint
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar

from sinkscope.app.card import CARD, SinkCard
from sinkscope.errors import SinkscopeError
from sinkscope.files.arguments import checks_arguments
from sinkscope.files.kinds import measurements
from sinkscope.files.output import natural_key, path_of
from sinkscope.files.plain import pathless
from sinkscope.files.provenance import UNKNOWN_MODEL, provenance
from sinkscope.files.records import Whole
from sinkscope.files.store import begun_by
from sinkscope.measure.changes import Change, by_chance, changes_of
from sinkscope.measure.measurement import TEXT_READ
from sinkscope.results.cards import Card
from sinkscope.results.console import note
from sinkscope.results.notation import count_of, short_sentence, word_list
from sinkscope.results.result import Result
from sinkscope.results.style import BLUE, GREY, figure_of, panels
from sinkscope.results.tables import Grid, Table, strings

OF_THE_MODEL = frozenset(
    {"revision", "unknown_tokens", "model", "device", "dtype", "sinkscope", "decoding", "text_said"}
)
"""Settings that say which model was measured and where, not what was asked of it."""
MOST_PANELS = 8
RULE = (
    "A number changed if the 95 % interval of its change leaves out zero and it moved by 1 % of its value. The change "
    "is the mean of the differences text by text, and without values for each text that of both margins together."
)


@dataclass(frozen=True)
class Compared:
    """What differs between the first result and another one.

    Attributes:
        name: Name of the other result.
        model: The model that it is about.
        changes: Its numbers and words beside those of the first.
    """

    name: str
    model: str
    changes: tuple[Change, ...]

    @property
    def judged(self) -> list[Change]:
        """The numbers that have an interval."""
        return [change for change in self.changes if change.interval is not None]

    @property
    def moved(self) -> list[Change]:
        """The numbers of these that changed."""
        return [change for change in self.judged if change.changed]


@dataclass(frozen=True, kw_only=True)
class Comparison(Result):
    """Results of one kind side by side: what changed from the first to each other.

    Attributes:
        of: The kind of the results.
        first: Name of the first result, with which the others are compared.
        results: The other results.
    """

    kind = "compare"
    columns = ("result", "label", "before", "after", "value", "lower", "upper")
    tables_on_request = True
    drawing: ClassVar[Any] = "sinkscope.app.compare:draw"
    glossary: ClassVar = {
        "result": "the result that is compared with the first",
        "value": "how far the number moved: after less before",
        "lower": "lower end of the 95 % interval of the change; empty if the change is not judged",
        "upper": "upper end of the interval",
        "which": "what is new in a list, and what is gone",
    }

    of: str
    first: str
    results: tuple[Compared, ...]

    def conclusion(self) -> str:
        """Return how many numbers of the last result changed, beside what chance gives, and the first that did."""
        last = self.results[-1]
        judged, moved = last.judged, last.moved
        counted = f"{len(moved)} of {len(judged)} judged numbers changed ({by_chance(len(judged))} by chance)"
        if not judged:
            words = [change for change in last.changes if change.changed]
            return (
                f"{last.name} against {self.first}: no number has an interval; {count_of(len(words), 'word')} changed."
            )
        by_texts = [change for change in moved if not change.is_constant]
        named = (by_texts or moved or judged)[0]
        start = f"{last.name} against {self.first}: {counted}; "
        long = (
            f"{start}{named.label} {named.moved}, {named.texts} texts."
            if named.texts
            else f"{start}{named.label} {named.moved}."
        )
        return short_sentence([long, f"{start}{named.label} {named.moved}."])

    def cards(self) -> list[Card]:
        """Return a card for each thing that is compared: what changed, then what did not."""
        made: list[Card] = []
        for compared in self.results:
            for about in dict.fromkeys(change.about for change in compared.changes):
                own = [change for change in compared.changes if change.about == about]
                title = f"{about or self.of}: {compared.name}, compared with {self.first}"
                made.append(Card(title, tuple(card_rows(own))))
        return made

    def details(self) -> list[str]:
        """Return the rule by which a number counts as changed, and what is new in each result."""
        lines = [RULE]
        for compared in self.results[:-1]:
            lines.append(f"{compared.name}: {len(compared.moved)} of {len(compared.judged)} judged numbers changed.")
        return lines

    def rows(self) -> Table:
        """Return one row for each number or word of each result."""
        rows: Table = []
        for compared in self.results:
            for change in compared.changes:
                row = asdict(change)
                rows.append({"result": compared.name, **row})
        return rows

    def grids(self) -> list[Grid]:
        """Return the table of all changes."""
        rows: Table = []
        for compared in self.results:
            for change in compared.changes:
                shown = {"result": compared.name, "about": change.about, "label": change.label}
                shown |= {"before": change.shown(change.before), "after": change.shown(change.after)}
                shown |= {"change": change.moved, "which": change.which, "changed": change.changed}
                rows.append(shown)
        return [Grid(strings(rows), important=("result", "label", "before", "after", "change"))]


def card_rows(changes: Sequence[Change]) -> list[tuple[str, str]]:
    """Return what a card says of some changes: the changed ones, and those that are judged and did not change."""
    rows = [(change.label, change.sentence()) for change in changes if change.changed]
    rows += [(change.label, change.sentence()) for change in changes if change.changed is None]
    same = [change for change in changes if change.changed is False]
    for change in same:
        if change.value is not None:
            rows.append((f"{change.label} ({'under 1 %' if change.is_small else 'no change'})", change.sentence()))
    words = [change.label for change in same if change.value is None]
    if words:
        rows.append(("the same", word_list(words, len(words))))
    return rows


# --- what is compared ---


@checks_arguments
def compare(
    *results: Any,
    measure: str = "find-sinks",
    device: str | None = None,
    dtype: str | None = None,
    bos: bool | None = None,
    text: str | Path | None = None,
    field: str | None = None,
    seed: Whole = 0,
    out: str | Path | None = None,
    progress: Any = None,
) -> Comparison:
    """Compare results of one kind with the first one: two models, or the checkpoints of a training.

    Args:
        results: Two or more: results, their JSON files, folders of results or of checkpoints, or models, which are then
            measured. The others are compared with the first.
        measure: What models are measured with: a measurement that needs no arguments.
        device: cpu, cuda, cuda:1 or mps, for a model given by name. By default the first CUDA device, else the CPU.
        dtype: float32, bfloat16 or float16, for a model given by name. By default the checkpoint's; a model that is
            read layer by layer on a CPU is float32.
        bos: Whether sequences begin with BOS. By default they do where the tokenizer has a BOS token.
        text: File of typical text, or of texts or chats as JSON or JSON lines. Chats are read in the
            model's own template. By default the neutral text in the package.
        field: The field of `text` that holds the text or the messages. By default under one of the usual names.
        seed: Seed of every random choice; without effect where nothing is drawn.
        out: Folder to which the result of each model that is measured is written as it finishes.
        progress: Called as `progress(what, done, total)`.

    Raises:
        SinkscopeError: There are fewer than two results, or they differ in kind, settings or texts.
    """
    started = time.perf_counter()
    measurement = measurements().get(measure)
    if measurement is None:
        raise SinkscopeError(f"--measure {measure}: expected {', '.join(measurements())}")
    options = {"device": device, "dtype": dtype, "bos": bos, "text": text, "field": field, "seed": seed}
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
        by_name[name] = (
            thing if isinstance(thing, Result) else result_of(thing, name, measurement, options, out, progress)
        )
    return comparison_of(by_name, started)


def compare_results(results: Sequence[Any], **settings: Any) -> Comparison:
    """Compare results of one kind with the first one: two models, or the checkpoints of a training.

    A result is a JSON file, a folder of such files, of scans or of checkpoints, or a model, which is then measured.
    Numbers are compared text by text, with the 95 % interval of the mean difference. Neurons, places and conditions
    that came, went or changed are listed. Results of other kinds, settings or texts are refused.

    Args:
        results: Results, files, folders or models, as for `compare`.
        settings: The others of `compare`.

    Raises:
        SinkscopeError: As for `compare`.
    """
    return compare(*results, **settings)


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
        changes = changes_of(*base.numbers_beside(result), paired=True)
        if not changes:
            raise SinkscopeError(
                f"{first} and {name} have no number in common: results of {base.kind} are not compared"
            )
        compared.append(Compared(name, result.model.name, tuple(changes)))
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


def name_of(thing: Any) -> str:
    """Return the name of a result: that of its file, folder or model."""
    if isinstance(thing, Result):
        return thing.model.name
    if isinstance(thing, str | PathLike):
        path = Path(thing)
        return path.stem if path.suffix in (".json", ".gguf") else path.name or str(thing)
    return str(getattr(thing, "sinkscope_name", type(thing).__name__))


def result_of(
    thing: Any, name: str, measure: EntryPoint, options: Mapping[str, Any], out: str | Path | None, progress: Any
) -> Result:
    """Return the result in a file, the card of a scan, or that of a model, which is measured.

    Args:
        thing: A path, a name or a live model.
        name: Its name.
        measure: What a model is measured with.
        options: How it is opened.
        out: Where its result is written. None: nowhere.
        progress: Called as `progress(what, done, total)`.
    """
    if isinstance(thing, str | PathLike):
        path = path_of(thing)
        if (path / CARD).is_file():
            return SinkCard.load(path / CARD)
        if path.suffix == ".json":
            return Result.load(path)
    result = measure.load()(thing, **options, progress=progress)
    if out is not None:
        note(f"{name}: {result.save(Path(out) / f'{name}.json')}")
    return result


# --- drawing ---


def draw(result: Comparison) -> Any:
    """Draw how far each number moved from the first result, with its 95 % interval, and a panel for each number.

    The first number, such as the heads that attend to the first token, is always drawn; then those that changed.
    """
    drawn: dict[tuple[str, str], list[tuple[str, Change]]] = {}
    for compared in result.results:
        for change in compared.judged:
            drawn.setdefault((change.about, change.label), []).append((compared.name, change))
    numbers = list(drawn.items())
    others = sorted(numbers[1:], key=lambda item: not any(change.changed for _, change in item[1]))
    shown = [*numbers[:1], *others][:MOST_PANELS]
    titles = [f"{html.escape(label)}<br><sup>{html.escape(about)}</sup>" for (about, label), _ in shown]
    columns = min(2, max(1, len(shown)))
    fig = panels(titles or ["nothing is judged"], columns=columns)
    for number, (_, points) in enumerate(shown):
        x = [html.escape(name) for name in (result.first, *(name for name, _ in points))]
        changes = [change for _, change in points]
        scale = [scale_of(change) for change in changes]
        y = [0.0, *(size * (change.value or 0.0) for size, change in zip(scale, changes, strict=True))]
        up, down = [0.0], [0.0]
        for size, change in zip(scale, changes, strict=True):
            assert change.interval is not None
            up.append(size * (change.interval.high - change.interval.mean))
            down.append(size * (change.interval.mean - change.interval.low))
        bars = {"type": "data", "array": up, "arrayminus": down, "symmetric": False}
        where = {"row": number // columns + 1, "col": number % columns + 1}
        fig.add_scatter(x=x, y=y, error_y=bars, mode="lines+markers", marker_color=BLUE, showlegend=False, **where)
        fig.add_hline(0, line={"color": GREY, "dash": "dot"}, **where)
        unit = "points" if changes[0].share and not changes[0].whole else ""
        fig.update_yaxes(title_text=f"change{f' in {unit}' if unit else ''}", **where)
    rows = -(-max(1, len(shown)) // columns)
    return figure_of(fig, result, width=960, height=160 + 280 * rows, bottom=70)


def scale_of(change: Change) -> float:
    """Return by what a change is multiplied to be drawn: a share as a count or in per cent."""
    if change.whole:
        return float(change.whole)
    return 100.0 if change.share else 1.0
