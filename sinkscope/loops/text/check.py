"""`check` decides whether texts or token ids end up in a repetition loop; needs no model, no tokenizer and no torch."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from io import BufferedReader, BytesIO
from os import PathLike
from pathlib import Path
from typing import Any, cast

from sinkscope.errors import SinkscopeError
from sinkscope.files.envelope import ModelInfo, documented_at, provenance
from sinkscope.files.output import read_bytes
from sinkscope.files.plain import pathless
from sinkscope.loops.text.answers import TEXT, Piece, is_ids
from sinkscope.loops.text.monitor import Settings
from sinkscope.loops.text.signals import Ids, id_list
from sinkscope.loops.text.watch import WORST, CheckedOutput, TextVerdict, Watch
from sinkscope.results.mean import Mean
from sinkscope.results.notation import count_of, word_list
from sinkscope.results.result import Result
from sinkscope.results.table import Row, Subject, column, detail, optional, whole

LOOP_FOUND, NO_TEXT = 3, 1  # exit statuses


@dataclass(frozen=True)
class OutputKey:
    """An answer, and its place in the input, since two may have one name."""

    name: str
    number: int

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, kw_only=True)
class OutputRow(
    Row,
    table="outputs",
    title="output",
    note="Tokens are words and marks of a text, or the ids that were given. Since: where the repetition begins. "
    "Found at: "
    "how many tokens had been read when it was certain. loops: to its end. looped: it went on. suspicious: copies that "
    "may be meant, such as a list or a table, or copies with changes.",
):
    """What was found in one answer."""

    key: OutputKey

    verdict: TextVerdict = column("verdict", "word", "loops, looped, suspicious, clean, or empty.")
    channel: str | None = optional("channel", "word", "Where it was found: the text, or the reasoning before it.")
    tokens: Mean = column("tokens", "count", "Words and marks of all channels, or ids.")
    onset: Mean | None = optional("loops\nsince", "count", "Position of the first token of the repetition, from 0.")
    detected: Mean | None = optional("found\nat", "count", "Tokens that had been read when it was found.")
    excerpt: str | None = optional("one copy", "word", "One copy of what repeats, shortened.")
    period: Mean | None = detail("period", "count", "Tokens of one copy.")
    wasted: Mean | None = detail("tokens of\nfurther copies", "count", "Tokens of the copies after the first one.")


@dataclass(frozen=True, kw_only=True)
class LoopCheck(Result):
    """The verdicts on answers. Its values are plain numbers, so that checking texts loads no numpy.

    Attributes:
        records: Results for each answer, in the order of the input.
        problems: What was wrong with lines and files that could not be read.
    """

    kind = "loops"
    records: tuple[CheckedOutput, ...]
    problems: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """The status of the command: 3 if an answer loops or looped, else 1 if one has no text or was not read."""
        verdicts = {record.verdict for record in self.records}
        if verdicts & {"loops", "looped"}:
            return LOOP_FOUND
        if self.problems or "empty" in verdicts:
            return NO_TEXT
        return 0

    def subjects(self) -> list[Subject]:
        """Return a row for each answer, those that loop first."""
        rows: list[OutputRow] = []
        has_channels = any(record.channel != TEXT for record in self.records)
        for number, record in enumerate(self.records):
            rows.append(
                OutputRow(
                    key=OutputKey(record.name, number),
                    verdict=record.verdict,
                    channel=record.channel if has_channels else None,
                    tokens=whole(record.tokens),
                    onset=count_or_none(record.onset),
                    detected=count_or_none(record.detected),
                    period=count_or_none(record.period),
                    wasted=count_or_none(record.wasted),
                    excerpt=record.excerpt or None,
                )
            )
        rows.sort(key=lambda row: WORST.index(row.verdict))
        return [Subject(title="", rows=tuple(rows), key="outputs")]

    def conclusion(self) -> str:
        """Return how many answers have each verdict; of a single one, what repeats."""
        if len(self.records) == 1 and not self.problems:
            return f"{replace(self.records[0], name=self.model.name)}."
        counts = Counter(record.verdict for record in self.records)
        parts = [f"{counts[verdict]} {verdict}" for verdict in WORST if counts[verdict]]
        return f"Of {count_of(len(self.records), 'output')} in {self.model.name}: {word_list(parts)}."

    def details(self) -> list[str]:
        """Return what was not read and, of a loop, where to find what ends it."""
        lines = [f"Skipped {len(self.problems)}: {self.problems[0]}."] if self.problems else []
        if any(record.verdict in ("loops", "looped") for record in self.records):
            lines.append(f"Try: a temperature of 0.7 first; {documented_at('what_to_try.md')} has more.")
        return lines


def count_or_none(count: int | None) -> Mean | None:
    """Return a number of tokens; None where there is none."""
    return None if count is None else whole(count)


def check_of(watch: Watch, name: str, started: float) -> LoopCheck:
    """Return the verdicts on all answers that were read since `started`."""
    return LoopCheck(
        records=tuple(watch.checked),
        problems=tuple(watch.problems),
        model=ModelInfo(name=pathless(name), family="text", n_layers=0, d_model=0, d_mlp=0, fingerprint=""),
        settings={"rule": watch.settings.rule, **vars(watch.settings)},
        provenance=provenance(started),
    )


def check(
    outputs: str | Sequence[Any] | Ids, *, settings: Settings | None = None, prompt: str = "", name: str = "input"
) -> LoopCheck:
    """Check outputs for repetition loops; no model, no tokenizer and no torch are needed.

    An output loops or looped if the monitor triggers in it. By default this happens as soon as there are 64 tokens
    beyond two exact copies, or later where the copies are data (tables, code, markup, logs), or 12 copies of prose
    whose numbers change (`MonitorSettings`). Copies that are not enough for this make a text suspicious, and so do few
    different words. With `PaperSettings()`, LoopGuard's monitor decides. Because there are no probabilities, its other
    two votes (type-token ratio and compression ratio) must agree, and one of its gates (stalled novelty or tail
    repetition) must hold.

    Args:
        outputs: A text, token ids, or several of either.
        settings: Settings of the monitor.
        prompt: What was asked; copies that it asks for, such as "ten lines", are no loop.
        name: Name of the input in the result.

    Raises:
        SinkscopeError: The input is empty or neither text nor ids.
    """
    watch, started = Watch(settings, prompt), time.perf_counter()
    items: Any = id_list(outputs)
    many = [items] if isinstance(items, str) or is_ids(items) else items
    many = [*map(id_list, many)] if isinstance(many, list | tuple) else []
    if not many or not all(isinstance(output, str) or is_ids(output) for output in many):
        raise SinkscopeError(f"{outputs!r:.80} cannot be checked: give a text, token ids, or several of either")
    for place, output in enumerate(many, 1):
        for _ in watch.take(Piece(str(place), output, ends=True)):
            pass
    return check_of(watch, name, started)


def check_file(
    source: Any,
    *,
    settings: Settings | None = None,
    prompt: str = "",
    name: str | None = None,
    field: str | None = None,
) -> LoopCheck:
    """Check the answers of a file.

    Args:
        source: The path of a file, or a binary file or pipe: one text, JSON lines, the events of a server, or, under a
            name that ends in .json, one JSON document.
        settings: Settings of the monitor.
        prompt: What was asked; copies that it asks for, such as "ten lines", are no loop.
        name: Name of the file in the result and in errors. By default that of the path, or "input".
        field: Where the answers of a line of JSON are, such as "response.choices".

    Raises:
        SinkscopeError: The source is empty, nothing in it can be read, or it is not UTF-8 text.
    """
    if isinstance(source, str | PathLike):
        name = name or Path(source).name
        source = BufferedReader(cast(Any, BytesIO(read_bytes(source, "give another path"))))
    if not hasattr(source, "read1"):
        raise SinkscopeError(f"{source!r:.80} is no binary file: expected a path, or open(path, 'rb')")
    watch, started = Watch(settings, prompt), time.perf_counter()
    name = name or "input"
    for _ in watch.read(source, name, field):
        pass
    return check_of(watch, name, started)
