"""The return type of every measurement: frozen, with the model, the settings and the provenance of the result."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass
from textwrap import fill
from typing import Any

from sinkscope.errors import SinkscopeError
from sinkscope.files.envelope import ENVELOPE_FIELDS, Envelope
from sinkscope.files.plain import plain
from sinkscope.results.console import WIDTH
from sinkscope.results.headline import Headline
from sinkscope.results.pages import Section, document, plot, render
from sinkscope.results.printed import WIDEST, subject_text
from sinkscope.results.table import Row, Subject, flat, measured

TOP = 40  # pixels above the panels of a figure, for their titles


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

    def subjects(self) -> list[Subject]:
        """Return what was measured, in declared tables: by default one subject with the rows among its fields."""
        rows: list[Row] = []
        for value in self.own_fields().values():
            for member in value if isinstance(value, tuple) else (value,):
                if isinstance(member, Row):
                    rows.append(member)
        return [Subject("", tuple(rows), self.kind)] if rows else []

    def compared(self) -> list[Subject]:
        """Return the tables that `compare` reads; by default all."""
        return self.subjects()

    def headlines(self) -> list[Headline]:
        """Return what a scan says of it: each finding beside what it has to beat; none by default."""
        return []

    def details(self) -> list[str]:
        """Return the sentences that stand with the conclusion; a subclass overrides it."""
        return []

    def lines(self) -> list[str]:
        """Return the model, the details and warnings: what stands between tables and the conclusion."""
        model = self.model
        size = f"{model.n_layers} layers, d_model {model.d_model}, d_mlp {model.d_mlp}"
        about_model = f"The model is {model.name} ({model.family}, {size})." if model.n_layers else ""
        return [*filter(None, [about_model, self.settings.get("text_said")]), *self.details()]

    # Its table

    def rows(self) -> list[dict[str, Any]]:
        """Return all rows of all tables, one dict per row: what each is about, then its numbers with their margins."""
        return flat(self.subjects())

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
            width: Characters of a line. None: as many as it takes.
        """
        parts = [fill(f"Conclusion: {self.conclusion()}", width or WIDEST, break_on_hyphens=False)]
        parts += [subject_text(subject, width) for subject in self.subjects() if subject.is_shown]
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
