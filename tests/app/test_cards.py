"""A scan of a model and its sink card."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from organisms import organism
from refusals import refused
from scan_kit import few_parts

from sinkscope.app import scan as scanning
from sinkscope.app.card import CardPart, SinkCard
from sinkscope.app.compare import Comparison, compare
from sinkscope.app.scan import scan
from sinkscope.measure import Setup
from sinkscope.measure.merge import CHANGED, SAME
from sinkscope.results.notation import Neuron
from sinkscope.results.row import Mean, Row, row_beside

pytestmark = pytest.mark.few_texts


@pytest.fixture
def neuron() -> str:
    """The neuron that makes its sink."""
    return str(Neuron.of(organism("llama", 2).truth.neurons[0]))


@pytest.fixture
def folder(alone, model) -> Path:
    """The folder of its scan, which is only read."""
    return alone / model.name


def test_without_a_model_a_scan_is_a_tour_of_the_bundled_one(tmp_path, monkeypatch):
    few_parts(monkeypatch, ("find_sinks",))
    monkeypatch.chdir(tmp_path)
    card = scan()
    assert card.quick and card.model.name == "bundled"
    assert SinkCard.load("sinkscope-demo/card.json").to_dict() == card.to_dict()
    assert Path("sinkscope-demo/card.html").is_file()


@pytest.mark.slow
def test_a_part_that_fails_says_why_and_the_next_begins(model, tmp_path, monkeypatch):
    few_parts(monkeypatch, ("find_sinks", "repeat"))

    def fails(*_, **__):
        raise ZeroDivisionError("<b>by zero</b>\nand more")

    working = scanning.PARTS
    monkeypatch.setattr(scanning, "PARTS", [replace(working[0], measure=fails), *working[1:]])
    card = scan(model, out=tmp_path / "s", quick=True)
    assert card.parts[0].conclusion == "not measured, because it failed (ZeroDivisionError: <b>by zero</b>)."
    assert not card.parts[1].conclusion.startswith("not measured")
    page = (tmp_path / "s/card.html").read_text()
    assert "because it failed (ZeroDivisionError: &lt;b&gt;by zero" in page and "<b>by zero" not in page
    monkeypatch.setattr(scanning, "PARTS", working)
    again = scan(model, out=tmp_path / "s", quick=True)  # and it is tried again
    assert not again.parts[0].conclusion.startswith("not measured")


def test_a_model_that_does_not_fit_is_streamed_and_opened_once(model, tmp_path, monkeypatch):
    few_parts(monkeypatch, ("repeat", "why_sink"))
    opened = []
    real = Setup.open

    def opening(*args, **options):
        opened.append(options.get("loading", "stream"))
        return real(*args, **options)

    monkeypatch.setattr(Setup, "open", opening)
    monkeypatch.setattr("sinkscope.app.scan.fits", lambda *_: False)
    card = scan(model, out=tmp_path / "small", quick=True)
    assert opened == ["stream"]
    said = {part.name: part.conclusion for part in card.parts}
    assert said["why_sink"] == "not measured, because it needs the whole model in memory." != said["repeat"]


Rows = dict[str, tuple[Row, ...]]


@pytest.fixture
def compared(folder):
    """Compare a card with these rows, by part, with an earlier one; some settings of the later one differ."""

    def run(before: Rows, after: Rows, **settings: Any) -> Comparison:
        card, cards = SinkCard.load(folder / "card.json"), []
        for rows in (before, after):
            parts = [CardPart(name, name, "It is so.", own) for name, own in rows.items()]
            cards.append(replace(card, parts=tuple(parts)))
        return compare(cards[0], replace(cards[1], settings={**card.settings, **settings}))

    return run


def test_cards_are_compared_by_their_parts_if_they_were_made_alike(compared):
    """Two parts may use one name."""
    before, later = (row_beside("lost", Mean(value, 0.01, kind="share"), 0.0) for value in (0.1, 0.3))
    both = [{"a": (one,), "b": (before,)} for one in (before, later)]
    (one,) = compared(*both).results
    assert {row.about: row.table for row in one.judged} == {"a": CHANGED, "b": SAME}
    with refused(r"measured with other settings or texts \(text is "):
        compared(*both, text="another")
    with refused(r"measured with other settings or texts \(quick is "):
        compared(*both, quick=False)
    with refused("no number in common"):
        compared({}, {"a": ()})


def test_scans_in_a_folder_are_compared_in_the_order_of_their_numbers(folder, tmp_path, capsys):
    card = SinkCard.load(folder / "card.json")
    for step in (1000, 20, 9):
        (tmp_path / f"step-{step}").mkdir()
        card.save(tmp_path / f"step-{step}/card.json")
    for name, command in (("step-30", "scan"), ("answers", "bench")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "settings.json").write_text(json.dumps({"command": command}))
    made = compare(tmp_path)
    assert [made.first, *(one.name for one in made.results)] == ["step-9", "step-20", "step-1000"]
    assert "step-30 is left out: its scan has not ended" in capsys.readouterr().err
