"""The return type of every measurement: frozen, with the model, the settings and the provenance of the result."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass
from textwrap import fill
from typing import Any, ClassVar

from sinkscope.errors import SinkscopeError
from sinkscope.files.envelope import ENVELOPE_FIELDS, Envelope
from sinkscope.files.plain import plain
from sinkscope.results.console import WIDTH
from sinkscope.results.headline import Headline
from sinkscope.results.older import rows_of, subjects_of
from sinkscope.results.pages import Section, document, plot, render
from sinkscope.results.printed import WIDEST, subject_text
from sinkscope.results.row import WORDS, Card, Row, table_of
from sinkscope.results.table import Row as TableRow
from sinkscope.results.table import Subject, flat, measured
from sinkscope.results.tables import Grid, Table, strings

TOP = 40  # pixels above the panels of a figure, for their titles
FEW_ROWS = 6
"""Rows of most tables that are printed; pages show more, and files all."""


@dataclass(frozen=True, kw_only=True)
class Result(Envelope):
    """Base of all results. A subclass is a frozen dataclass; its own fields are the result.

    Fields are arrays with named axes (`Float[np.ndarray, "layer head"]`), numbers, strings, None, tuples, dicts with
    string keys, and dataclasses of these: values that a JSON file returns unchanged after saving. `settings` is
    converted to such plain values on creation.

    Attributes:
        model: The model that was measured.
        settings: The arguments that produced the result.
        provenance: How, when and on which device it was made.
    """

    percent: ClassVar[tuple[str, ...]] = ()  # columns of its own rows that tables show in per cent
    most_rows: ClassVar[int] = FEW_ROWS  # rows of a table that is printed
    columns: ClassVar[tuple[str, ...]] = ()  # columns shown if not all fit; empty: the first that fit

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.__repr__ = Result.__str__  # that of a dataclass would write every number out
        cls.__eq__, cls.__hash__ = Result.__eq__, Result.__hash__  # those of a dataclass fail at arrays

    def __eq__(self, other: object) -> bool:
        """Return whether two results are the same in everything that their JSON has, provenance included."""
        return isinstance(other, Result) and self.to_json() == other.to_json()

    def __hash__(self) -> int:
        """Return the hash of the JSON."""
        return hash(self.to_json())

    # What it says

    @property
    def exit_code(self) -> int:
        """The status with which the command ends that prints it; a subclass overrides it."""
        return 0

    def conclusion(self) -> str:
        """Return the conclusion in one sentence that includes the control; by default the first finding."""
        for subject in self.subjects():
            for row in subject.rows[:1]:
                cells = [f"{column.name} {row.cell(column)}" for column in measured([row])]
                return f"{row.label}: {', '.join(cells)}."
        return f"{self.kind} on {self.model.name}."

    def cards(self) -> list[Card]:
        """Return labels with numbers that stand above tables and lines."""
        return []

    def subjects(self) -> list[Subject]:
        """Return what was measured, in declared tables: by default one subject with the rows among its fields."""
        rows: list[TableRow] = []
        for value in self.own_fields().values():
            for member in value if isinstance(value, tuple) else (value,):
                if isinstance(member, TableRow):
                    rows.append(member)
        return [Subject("", tuple(rows), self.kind)] if rows else []

    def compared(self) -> list[Subject]:
        """Return what `compare` reads: the tables, or rows of the older form as such."""
        return self.subjects() or subjects_of(self.findings())

    def headlines(self) -> list[Headline]:
        """Return what a scan says of it: each finding beside what it has to beat; none by default."""
        return []

    def details(self) -> list[str]:
        """Return the sentences that stand with the conclusion; a subclass overrides it."""
        return []

    def findings(self) -> list[Row]:
        """Return what was measured, by which results are compared: by default the rows among its fields."""
        found: list[Row] = []
        if self.subjects():
            return rows_of(self.subjects())
        for value in self.own_fields().values():
            for member in value if isinstance(value, tuple) else (value,):
                if isinstance(member, Row):
                    found.append(member)
        return found

    def lines(self) -> list[str]:
        """Return the model, the details and warnings: what stands between tables and the conclusion."""
        model = self.model
        size = f"{model.n_layers} layers, d_model {model.d_model}, d_mlp {model.d_mlp}"
        about_model = f"The model is {model.name} ({model.family}, {size})." if model.n_layers else ""
        return [*filter(None, [about_model, self.settings.get("text_said")]), *self.details()]

    # Its table

    def rows(self) -> Table:
        """Return the result as a table, one dict per row: its findings; a subclass with another table overrides it."""
        return flat(self.subjects()) or table_of(self.findings())

    def grid(self) -> Grid:
        """Return the table that is shown, that of `rows`."""
        if self.subjects():
            return Grid({})
        if type(self).rows is Result.rows:  # each number with its margin
            rows = [{name: getattr(row, name) for name in WORDS} | row.numbers for row in self.findings()]
        else:
            rows = self.rows()
        return Grid(strings(rows, self.percent), self.columns)

    def to_frame(self) -> Any:
        """Return `rows` as a pandas data frame."""
        import pandas as pd

        return pd.DataFrame(self.rows())

    def to_csv(self) -> str:
        """Return all rows and columns of `to_frame` as CSV; a whole number stays one beside cells that are empty."""
        rows = self.rows()
        written = io.StringIO()
        names = dict.fromkeys(name for row in rows for name in row)
        writer = csv.DictWriter(written, [*names], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return written.getvalue()

    # How it looks

    def figure(self) -> Any:
        """Return the result as a plotly figure, as wide as its frame; a subclass that has one overrides it.

        Raises:
            SinkscopeError: Results of this kind have no figure.
        """
        raise SinkscopeError(f"no figure is drawn of {self.kind!r}: use --json, or --html for its tables")

    def text(self, width: int | None = WIDTH) -> str:
        """Return the conclusion, then the tables, and last what their words mean.

        Args:
            width: Characters per line of the tables. None: every column is shown.
        """
        parts = [fill(f"Conclusion: {self.conclusion()}", width or WIDEST, break_on_hyphens=False)]
        parts += [subject_text(subject, width) for subject in self.subjects() if subject.is_shown]
        parts += [card.text(width) for card in self.cards()]
        if len(parts) == 1:  # below cards, the table stands on a page and in a file
            parts.append(self.grid().text(width, self.most_rows))
        lines: list[str] = []
        for line in self.lines():  # one that has lines of its own, such as code, stays as it is
            lines.append(line if "\n" in line else fill(line, width or WIDEST, break_on_hyphens=False))
        parts.append("\n".join(lines))
        return "\n\n".join(filter(None, parts))

    def __str__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        return self.fragment()

    def to_html(self) -> str:
        """Return one HTML page with conclusion, figure, tables, settings and provenance, as --html writes it."""
        return document(f"{self.kind}: {self.model.name}", [self.section()], kind=self.kind)

    def section(self, file: str = "") -> Section:
        """Return what pages show of the result: its text, figure and tables, and its settings and provenance.

        A subclass adds to its pages by extending this, as in

            section = super().section(file)
            return replace(section, html=section.html + plot(self.figure()))

        with `replace` of dataclasses, and `plot` of `sinkscope.results.pages`; `escape` of markupsafe escapes other
        words.

        Args:
            file: Displayed name of its file. Empty: the model's name is displayed.
        """
        figure = ""
        if type(self).figure is not Result.figure:
            figure = plot(self.figure().update_layout(title=None, margin_t=TOP))  # the conclusion stands above
        html = self.fragment(figure, {name: plain(getattr(self, name)) for name in ENVELOPE_FIELDS})
        return Section(self.kind, html, self.model.name, self.conclusion(), file or self.model.name)

    def fragment(self, figure: str = "", envelope: Mapping[str, Any] | None = None) -> str:
        """Return conclusion, cards, details and tables with every column as a part of a page, which notebooks show.

        Args:
            figure: HTML that stands under the conclusion; the tables are then folded, as they are below cards.
            envelope: What stands below all, folded: values by their names, by a title.
        """
        return render("results/pages/fragment.html", result=self, figure=figure, envelope=envelope or {})
