"""The sink card of a model, `scan`, which runs every measurement that contributes to the card, and `demo`.

A card holds the conclusion of every part of a scan, its numbers with their controls, and the changes from another card.
Each measurement declares its own part: its order, its arguments, and its numbers and facts on the card
(`ScanMark`).
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from math import hypot, isfinite
from pathlib import Path
from statistics import median
from typing import Annotated, Any, ClassVar

import torch

from sinkscope import __version__
from sinkscope.app.commands import Command, commands
from sinkscope.app.pages import save_html
from sinkscope.errors import SinkscopeError, is_out_of_memory
from sinkscope.files.console import Progress, silent
from sinkscope.files.jobs import Pool, Tally, check_workers, finish
from sinkscope.files.output import write_atomic
from sinkscope.files.plain import pathless, visible
from sinkscope.files.result import Result
from sinkscope.files.store import Folder, Keyed
from sinkscope.files.tables import Grid, cell, strings
from sinkscope.interventions import SinkPatch
from sinkscope.interventions.base import Intervention
from sinkscope.measure import Count, Hidden, Option, Positive, Setup
from sinkscope.models.target import Target

CARD = "card.json"
LEAST = 0.01  # of its value that a number moves by at least before it counts as changed
_SHOWN = ("label", "value", "control", "margin")
_CHANGED = ("label", "before", "after", "margin", "changed")
RULE = (
    "A number changed if it moved by more than the margins of both cards together and by 1 % of its value; a number "
    "without a margin is shown and not judged."
)


@dataclass(frozen=True)
class CardPart:
    """One measurement of a scan.

    Attributes:
        name: Name of the measurement.
        command: Command that runs it alone.
        conclusion: What it found; empty if it failed.
        problem: Why there is no result; None if there is one.
        seconds: Time it took, in seconds.
        peak_memory_bytes: Largest memory of the process until its end.
    """

    name: str
    command: str
    conclusion: str
    problem: str | None = None
    seconds: float | None = None
    peak_memory_bytes: int | None = None


@dataclass(frozen=True)
class CardNumber:
    """One number of a part.

    Attributes:
        part: Name of the measurement.
        label: Description of the number.
        value: The number.
        control: The same number under the control.
        margin: Range of chance variation, from the control's draws or two standard errors; None if unknown.
    """

    part: str
    label: str
    value: float
    control: float | None
    margin: float | None = None


@dataclass(frozen=True)
class CardFact:
    """A property in words, in which two models may agree or differ."""

    part: str
    label: str
    value: str


@dataclass(frozen=True)
class CardChange:
    """A number or a fact on two cards.

    Attributes:
        part: Name of the measurement.
        label: Description of the number or fact.
        before: Value on the other card.
        after: Value on this card.
        margin: Margin of the change, from both cards' margins; None if unknown, or for a fact.
        changed: Whether the change exceeds the margin; None if unknown.
    """

    part: str
    label: str
    before: str
    after: str
    margin: float | None
    changed: bool | None


@dataclass(frozen=True, kw_only=True)
class SinkCard(Result):
    """All findings of a scan, conclusions first.

    Attributes:
        quick: Whether the parts ran with smaller numbers.
        parts: The parts in the order of the card.
        numbers: The numbers, each with its control.
        facts: The facts in words.
        against: Model of the other card; None if there is none.
        changes: Comparison with the other card, including what stayed the same.
    """

    kind: ClassVar[str] = "sink-card"
    page: ClassVar[str] = "scan"
    glossary: ClassVar[dict[str, str]] = {"fact": "what it is, in words", "word": "what it is in this model"}

    quick: bool
    parts: tuple[CardPart, ...]
    numbers: tuple[CardNumber, ...]  # pyright: ignore[reportIncompatibleMethodOverride] = ()
    facts: tuple[CardFact, ...] = ()
    against: str | None = None
    changes: tuple[CardChange, ...] = ()

    def beside(self) -> tuple[Result, ...]:
        """The results of the parts, if the scan has just produced them."""
        return vars(self).get("shown", ())

    @property
    def done(self) -> tuple[CardPart, ...]:
        """Parts with a result."""
        return tuple(part for part in self.parts if part.problem is None)

    def conclusion(self) -> str:
        """What changed since the other card; without another card, the first part's conclusion."""
        if self.against is not None:
            moved = [c for c in self.changes if c.changed]
            known = [c for c in self.changes if c.changed is not None]
            names = "; ".join(f"{c.label}: {c.before} before, {c.after} now" for c in moved[:3])
            return (
                f"Compared with {self.against}, {len(moved)} of {len(known)} numbers and facts changed by more than "
                f"their margin{': ' * bool(moved)}{names}{'; and more' * (len(moved) > 3)}."
            )
        return self.done[0].conclusion if self.done else "No part could be measured."

    def details(self) -> list[str]:
        """Every part's conclusion, any failures, and the cost."""
        told = [f"{part.command}: {part.conclusion} ({part.seconds or 0:.1f} s)" for part in self.done]
        failed = [f"{part.command} is missing: {part.problem}" for part in self.parts if part.problem]
        return [*told, *failed, self.costs()]

    def costs(self) -> str:
        """Seconds and memory, the most expensive parts first."""
        taken = sorted((p for p in self.done if p.seconds is not None), key=lambda p: -(p.seconds or 0))
        peak = max((p.peak_memory_bytes or 0 for p in self.done), default=0) / 1e9
        total, most = sum(p.seconds or 0 for p in taken), ", ".join(f"{p.command} {p.seconds:.1f} s" for p in taken[:4])
        return f"{len(self.done)} of {len(self.parts)} parts took {total:.0f} s and at most {peak:.1f} GB ({most})."

    def rows(self) -> list[dict[str, Any]]:
        """One row per number; in a comparison, one per number and fact."""
        some, names = (self.changes, _CHANGED) if self.against is not None else (self.numbers, _SHOWN)
        return [{name: getattr(one, name) for name in names} for one in some]

    def grids(self) -> list[Grid]:
        """What changed, the numbers with their controls, and the facts."""
        numbers = [{name: getattr(one, name) for name in _SHOWN} for one in self.numbers]
        changes = self.rows() if self.changes else []
        parts = (
            (f"Compared with {self.against}", RULE, changes),
            ("Numbers, each with its control", "", numbers),
            ("Facts", "", [{"fact": fact.label, "word": fact.value} for fact in self.facts]),
        )
        return [Grid(*strings(rows, ()), title=title, note=note) for title, note, rows in parts if rows]

    def markdown(self) -> str:
        """The card for a model's page on the hub."""

        def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
            return [*(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)), ""]

        lines = [f"## Sink card of {_marked(self.model.name)}", "", f"**{_marked(self.conclusion())}**", ""]
        numbers = [(_marked(n.label), cell(n.value), cell(n.control), cell(n.margin)) for n in self.numbers]
        lines += table(("number", "value", "control", "margin"), numbers)
        if self.changes:
            rows = [(_marked(c.label), _marked(c.before), _marked(c.after), cell(c.changed)) for c in self.changes]
            lines += table(("compared with " + _marked(self.against or ""), "before", "now", "changed"), rows)
        lines += [f"- **{_marked(fact.label)}**: {_marked(fact.value)}" for fact in self.facts]
        lines += ["", *(f"- `{part.command}`: {_marked(part.conclusion)}" for part in self.done)]
        lines += [f"- `{p.command}` is missing: {_marked(p.problem or '')}" for p in self.parts if p.problem]
        way = "sinkscope scan MODEL" + " --quick" * self.quick
        made = f"fingerprint {self.model.fingerprint}, {self.provenance.dtype} on {self.provenance.device}"
        return "\n".join([*lines, "", f"{self.costs()} Made by `{way}` ({made}).", ""])

    def compared(self, other: SinkCard) -> SinkCard:
        """Compare this card with another one and return it with the changes.

        Raises:
            SinkscopeError: The cards have no number or fact in common, or only one of them was made with --quick.
        """
        if self.quick != other.quick:
            raise SinkscopeError(
                "one of the two cards was made with --quick and the other without: their numbers are of different "
                "settings; make both in the same way"
            )
        before = {(n.part, n.label): n for n in other.numbers}
        words = {(f.part, f.label): f.value for f in other.facts}
        changes = [_moved(before[n.part, n.label], n) for n in self.numbers if (n.part, n.label) in before]
        changes += [
            CardChange(f.part, f.label, was, f.value, None, was != f.value)
            for f in self.facts
            if (was := words.get((f.part, f.label))) is not None
        ]
        if not changes:
            raise SinkscopeError("the two cards have no number in common: give the card of a scan with the same parts")
        changes.sort(key=lambda c: (c.changed is not True, c.changed is None))
        same = other.model.name == self.model.name
        name = f"{other.model.name} ({other.model.fingerprint[:8]})" if same else other.model.name
        return replace(self, against=name, changes=tuple(changes))


def _marked(words: str) -> str:
    """Words of a model in Markdown, where nothing of them is markup."""
    clean = visible(words).replace("\n", " ").replace("&", "&amp;").replace("<", "&lt;")
    return "".join(f"\\{c}" if c in "|`*_[]\\" else c for c in clean)


def _moved(before: CardNumber, after: CardNumber) -> CardChange:
    known = before.margin is not None and after.margin is not None
    margin = hypot(before.margin or 0, after.margin or 0) if known else None
    moved = abs(after.value - before.value)
    changed = None if margin is None else moved > max(margin, LEAST * abs(before.value))
    if before.value == after.value:
        changed = False
    return CardChange(after.part, after.label, cell(before.value), cell(after.value), margin, changed)


def read_card(path: str | Path) -> SinkCard:
    """Read the card in a file, or in the folder of a scan.

    Raises:
        SinkscopeError: There is no card.
    """
    file = Path(path) / CARD if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise SinkscopeError(f"{path} holds no card: give the card.json of a scan, or the scan's folder")
    return SinkCard.load(file)


@dataclass(frozen=True, kw_only=True)
class ScanMark:
    """How a measurement takes part in `sinkscope scan`: the literal `scan={...}` of its decorator.

    Paths lead from the result to a value: attribute names and item indices, separated by dots. `*` stands for all
    items; the median over those that are not None is used.

    Attributes:
        order: Position in the run and on the card; lower numbers come first.
        seconds: Seconds with --quick and without it, on a small model; used as weights of the remaining time.
        quick: Arguments with --quick. None: it is then left out.
        full: Arguments without --quick.
        streams: Whether --quick runs it on a model that is read layer by layer. False if it reads the layers many
            times.
        numbers: Label -> paths of the value, of its control and, if known, of the margin within which it varies by
            chance; "a - b" is the distance of two paths.
        facts: Label -> path of a word or a list by which two models can be compared.
    """

    order: int = 100
    seconds: Sequence[float] = (5.0, 30.0)
    quick: dict[str, Any] | None = field(default_factory=dict)
    full: dict[str, Any] = field(default_factory=dict)
    streams: bool = True
    numbers: dict[str, Sequence[str]] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)


def mark_of(entry: Command) -> ScanMark | None:
    """How a command takes part in a scan; None if it does not."""
    scan = getattr(entry.load(), "scan", None)
    return None if scan is None else ScanMark(**scan)


def numbers_of(entry: Command, result: Result) -> list[CardNumber]:
    """The numbers that a measurement puts on the card; numbers that this model lacks are left out."""
    found: list[CardNumber] = []
    for label, (value, *more) in (mark.numbers if (mark := mark_of(entry)) else {}).items():
        control, margin = (at_path(result, path) for path in [*more, "", ""][:2])
        if (number := at_path(result, value)) is not None:
            found.append(CardNumber(entry.name, label, number, control, margin))
    return found


def facts_of(entry: Command, result: Result) -> list[CardFact]:
    """The facts that a measurement puts on the card."""
    mark = mark_of(entry)
    found = {label: _follow(result, path) for label, path in (mark.facts if mark else {}).items()}
    return [CardFact(entry.name, label, _worded(value)) for label, value in found.items() if value is not None]


def _worded(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(_worded, value)) if isinstance(value, tuple | list) else str(value)


def at_path(result: object, path: str) -> float | None:
    """The number at a path: the median of several; for "a - b" the distance of two paths; None if there is none.

    Args:
        result: Result of a measurement.
        path: Path as described in `ScanMark`.
    """
    if " - " in path:
        a, b = (at_path(result, part) for part in path.split(" - "))
        return None if a is None or b is None else abs(a - b)
    found = _follow(result, path) if path else None
    several = found if isinstance(found, tuple | list) else [found]
    numbers = [float(v) for v in several if isinstance(v, int | float) and not isinstance(v, bool) and isfinite(v)]
    return float(median(numbers)) if numbers else None


def _follow(value: Any, path: str) -> Any:
    """What stands at a path; None: nothing."""
    for i, name in enumerate(parts := path.split(".")):
        if value is None:
            return None
        if name == "*":
            inner = [_follow(item, ".".join(parts[i + 1 :])) for item in value] if parts[i + 1 :] else list(value)
            return [item for item in inner if item is not None]
        if name.lstrip("-").isdigit():
            index = int(name)
            value = value[index] if -len(value) <= index < len(value) else None
        else:
            value = value.get(name) if isinstance(value, Mapping) else getattr(value, name)
    return value


PAGE, MARKDOWN = "card.html", "card.md"
VERSION = 1  # of what a folder holds; a change of it is another setting
QUICK_BYTES = 2 << 30  # weights of a model that --quick loads whole
Told = Callable[[Command, "Result | str"], object]
"""Called with each part and its result, or why there is none."""


@dataclass(frozen=True)
class Finished(Keyed):
    """A part whose result is already in the folder."""

    name: str
    seconds: float


class Clock:
    """Estimates the remaining time: the expected time of the unfinished parts, at the pace of the finished ones.

    Args:
        weights: Expected seconds of each part on some machine.
        progress: Called as `progress("scan: the part", seconds gone, seconds in all)`.
        now: Returns the time in seconds.
    """

    def __init__(
        self, weights: Mapping[str, float], progress: Progress, now: Callable[[], float] = time.perf_counter
    ) -> None:
        self._left, self._progress, self._now = dict(weights), progress, now
        self._began = self._since = now()
        self._spent = self._done = 0.0
        self._part = ""

    @property
    def left(self) -> float:
        """Estimated seconds that remain."""
        pace = self._spent / self._done if self._done else 1.0
        weight = self._left.get(self._part, 0.0)
        running = max(0.1 * weight * pace, weight * pace - (self._now() - self._since)) if self._part else 0.0
        return running + pace * (sum(self._left.values()) - weight)

    def begin(self, part: str) -> None:
        """Mark the beginning of a part."""
        self._part, self._since = part, self._now()
        self("", 0, 1)

    def end(self, part: str, counts: bool = True) -> None:
        """Mark the end of a part; it counts for the pace unless it existed already or failed."""
        weight = self._left.pop(part, 0.0)
        if counts:
            self._spent, self._done = self._spent + self._now() - self._since, self._done + weight
        self._part = ""

    def __call__(self, _what: str, _done: int, _total: int) -> None:
        """Something of a part is done."""
        gone = self._now() - self._began
        self._progress(f"scan: {self._part}", round(gone), max(1, round(gone + self.left)))


@dataclass(frozen=True)
class CardOf(Keyed):
    """The card of one of several models, or why there is none."""

    name: str
    card: dict[str, Any] | None = None
    failed: str | None = None


@dataclass(frozen=True, kw_only=True)
class SinkCards(Result):
    """The cards of several models."""

    kind: ClassVar[str] = "sink-cards"
    page: ClassVar[str] = "scan"

    cards: tuple[CardOf, ...]

    @property
    def known(self) -> dict[str, SinkCard]:
        """The available cards, by name."""
        return {one.name: SinkCard.from_dict(one.card, one.name) for one in self.cards if one.card is not None}

    def conclusion(self) -> str:
        """How many models were scanned, and in what they differ."""
        facts: dict[str, list[str]] = {}
        for card in self.known.values():
            for fact in card.facts:
                facts.setdefault(fact.label, []).append(fact.value)
        differ = [label for label, values in facts.items() if len({*values}) > 1 or len(values) < len(self.known)]
        many = f"{len(self.known)} of {len(self.cards)} models were scanned; "
        return f"{many}they differ in {len(differ)} of {len(facts)} facts{': ' * bool(differ)}{'; '.join(differ)}."

    def details(self) -> list[str]:
        """The conclusion of each card, and any failures."""
        told = [f"{name}: {card.conclusion()}" for name, card in self.known.items()]
        return told + [f"{one.name} could not be scanned: {one.failed}." for one in self.cards if one.failed]

    def rows(self) -> list[dict[str, Any]]:
        """One row per number and model, grouped by number."""
        found = [(n.label, name, n) for name, card in self.known.items() for n in card.numbers]
        order = list(dict.fromkeys(label for label, _, _ in found))
        found.sort(key=lambda row: order.index(row[0]))
        return [{"number": label, "model": name, "value": n.value, "control": n.control} for label, name, n in found]


@dataclass(frozen=True)
class Wanted:
    """The work to be done on every model of a scan; it is pickled for other processes."""

    quick: bool
    patch: str | None
    memory: float | None
    against: SinkCard | None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ScanJob:
    """One model with one text, and the output folder."""

    name: str
    model: Any
    text: Any
    folder: str
    size: int = 1

    @property
    def keys(self) -> tuple[str]:
        """Its name."""
        return (self.name,)


def scan(
    models: Annotated[Any, Option(argument=True, metavar="MODEL", many=True)] = None,
    *,
    out: Annotated[str | Path | None, Option(metavar="FOLDER", writes=True)] = None,
    quick: bool = False,
    against: Annotated[str | Path | None, Option(metavar="CARD")] = None,
    patch: Annotated[str | Path | None, Option(metavar="FILE")] = None,
    memory: Annotated[float | None, Option(min=0.1, metavar="GB")] = None,
    revision: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
    bos: bool | None = None,
    texts: Annotated[Sequence[str | Path] | None, Option(metavar="FILE")] = None,
    seed: Count = 0,
    workers: Positive = 1,
    ray: str | None = None,
    tokenizer: Hidden = None,
    told: Hidden = None,
    progress: Hidden = None,
) -> SinkCard | SinkCards:
    """Run all measurements on a model and write its sink card: one page, a JSON file and a Markdown file.

    The model is opened once. A model whose weights do not fit is read layer by layer; parts that need it whole are then
    left out, and the card says so. Every part is saved as it finishes, and the same command resumes after the last one.

    Args:
        models: A short name, hub id, folder or .gguf file; from Python also a live model. Several make a series. By
            default the bundled model.
        out: Folder for the results and the card. By default scan-NAME, for a series scans.
        quick: Use smaller numbers: a minute instead of several for a small model.
        against: A card.json, or the folder of a scan, to compare with.
        patch: A patch.json that every part runs under.
        memory: Gigabytes that the weights may occupy. By default half of the free memory, with --quick at most 2.
        revision: Branch, tag or commit on the hub.
        device: cpu, cuda, cuda:1 or mps. By default the first CUDA device, else the CPU.
        dtype: float32, bfloat16 or float16. By default the checkpoint's.
        bos: Whether sequences begin with BOS. By default they do if the tokenizer has a BOS token.
        texts: File of typical text; each of several gets a scan of its own. By default the bundled neutral text.
        seed: Seed of every random choice.
        workers: Number of processes for a series; more than one run over Ray.
        ray: Address of a Ray cluster. By default this machine, or the address in RAY_ADDRESS.
        tokenizer: Tokenizer for live models that carry none.
        told: Called with each part and its result, or the reason why there is none.
        progress: Called as `progress(what, done, total)`.

    Example:
        sinkscope scan llama-2-7b --out llama
        sinkscope scan ./fine-tuned --against llama/card.json

    Raises:
        SinkscopeError: The model cannot be opened, or the folder holds something else.
    """
    several = list(models) if isinstance(models, list | tuple) else [models]
    several, pieces = several or [None], list(texts or [None])
    check_workers(workers, ray)
    wanted = Wanted(
        quick,
        None if patch is None else os.fspath(patch),
        memory,
        None if against is None else read_card(against),
        {"revision": revision, "device": device, "dtype": dtype, "bos": bos, "seed": seed, "tokenizer": tokenizer},
    )
    if patch is not None:
        SinkPatch.load(patch)
    jobs = list(_jobs(several, pieces, out))
    if len(jobs) == 1:
        return scan_one(jobs[0], wanted, progress or silent, told)
    return _scan_all(jobs, wanted, Path(out or "scans"), workers, ray, progress or silent)


def scan_one(job: ScanJob, wanted: Wanted, progress: Progress = silent, told: Told | None = None) -> SinkCard:
    """Scan one model; see `scan`."""
    setup = _opened(job, wanted)
    edit = None if wanted.patch is None else SinkPatch.load(wanted.patch)
    info = setup.info()
    settings = {
        "version": VERSION,
        "command": "scan",
        "quick": wanted.quick,
        "patch": None if wanted.patch is None else hashlib.sha256(Path(wanted.patch).read_bytes()).hexdigest()[:16],
        "model": asdict(info),
        "device": setup.target.device.type,
        "dtype": str(setup.target.dtype).removeprefix("torch."),
        "bos": setup.bos is not None,
        "text": hashlib.sha256(setup.text.encode()).hexdigest()[:16],
        "seed": setup.seed,
        "sinkscope": __version__,
    }
    found: dict[str, Result] = {}
    parts: list[CardPart] = []
    folder = Path(job.folder)
    with Folder(folder, settings, Finished) as kept:
        chosen = scanned(wanted.quick)
        clock = Clock({e.words: m.seconds[not wanted.quick] for e in chosen if (m := mark_of(e))}, progress)
        for entry in chosen:
            clock.begin(entry.words)
            there = _kept(folder, entry) if entry.name in kept.records else None
            made = there or _measured(entry, replace(setup, progress=clock), edit, wanted.quick)
            if there is None and isinstance(made, Result):
                made.save(folder / file_of(entry))
                kept.append([Finished(entry.name, made.provenance.seconds)])
            clock.end(entry.words, there is None and isinstance(made, Result))
            parts.append(_part(entry, made))
            if isinstance(made, Result):
                found[entry.name] = made
            if told is not None:
                told(entry, made)
        card = _card(setup, parts, found, settings, wanted)
        if wanted.against is not None:
            card = card.compared(wanted.against)
        vars(card)["shown"] = tuple(found.values())
        card.save(folder / CARD)
        write_atomic(folder / MARKDOWN, card.markdown())
        save_html(card, folder / PAGE)
    return card


def scanned(quick: bool) -> list[Command]:
    """The measurements of a scan, in the order in which they run."""
    some = [(m, e) for e in commands().values() if e.public and (m := mark_of(e)) and not (quick and m.quick is None)]
    return [e for _, e in sorted(some, key=lambda pair: (pair[0].order, pair[1].name))]


def file_of(entry: Command) -> str:
    """The file of a part in the folder of a scan."""
    return entry.name.replace("_", "-") + ".json"


def _kept(folder: Path, entry: Command) -> Result | None:
    """The result of an earlier run; None: it is gone or damaged, and is measured again."""
    try:
        return Result.load(folder / file_of(entry))
    except SinkscopeError:
        return None


def _measured(entry: Command, setup: Setup, edit: Intervention | None, quick: bool) -> Result | str:
    """The result of a part, or why there is none: whatever goes wrong in it, the next one begins."""
    target, mark = setup.target, mark_of(entry)
    assert mark is not None
    if entry.load().loading == "whole" and not target.resident:
        size = f"{weight_bytes(target) / 1e9:.1f} GB"
        return f"it needs the whole model in memory, and its weights take {size}; give --memory to allow that"
    if quick and not mark.streams and not target.resident:
        return "it reads the layers from disk many times; leave out --quick, or give --memory to load the model whole"
    given: dict[str, Any] = (mark.quick if quick else mark.full) or {}
    try:
        with nullcontext() if edit is None else edit.on(target):
            return entry.load().on(replace(setup, settings={}, started=time.perf_counter()), **given)
    except Exception as error:
        if is_out_of_memory(error):
            return "there is not enough memory for it"
        said = visible(pathless((str(error).splitlines() or [""])[0]))
        return said if isinstance(error, SinkscopeError) else f"it failed ({type(error).__name__}: {said:.200})"


def _part(entry: Command, made: Result | str) -> CardPart:
    if isinstance(made, str):
        return CardPart(entry.name, entry.words, "", made.rstrip(".") + ".")
    p = made.provenance
    return CardPart(entry.name, entry.words, made.conclusion(), None, p.seconds, p.peak_memory_bytes)


def _card(
    setup: Setup, parts: list[CardPart], found: Mapping[str, Result], settings: dict[str, Any], wanted: Wanted
) -> SinkCard:
    known, info = {e.name: e for e in commands().values()}, setup.info()
    spent = round(sum(part.seconds or 0.0 for part in parts), 3)
    return SinkCard(
        quick=wanted.quick,
        parts=tuple(parts),
        numbers=tuple(n for name, result in found.items() for n in numbers_of(known[name], result)),
        facts=tuple(f for name, result in found.items() for f in facts_of(known[name], result)),
        model=info if wanted.patch is None else replace(info, name=f"{info.name} patched"),
        settings=settings,
        provenance=replace(setup.provenance(), seconds=spent),
    )


def _opened(job: ScanJob, wanted: Wanted) -> Setup:
    """The model: in memory where its weights fit, else read layer by layer."""
    options = {**wanted.options, "text": job.text}
    setup = Setup.open(job.model, **options)
    if setup.target.resident or weight_bytes(setup.target) > _room(setup.target, wanted):
        return setup
    return Setup.open(job.model, **options, loading="whole")


def weight_bytes(target: Target) -> int:
    """Size of the weights in memory, in the dtype of the checkpoint."""
    stored = getattr(target.config, "dtype", None)
    size = (stored if isinstance(stored, torch.dtype) else target.dtype).itemsize
    return sum(p.numel() for p in target.hf.parameters()) * size


def _room(target: Target, wanted: Wanted) -> float:
    """Bytes that the weights may take."""
    if wanted.memory is not None:
        return wanted.memory * 1e9
    if target.device.type == "cuda":
        return 0.8 * torch.cuda.mem_get_info(target.device)[0]
    try:
        pages = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):  # not everywhere
        pages = 8 << 30
    return min(pages / 2, float(QUICK_BYTES)) if wanted.quick else pages / 2


def _jobs(models: Sequence[Any], texts: Sequence[Any], out: str | Path | None) -> Iterator[ScanJob]:
    """A job for every model and text, each with a name of its own."""
    alone, taken = len(models) * len(texts) == 1, set[str]()
    for model in models:
        for text in texts:
            name = _label(model) + (f"-{Path(text).stem}" if len(texts) > 1 else "")
            while name in taken:
                name += "-again"
            taken.add(name)
            folder = Path(out or f"scan-{name}") if alone else Path(out or "scans") / name
            yield ScanJob(name, model, text, str(folder))


def _label(model: object) -> str:
    if model is None:
        return "bundled"
    if isinstance(model, str | os.PathLike):
        return Path(os.path.abspath(os.fspath(model))).name
    return Target.of(model).name


def _scan_all(
    jobs: list[ScanJob], wanted: Wanted, out: Path, workers: int, ray: str | None, progress: Progress
) -> SinkCards:
    """A series, in this process or over Ray; a model that fails is tried again the next time."""
    shared = {"command": "scan", "version": VERSION, "quick": wanted.quick, "seed": wanted.options["seed"]}
    elsewhere = partial(_worker, wanted) if workers > 1 or ray is not None else None
    with Folder(out, shared, CardOf) as kept:
        kept.records = {name: one for name, one in kept.records.items() if one.failed is None}
        tally = Tally("models", len(jobs), progress)
        here = partial(_cards, wanted=wanted, progress=progress)
        gpu = torch.cuda.is_available() and str(wanted.options["device"] or "cuda").startswith("cuda")
        with Pool(here, elsewhere, workers=workers, address=ray, gpu=gpu, progress=progress) as pool:
            finish(pool, jobs, kept, tally)
        found = tuple(kept.records[job.name] for job in jobs)
        if all(one.failed for one in found):
            raise SinkscopeError(str(found[0].failed))
        made = SinkCards(cards=found, settings=shared)
        first = next(iter(made.known.values()))
        made = replace(made, model=replace(first.model, name=f"{len(found)} models"), provenance=first.provenance)
        made.save(out / "cards.json")
        save_html(made, out / "cards.html")
    return made


def _worker(wanted: Wanted) -> Callable[[ScanJob], list[CardOf]]:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return partial(_cards, wanted=wanted, progress=silent)


def _cards(job: ScanJob, *, wanted: Wanted, progress: Progress) -> list[CardOf]:
    try:
        return [CardOf(job.name, scan_one(job, wanted, progress).to_dict())]
    except (SinkscopeError, OSError) as error:  # the next one may be whole
        return [CardOf(job.name, failed=visible(str(error).replace(str(job.model), job.name)).rstrip("."))]


def demo(
    *,
    out: Annotated[Path, Option(metavar="FOLDER", writes=True)] = Path("sinkscope-demo"),
    show: Annotated[bool, Option(name="--open")] = True,
    progress: Hidden = None,
) -> None:
    """Take a two-minute tour: scan the bundled model, explain what each step finds, and open the page.

    Args:
        out: Folder of the results and the page.
        show: Open the page in a browser, if there is one and the command runs in a terminal.
        progress: Called as `progress(what, done, total)`.

    Example:
        sinkscope demo
    """
    steps = iter(range(1, 1 + len(scanned(quick=True))))
    print("sinkscope looks at the small model in the package. Each step is a command that you can give yourself.\n")

    def told(entry: Command, made: Result | str) -> None:
        print(f"{next(steps)}. {entry.help}\n   $ sinkscope {entry.words}", flush=True)
        print(f"   {made.conclusion() if isinstance(made, Result) else f'Left out: {made}'}\n", flush=True)

    scan(out=out, quick=True, told=told, progress=progress)
    page = out / PAGE
    print(f"All results, with figures: {page}\nThe same for another model: sinkscope scan MODEL")
    if show and sys.stdout.isatty() and (os.environ.keys() & {"DISPLAY", "WAYLAND_DISPLAY"} or sys.platform != "linux"):
        import webbrowser

        webbrowser.open(page.resolve().as_uri())
