"""A scan of a model and its sink card."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from markupsafe import escape
from organisms import organism
from refusals import refused
from report_kit import files_shown, made_report
from scan_kit import PARTS, few_parts

from sinkscope.app import scan as scanning
from sinkscope.app.card import CardPart, SinkCard
from sinkscope.app.compare import Comparison, compare
from sinkscope.app.scan import scan
from sinkscope.measure import Setup
from sinkscope.results.notation import neuron_name
from sinkscope.results.result import Number, Result

pytestmark = pytest.mark.few_texts


@pytest.fixture
def neuron() -> str:
    """The neuron that makes its sink."""
    return neuron_name(*organism("llama", 2).truth.neurons[0])


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


def test_every_part_and_the_card_are_in_the_folder(folder, neuron):
    card = SinkCard.load(folder / "card.json")
    assert [part.name for part in card.parts] == list(PARTS)
    sinks = Result.load(folder / "find-sinks.json")
    assert card.conclusion() == sinks.conclusion()
    numbers = {number.label: number for part in card.parts for number in part.numbers}
    left = numbers[f"share of the spike that remains without {neuron} at the place"]
    spike = sinks.spikes[0]
    assert (left.value, left.control) == (spike.effect.at_place.left, spike.controls.strongest[1].left)
    assert len(numbers) >= 7 and numbers["neurons that the spike needs"].value == neuron
    page = (folder / "card.html").read_text()
    for part in card.parts:
        assert escape(part.conclusion) in page
        assert part.command in page
    assert page.count('class="plot"') == len(PARTS)
    assert files_shown(folder / "card.html") == ["card.json", "find-sinks.json", "repeat.json"]
    assert re.findall(r"</h2><(details|div)", page) == ["details", "div", "details"]  # the sink alone is open
    tiles = page.partition('<div class="tiles">')[2].partition("</div>")[0].split("<article>")[1:]
    assert [tile.partition("</h3>")[0] for tile in tiles] == ["<h3>Sink", "<h3>Repetition"]
    loss = numbers[f"rise of the loss without {neuron} at the place, in nats a token"]
    value, control = (f"{nats:.4g}" for nats in (loss.value, loss.control))
    assert f"<b>{value}</b> {loss.label} <small>({loss.contrast}: {control})</small>" in tiles[0]


def test_a_finished_scan_measures_nothing_again(folder, model, monkeypatch):
    few_parts(monkeypatch, PARTS)
    before = json.loads((folder / "card.json").read_text())["result"]
    monkeypatch.setattr(scanning, "_measured", lambda *_: pytest.fail("measured again"))
    scan(model, out=folder, quick=True)
    assert json.loads((folder / "card.json").read_text())["result"] == before
    ours = (folder / "card.html").read_text()
    (folder / "card.html").write_text("Mine")
    with refused(r"card\.html is there already"):
        scan(model, out=folder, quick=True)
    assert (folder / "card.html").read_text() == "Mine"
    (folder / "card.html").write_text(ours)


@pytest.mark.parametrize("other", [{"seed": 1}, {"quick": False}, {"bos": False}])
def test_other_settings_are_kept_apart(folder, model, monkeypatch, other):
    few_parts(monkeypatch, PARTS)
    options = {"out": folder, "quick": True, **other}
    with refused("begun with other settings"):
        scan(model, **options)


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
    monkeypatch.setattr("sinkscope.opening.load.free_memory", lambda *_: 1)
    card = scan(model, out=tmp_path / "small", quick=True)
    assert opened == ["stream"]
    said = {part.name: part.conclusion for part in card.parts}
    assert said["why_sink"] == "not measured, because it needs the whole model in memory." != said["repeat"]


def test_a_report_takes_its_parts_and_leaves_nothing_out(folder, tmp_path):
    page = made_report(folder.parent, tmp_path / "report.html")
    assert {f"{folder.name}/{name}" for name in ("card.json", "find-sinks.json")} <= set(files_shown(page))
    assert f"<b>{folder.name}" not in page.read_text()


Numbers = dict[str, tuple[Number, ...]]


@pytest.fixture
def compared(folder):
    """Compare a card with these numbers, by part, with an earlier one; some settings of the later one differ."""

    def run(before: Numbers, after: Numbers, **settings: Any) -> Comparison:
        card, cards = SinkCard.load(folder / "card.json"), []
        for numbers in (before, after):
            parts = [CardPart(name, name, "It is so.", own) for name, own in numbers.items()]
            cards.append(replace(card, parts=tuple(parts)))
        return compare(cards[0], replace(cards[1], settings={**card.settings, **settings}))

    return run


@pytest.mark.parametrize(("by", "moved"), [(0.5, False), (1.3, False), (1.5, True)])
def test_a_change_counts_beyond_both_margins(compared, by, moved):
    """And a number without a margin is not judged."""
    x, y = Number("x", "X", 10.0, 0.0, 1.0), Number("y", "Y", 1.0, 0.0)
    (one,) = compared({"a": (x, y)}, {"a": (replace(x, value=10.0 + by), replace(y, value=2.0))}).results
    changes = {change.key: change for change in one.changes}
    assert changes["a.x"].changed is moved and changes["a.x"].interval.margin == pytest.approx(2**0.5)
    assert changes["a.y"].changed is None


def test_numbers_are_compared_by_part_and_key_whatever_their_labels_are(compared):
    """Two parts may use one key, and a label may be worded anew between two cards."""
    before: Numbers = {}
    for name, value in (("a", 0.1), ("b", 0.7)):
        before[name] = (Number("lost", "share lost", value, 0.0, 0.01, share=True), Number("word", "the word", name))
    lost, word = before["a"]
    first = (replace(lost, label="of it lost", value=0.3), replace(word, value="b"))
    (one,) = compared(before, {"a": first, "b": before["b"]}).results
    assert {change.key: (change.before, change.after, change.changed) for change in one.changes} == {
        "a.lost": (0.1, 0.3, True),
        "a.word": ("a", "b", True),
        "b.lost": (0.7, 0.7, False),
        "b.word": ("b", "b", False),
    }
    assert [change.about for change in one.changes] == ["a", "a", "b", "b"]


def test_cards_of_the_same_texts_are_compared_text_by_text(compared):
    """Texts differ more than models do, and a list says what is new."""
    texts = {f"text {number}": 0.1 * number for number in range(8)}
    number = Number("heads", "share", 0.35, None, 0.2, True, samples=texts, items=("L0.H1", "L1.H2"))
    later = {name: value + 0.05 + 0.001 * (value > 0.3) for name, value in texts.items()}
    moved = replace(number, value=0.4, samples=later, items=("L1.H2", "L2.H0"))
    both = {"a": (number,)}, {"a": (moved,)}
    ((change,),) = (one.changes for one in compared(*both).results)
    assert change.texts == 8 and change.changed and change.moved.startswith("+5.1 points, 95 % +5.0 to +5.1")
    assert change.which == "new: L2.H0; gone: L0.H1"
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
