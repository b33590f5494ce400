"""`check` decides whether texts or token ids end up in a repetition loop; needs no model, no tokenizer and no torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BufferedReader, BytesIO
from os import PathLike
from typing import Any, Literal, cast

from sinkscope.errors import SinkscopeError
from sinkscope.files.output import read_bytes
from sinkscope.files.plain import plain
from sinkscope.files.provenance import ModelInfo, documented_at, provenance
from sinkscope.loops.text.channels import Alarm, CheckedOutput
from sinkscope.loops.text.groups import LoopGroup, groups_of
from sinkscope.loops.text.monitor import Settings
from sinkscope.loops.text.pieces import TEXT, StreamForm, pieces_of_output
from sinkscope.loops.text.signals import Ids, id_list
from sinkscope.loops.text.streams import Watch
from sinkscope.results.notation import count_of, percent, word_form, word_list
from sinkscope.results.result import Result
from sinkscope.results.tables import Grid, Table, strings

BAD_INPUT, LOOP_FOUND, NO_TEXT = 2, 3, 1  # exit statuses
FailOn = Literal["loops", "suspicious"]
VERDICTS = (
    ("loops", "loops", "loop"),
    ("looped", "looped", "looped"),
    ("suspicious", "is suspicious", "are suspicious"),
    ("clean", "is clean", "are clean"),
    ("empty", "has no text", "have no text"),
)
"""Each verdict, and what is said of one and of several."""


@dataclass(frozen=True, kw_only=True)
class LoopCheck(Result):
    """The verdicts on records. Its values are plain numbers, so that checking texts loads no numpy.

    Attributes:
        records: Results for each record, in the order of the input.
        skipped: Number of lines and files that could not be read.
        problems: What was wrong with the first of them.
        missing: Files that are not there.
        fail_on: Which verdict has the exit status 3, "loops" with "looped", or these and "suspicious".
        by: Field by whose values the answers are grouped; empty for none.
    """

    kind = "loops"
    columns = ("name", "verdict", "channel", "id", "tokens", "wasted", "excerpt")

    records: tuple[CheckedOutput, ...]
    skipped: int = 0
    problems: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    fail_on: FailOn = "loops"
    by: str = ""

    @property
    def exit_code(self) -> int:
        """The status of the command: 2 if a file is missing, else 3 if a record loops or looped, else 1, or 0.

        It is 1 if a record has no text, or could not be read.
        """
        if self.missing:
            return BAD_INPUT
        verdicts = {record.verdict for record in self.records}
        if verdicts & {"loops", "looped"} or (self.fail_on == "suspicious" and "suspicious" in verdicts):
            return LOOP_FOUND
        return NO_TEXT * ("empty" in verdicts or self.skipped > 0)

    def rows(self) -> Table:
        """Return a row for each record, those that loop first."""
        order = [verdict for verdict, _, _ in VERDICTS]
        rows = plain(sorted(self.records, key=lambda record: order.index(record.verdict)))
        for name, usual in (("id", ""), ("excerpt", ""), ("group", ""), ("channel", TEXT)):
            if all(row[name] == usual for row in rows):
                for row in rows:
                    del row[name]
        return rows

    def groups(self) -> list[LoopGroup]:
        """Return the loops by the values of a field, those that loop most first."""
        return groups_of(self.records)

    def grids(self) -> list[Grid]:
        """Return the table of groups, if there is a field for it, and the table of records."""
        grids = super().grids()
        if not self.by:
            return grids
        rows = plain(self.groups())
        for row in rows:
            row["95 %"] = f"{percent(row.pop('low'))} to {percent(row.pop('high'))}"
            row[self.by] = row.pop("value")
        names = (self.by, "answers", "loop", "rate", "95 %", "onset", "wasted")
        table = [{name: row[name] for name in names} for row in rows]
        return [Grid(strings(table, ("rate",)), title=f"Loops by {self.by}", important=names[:5]), *grids]

    def conclusion(self) -> str:
        """Return how many records have each verdict."""
        verdicts = [record.verdict for record in self.records]
        parts: list[str] = []
        for verdict, singular, plural in VERDICTS:
            count = verdicts.count(verdict)
            if count:
                parts.append(f"{count} {word_form(count, singular, plural)}")
        if len(self.records) == 1 and not self.skipped:
            return f"{self.model.name} {parts[0].removeprefix('1 ')}{self.records[0].repetition()}."
        return f"Of {count_of(len(self.records), 'output')} in {self.model.name}, {word_list(parts)}."

    def closing(self) -> list[str]:
        """Return the conclusion and, of a loop, where to find what ends it."""
        lines = super().closing()
        if self.skipped:
            more = f" and {self.skipped - len(self.problems)} more" if self.skipped > len(self.problems) else ""
            lines.insert(0, f"Skipped {self.skipped}: {'; '.join(self.problems)}{more}.")
        if any(record.verdict in ("loops", "looped") for record in self.records):
            lines.append(f"Try: a temperature of 0.7 first; {documented_at('what_to_try')} has a row for each server.")
        return lines


def check_of(watch: Watch, name: str, started: float, fail_on: FailOn = "loops") -> LoopCheck:
    """Return the verdicts on all outputs that were read since `started`."""
    return LoopCheck(
        records=tuple(watch.checked),
        skipped=watch.skipped,
        problems=tuple(watch.problems),
        fail_on=fail_on,
        model=ModelInfo(name=name, family="text", n_layers=0, d_model=0, d_mlp=0, fingerprint=""),
        settings={"rule": watch.settings.rule, **vars(watch.settings)},
        provenance=provenance(started=started),
    )


def check(
    outputs: str | Sequence[Any] | Ids,
    *,
    settings: Settings | None = None,
    prompt: str = "",
    name: str = "input",
) -> LoopCheck:
    """Check outputs for repetition loops; no model, no tokenizer and no torch are needed.

    A record loops or looped if the monitor triggers in it, by which a proxy and a guard decide, too. By default this
    happens as soon as there are 3 exact copies with 64 tokens beyond the first two, or later where the copies are data
    (tables, code, markup, logs), or 12 copies of prose whose numbers change (`MonitorSettings`). Copies that are not
    enough for this make a text suspicious, and so do sentences or rows nearly all of which resemble earlier ones. With
    `PaperSettings()`, LoopGuard's monitor decides. Because there are no probabilities, its other two votes
    (type-token ratio and compression ratio) must agree, and one of its gates (stalled novelty or tail repetition) must
    hold.

    Args:
        outputs: A text, token ids, or several of either.
        settings: Settings of the monitor.
        prompt: What was asked; copies that it asks for, such as "ten lines", are no loop.
        name: Name of the input in the result.

    Returns:
        A `LoopCheck`.

    Raises:
        SinkscopeError: The input is empty or neither text nor ids, or the settings need probabilities.
    """
    watch, started = Watch(settings, prompt), time.perf_counter()
    items: Any = id_list(outputs)
    if not isinstance(items, str | list | tuple) or not items:
        raise SinkscopeError(f"{outputs!r:.80} cannot be checked: give a text, token ids, or several of either")
    if isinstance(items, str) or isinstance(items[0], int):
        items = [items]
    for place, output in enumerate(items, 1):
        try:
            pieces = pieces_of_output(output, str(place))
        except ValueError as error:
            raise SinkscopeError(f"output {place} cannot be checked: {error}") from None
        for piece in pieces:
            list(watch.take(piece))
    return check_of(watch, name, started)


def check_file(
    source: Any,
    *,
    form: StreamForm = "auto",
    settings: Settings | None = None,
    prompt: str = "",
    name: str = "input",
    field: str | None = None,
    told: Callable[[Alarm], None] | None = None,
) -> LoopCheck:
    """Check the outputs of a file while it is read.

    Args:
        source: The path of a file, or a binary file or pipe: a text, JSON lines, server-sent events, or one JSON value,
            which is read whole.
        form: Form of the source; "auto" decides by the first line.
        settings: Settings of the monitor.
        prompt: What was asked; copies that it asks for, such as "ten lines", are no loop.
        name: Name of the file in the result and in errors.
        field: Where the answers of a line of JSON are, such as "response.choices".
        told: Called with each loop as it is found.

    Raises:
        SinkscopeError: The source is empty, nothing in it can be read, or it is not UTF-8 text.
    """
    if isinstance(source, str | PathLike):
        source = BufferedReader(cast(Any, BytesIO(read_bytes(source, "give another path"))))
    if not hasattr(source, "read1"):
        raise SinkscopeError(f"{source!r:.80} is no binary file: expected a path, or open(path, 'rb')")
    watch, started = Watch(settings, prompt), time.perf_counter()
    for alarm in watch.read(source, form=form, name=name, field=field):
        if told is not None and alarm.cut:
            told(alarm)
    return check_of(watch, name, started)
