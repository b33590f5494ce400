"""Declared tables on a terminal, on a page and in a file, and the words for lists, counts and shares."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from refusals import refused

from sinkscope.results.mean import Mean
from sinkscope.results.notation import Head, count_of, percent, word_list
from sinkscope.results.result import Result
from sinkscope.results.table import Row, column, detail, optional


@dataclass(frozen=True, kw_only=True)
class Drop(Row, table="drops", title="head", most=3, note="Lower is better."):
    """A row with a number of each kind."""

    key: Head
    random: bool = False

    share: Mean = column("share\nleft", "share", "What is left of it.")
    loss: Mean | None = optional("loss added", "rise", "How much more loss there is.")
    said: str | None = optional("in words", "word", "What is said of it.")
    tokens: Mean | None = detail("tokens", "count", "Tokens that were read.")

    @property
    def is_control(self) -> bool:
        return self.random

    @property
    def group(self) -> str:
        return "control: random heads" if self.random else ""


@dataclass(frozen=True, kw_only=True)
class Dropped(Result):
    kind = "test-dropped"

    drops: tuple[Drop, ...]

    def conclusion(self) -> str:
        return "All is well."


CONTROL = Drop(key=Head(0, 1), random=True, share=Mean(1.0), loss=Mean(-0.001, 0.2))
FOUND = Drop(key=Head(1, 10), share=Mean(0.25, 0.05), loss=Mean(1.5, 0.25), said="<b>most</b>", tokens=Mean(992.0))
RESULT = Dropped(drops=(CONTROL, FOUND))


def test_a_table_has_units_under_headers_and_controls_under_what_they_control():
    assert RESULT.text(80).splitlines() == [
        "Conclusion: All is well.",
        "",
        "          share         loss added",
        "head      left          nats a token     in words",
        "L1.H10     25% (± 5%)   +1.50 (± 0.25)   <b>most</b>",
        "control: random heads",
        "  L0.H1   100%           0.00 (± 0.20)   -",
        "Lower is better.",
    ]


def test_columns_that_do_not_fit_are_named_and_words_are_shortened():
    lines = RESULT.text(44).splitlines()
    assert max(map(len, lines)) <= 44
    assert "(in --csv and --html: in words)" in lines
    many = Dropped(drops=tuple(Drop(key=Head(0, number), share=Mean(0.5)) for number in range(5)))
    assert "(in --csv and --html: 2 more rows)" in many.text(80)


def test_a_page_says_what_columns_mean_and_escapes_what_a_file_says():
    page = RESULT.to_html()
    assert 'title="What is left of it."' in page
    assert "<dd>Tokens that were read.</dd>" in page, "also of columns that only whole tables have"
    assert "Lower is better." in page
    assert "&lt;b&gt;most" in page and "<b>most" not in page


def test_files_and_frames_have_every_number_with_its_margin():
    first, second = RESULT.rows()
    assert (first["row"], first["is_control"], first["share"], first["loss_margin"]) == ("L0.H1", True, 1.0, 0.2)
    assert (second["layer"], second["head"], second["tokens"]) == (1, 10, 992.0)
    assert "tokens" not in first, "what was not measured is absent, and not zero"
    assert RESULT.to_csv().startswith("about,table,group,row,is_control,layer,head,share,loss,loss_margin,")


def test_a_number_that_was_not_measured_is_refused_and_not_zero():
    assert FOUND["loss"].value == 1.5
    for ask in (CONTROL.__getitem__, CONTROL.text):
        with refused(words=["L0.H1 (drops) has no 'tokens': it has share and loss"]):
            ask("tokens")


@pytest.mark.parametrize(
    ("kind", "value", "margin", "text"),
    [
        ("share", 0.123, 0.04, "12% (± 4%)"),
        ("fine_share", 0.1234, None, "12.3%"),
        ("points", 0.444, 0.1, "+44.4 (± 10.0)"),
        ("count", 6152.4, 0.2, "6,152"),  # a margin that rounds to zero is not shown
        ("rise", 1.925, 0.38, "+1.93 (± 0.38)"),
        ("rise", -0.001, 0.2, "0.00 (± 0.20)"),
        ("nats", 250.0, None, "250"),
        ("times", 8.25, None, "8.2"),
        ("times", 221.4, 3.0, "221 (± 3)"),
        ("number", -0.5, None, "-0.50"),
    ],
)
def test_a_kind_gives_digits_units_and_signs(kind, value, margin, text):
    assert str(column_of(kind).cell(Mean(value, margin))) == text


def column_of(kind):
    @dataclass(frozen=True, kw_only=True)
    class One(Row, table="one", title="one"):
        key: str = "x"
        number: Mean = column("number", kind, "A number.")

    return One.columns()[0]


def test_lists_counts_and_shares_are_said_in_words_and_what_rounds_to_zero_has_no_sign():
    lists = [word_list("abcd"[:count], 3) for count in range(5)]
    assert lists == ["none", "a", "a and b", "a, b and c", "a, b, c and 1 more"]
    assert [count_of(count, "token") for count in (0, 1, 2000)] == ["no token", "1 token", "2,000 tokens"]
    shares = [percent(-1e-5), percent(-1e-5, 1), percent(-1e-5, 3), percent(-0.0005, 1), percent(-1.0)]
    assert shares == ["0%", "0.0%", "-0.001%", "-0.1%", "-100%"]
