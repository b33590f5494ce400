"""Tables of results, and the words for lists, counts and shares."""

from __future__ import annotations

from dataclasses import dataclass

from refusals import refused

from sinkscope.results.notation import count_of, percent, word_list
from sinkscope.results.result import Result
from sinkscope.results.row import row_of


@dataclass(frozen=True, kw_only=True)
class Tabled(Result):
    kind = "test-tabled"
    percent = ("drop",)

    parts: list[dict[str, float | None]]

    def rows(self):
        return self.parts

    def conclusion(self) -> str:
        return "All is well."


def test_a_result_of_records_is_a_table_on_a_terminal_on_a_page_and_in_a_file():
    first = {"layer": 1, "expert": None, "drop": 0.5, "share": 1.0}
    result = Tabled(parts=[first, {"layer": 1, "expert": 2, "drop": 0.25, "share": 2.0}])
    lines = [line.split() for line in result.text().splitlines()]
    assert lines[0] == ["Conclusion:", "All", "is", "well."]
    assert lines[2:5] == [["layer", "expert", "drop", "share"], ["1", "-", "50.0%", "1"], ["1", "2", "25.0%", "2"]]
    page = result.to_html()
    assert "<b>Conclusion: All is well.</b>" in page and "<td>50.0%</td><td>1</td>" in page
    assert result.to_csv().splitlines()[0].split(",") == ["layer", "expert", "drop", "share"]


def test_lists_counts_and_shares_are_said_in_words_and_what_rounds_to_zero_has_no_sign():
    lists = [word_list("abcd"[:count], 3) for count in range(5)]
    assert lists == ["none", "a", "a and b", "a, b and c", "a, b, c and 1 more"]
    assert [count_of(count, "token") for count in (0, 1, 2000)] == ["no token", "1 token", "2,000 tokens"]
    shares = [percent(-1e-5), percent(-1e-5, 1), percent(-1e-5, 3), percent(-0.0005, 1), percent(-1.0)]
    assert shares == ["0%", "0.0%", "-0.001%", "-0.1%", "-100%"]


def test_a_number_that_was_not_measured_is_refused_and_not_zero():
    row = row_of("effects", "at place", left=0.02)
    assert row.get("left") == 0.02
    assert row.get("loss", 0.0) == 0.0
    for ask in (row.get, row.margin):
        with refused(words=["'nats' was not measured of 'at place' (effects), which has left"]):
            ask("nats")
