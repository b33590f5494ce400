from __future__ import annotations

import io
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from sinkscope.results.notation import head_name, neuron_name, read_head, read_neuron
from sinkscope.results.result import Result
from sinkscope.results.tables import Grid, long_table

WORDS = [f"column_{name}" for name in "abcdefghijklm"]


@dataclass(frozen=True)
class Row:
    """One row.

    Attributes:
        layer: where.
        neuron: which.
        expert: of a mixture.
        drop: share that is lost.
        share: of it.
    """

    layer: int
    expert: int | None
    neuron: int
    drop: float
    share: float


@dataclass(frozen=True, kw_only=True)
class Tabled(Result):
    """A result with a table.

    Attributes:
        parts: the rows.
    """

    kind: ClassVar[str] = "test-tabled"
    percent: ClassVar[tuple[str, ...]] = ("drop",)
    glossary: ClassVar[dict[str, str]] = {"share": "a better word"}

    parts: tuple[Row, ...]

    def conclusion(self) -> str:
        return "All is well."


def _columns(rows: list[list[str]]) -> dict[str, list[str]]:
    return {name: [row[place] for row in rows] for place, name in enumerate(WORDS[: len(rows[0])])}


def test_the_narrow_table_keeps_what_matters_and_names_the_rest():
    columns = _columns([[f"{i}{j:07}" for j in range(13)] for i in range(3)])
    grid = Grid(columns, important=["column_l", "column_b"])
    text = grid.text(80)
    assert text.splitlines()[0].split()[:4] == ["column", "l", "column", "b"]
    assert max(map(len, text.splitlines())) <= 80 and "column j" in text and "--csv FILE" in text
    plain = Grid(columns)
    assert list(plain.fitting(80)) == WORDS[:8] and "Not shown: column i, column j, column k" in plain.text(80)
    assert grid.fitting(None) == columns


@given(st.lists(st.lists(st.text("ab _\u65e5", max_size=30), min_size=4, max_size=4), min_size=1, max_size=5))
def test_no_line_is_too_wide_and_no_cell_is_cut(rows):
    from rich.cells import cell_len

    shown = Grid(_columns(rows)).fitting(80)
    assert all(cell_len(line) <= 80 for line in Grid(shown).text(80).splitlines())
    assert shown.items() <= _columns(rows).items()


def test_a_result_explains_its_columns_from_its_docstrings():
    result = Tabled(parts=(Row(1, None, 338, 0.5, 1.0), Row(1, 2, 7, 0.25, 2.0)))
    lines = result.text().splitlines()
    assert [line.split() for line in lines[:3]] == [
        ["neuron", "drop", "share"],
        ["L1.N338", "50.0%", "1"],
        ["L1.E2.N7", "25.0%", "2"],
    ]
    assert lines[-1] == "Conclusion: All is well."
    page = result.to_html()
    assert "<b>Conclusion: All is well.</b>" in page and "<dt>drop</dt><dd>Share that is lost.</dd>" in page
    assert "<dt>share</dt><dd>A better word.</dd>" in page
    assert list(pd.read_csv(io.StringIO(result.to_csv())).columns) == ["layer", "expert", "neuron", "drop", "share"]


def test_arrays_become_a_long_table_with_a_column_for_each_axis():
    grown = np.arange(6.0).reshape(2, 3)
    rows = long_table({"entropy": grown, "rate": grown / 10, "none": None}, layer=(3, 5), head=range(3))
    assert len(rows) == 6
    assert rows[0] == {"layer": 3, "head": 0, "entropy": 0.0, "rate": 0.0}
    assert rows[5] == {"layer": 5, "head": 2, "entropy": 5.0, "rate": 0.5}


@given(st.integers(0, 999), st.integers(0, 99_999), st.none() | st.integers(0, 255))
def test_names_are_read_as_they_are_written(layer, number, expert):
    site = (layer, number) if expert is None else (layer, expert, number)
    name = neuron_name(layer, expert, number)
    assert read_neuron(name) == site == read_neuron(neuron_name(*site)) == read_neuron(f" {name.lower()} ")
    assert read_head(head_name(layer, number)) == (layer, number) == read_head(f"{layer}:{number}")


@pytest.mark.parametrize("text", ["", "L1.E2", "L1.H2", "1.2.3.4", "L-1.N2"])
def test_what_is_no_neuron_is_refused(text):
    with refused(r"expected a neuron such as L1\.N338"):
        read_neuron(text)


def test_a_table_says_how_many_rows_of_all_it_shows():
    grid = Grid({"neuron": ["a"] * 99, "drop": ["99.0%"] * 99})
    assert grid.text(80, rows=1).splitlines()[1:] == ["a       99.0%", *grid.notes(1)]
    assert grid.notes() == ["64 of 99 rows are shown (--csv FILE writes them all)."]
    assert grid.notes(99) == []
    page = Tabled(parts=(Row(1, None, 338, 0.5, 1.0),) * 99).fragment()
    assert page.count("<tr>") == 65 and grid.notes()[0] in page


def test_a_table_is_text_in_a_notebook_too(monkeypatch):
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert Grid({"a": ["1", "2"], "b": ["[bold]x", "y"]}).text(80) == "a  b\n1  [bold]x\n2  y"
