from __future__ import annotations

import io
from dataclasses import dataclass
from typing import ClassVar

import pandas as pd

from sinkscope.results.result import Result

WORDS = [f"column_{name}" for name in "abcdefghijklm"]


@dataclass(frozen=True)
class Row:
    layer: int
    expert: int | None
    drop: float
    share: float


@dataclass(frozen=True, kw_only=True)
class Tabled(Result):
    kind: ClassVar[str] = "test-tabled"
    percent: ClassVar[tuple[str, ...]] = ("drop",)

    parts: tuple[Row, ...]

    def conclusion(self) -> str:
        return "All is well."


def test_a_result_of_records_is_a_table_on_a_terminal_on_a_page_and_in_a_file():
    result = Tabled(parts=(Row(1, None, 0.5, 1.0), Row(1, 2, 0.25, 2.0)))
    lines = result.text().splitlines()
    assert [line.split() for line in lines[:3]] == [
        ["layer", "expert", "drop", "share"],
        ["1", "-", "50.0%", "1"],
        ["1", "2", "25.0%", "2"],
    ]
    assert lines[-1] == "Conclusion: All is well."
    page = result.to_html()
    assert "<b>Conclusion: All is well.</b>" in page and "<td>50.0%</td><td>1</td>" in page
    assert list(pd.read_csv(io.StringIO(result.to_csv())).columns) == ["layer", "expert", "drop", "share"]
