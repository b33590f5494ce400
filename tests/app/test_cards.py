"""A scan of a model and its sink card."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from organisms import Organism, organism

from sinkscope.app import card as run
from sinkscope.app.card import CardNumber, Clock, SinkCard, at_path, read_card, scan, scanned
from sinkscope.app.cli import main
from sinkscope.app.commands import commands
from sinkscope.errors import SinkscopeError
from sinkscope.files.result import Result
from sinkscope.interventions import SinkPatch
from sinkscope.measure import Measurement, Setup

BY_NAME = {command.name: command for command in commands().values()}
FEW = ("find_sinks", "marking_heads", "separability")
LIGHT = ("marking_heads", "separability")


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quick parts alone."""
    monkeypatch.setattr(run, "scanned", lambda quick: [BY_NAME[name] for name in FEW])


@pytest.fixture
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two quickest parts, for tests of what a scan does between parts."""
    monkeypatch.setattr(run, "scanned", lambda quick: [BY_NAME[name] for name in LIGHT])


@cache
def planted() -> Organism:
    return organism("llama", 2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with a known sink, in a folder named model."""
    return Path(planted().save(tmp_path_factory.mktemp("organism") / "model"))


def neuron() -> str:
    """The neuron that makes the sink of the small model."""
    ((layer, at),) = planted().truth.neurons[:1]
    return f"L{layer}.N{at}"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """The folder of a scan of the small model; for those who only read."""
    folder = tmp_path_factory.mktemp("made") / "scan"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "scanned", lambda quick: [BY_NAME[name] for name in FEW])
        scan(model, out=folder, quick=True)
    return folder


def test_every_part_and_the_card_are_in_the_folder(made: Path) -> None:
    card = read_card(made)
    assert isinstance(card, SinkCard) and [p.name for p in card.parts] == list(FEW)
    found = Result.load(made / "find-sinks.json")
    assert type(found).__name__ == "FindSinks"
    assert card.conclusion() == found.conclusion()
    minimal = found.minimal
    assert minimal is not None
    lost = next(n for n in card.numbers if n.label == "norm lost without the neurons")
    assert (lost.value, lost.control) == (minimal.drop_sink_layer, minimal.control)
    assert all(n.control is not None for n in card.numbers) and len(card.numbers) >= 5
    assert {f.label: f.value for f in card.facts}["neurons that make the spike"] == neuron()
    assert card.to_dict() == SinkCard.load(made / "card.json").to_dict()
    told = (made / "card.md").read_text()
    page = (made / "card.html").read_text()
    for part in card.parts:
        assert part.conclusion in page.replace("&#x27;", "'") and part.command in told
    assert page.count('<section id="r') == 1 + len(FEW) and page.count('class="plot"') == len(FEW)
    assert card.provenance.seconds == pytest.approx(sum(p.seconds or 0 for p in card.parts), abs=0.01)


def test_a_finished_scan_measures_nothing_again(
    made: Path, model: Path, few: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = json.loads((made / "card.json").read_text())["result"]
    monkeypatch.setattr(Measurement, "on", lambda *_, **__: pytest.fail("measured again"))
    scan(model, out=made, quick=True)
    assert json.loads((made / "card.json").read_text())["result"] == before


def test_an_interrupted_scan_goes_on(light: None, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []
    real = Measurement.on

    def on(self: Any, setup: Setup, **given: Any) -> Any:
        if self.__name__ == LIGHT[1] and len(measured) == 1:
            raise KeyboardInterrupt
        measured.append(self.__name__)
        return real(self, setup, **given)

    monkeypatch.setattr(Measurement, "on", on)
    with pytest.raises(KeyboardInterrupt):
        scan(model, out=tmp_path / "s", quick=True)
    assert (tmp_path / "s/marking-heads.json").is_file() and not (tmp_path / "s/card.json").exists()
    measured.append("the second run")
    scan(model, out=tmp_path / "s", quick=True)
    assert measured == [LIGHT[0], "the second run", *LIGHT[1:]]


@pytest.mark.parametrize("other", [{"seed": 1}, {"quick": False}, {"models": "recall"}, {"bos": False}])
def test_other_settings_are_kept_apart(made: Path, model: Path, few: None, other: dict[str, Any]) -> None:
    given: dict[str, Any] = {"models": model, "out": made, "quick": True, **other}
    with pytest.raises(SinkscopeError, match="begun with other settings"):
        scan(**given)


def test_a_folder_of_something_else_is_refused(few: None, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(SinkscopeError, match="holds other files"):
        scan(out=tmp_path, quick=True)


def test_a_part_that_fails_says_why_and_the_next_begins(
    light: None, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Measurement.on

    def on(self: Any, setup: Setup, **given: Any) -> Any:
        if self.__name__ == "marking_heads":
            raise ZeroDivisionError("<b>by zero</b>\nand more")
        return real(self, setup, **given)

    monkeypatch.setattr(Measurement, "on", on)
    card = scan(model, out=tmp_path / "s", quick=True)
    assert isinstance(card, SinkCard)
    assert [p.problem is None for p in card.parts] == [False, True]
    assert card.parts[0].problem == "it failed (ZeroDivisionError: <b>by zero</b>)."
    assert card.conclusion() == card.parts[1].conclusion
    page = (tmp_path / "s/card.html").read_text()
    assert "is missing: it failed (ZeroDivisionError: &lt;b&gt;by zero" in page and "<b>by zero" not in page
    assert f"{card.parts[0].command}` is missing: it failed" in (tmp_path / "s/card.md").read_text()
    monkeypatch.setattr(Measurement, "on", real)
    again = scan(model, out=tmp_path / "s", quick=True)  # and it is tried again
    assert isinstance(again, SinkCard) and all(p.problem is None for p in again.parts)


def test_a_model_that_does_not_fit_is_streamed_and_opened_once(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("marking_heads", "loop_rate", "circuit")
    monkeypatch.setattr(run, "scanned", lambda quick: [BY_NAME[name] for name in names])
    opened: list[str] = []
    real = Setup.open
    monkeypatch.setattr(
        Setup,
        "open",
        lambda *args, **options: opened.append(options.get("loading", "stream")) or real(*args, **options),
    )
    monkeypatch.setattr(run, "_room", lambda *_: 1.0)
    card = scan(model, out=tmp_path / "small", quick=True)
    assert isinstance(card, SinkCard) and opened == ["stream"]
    assert card.parts[0].problem is None and "whole model in memory" in str(card.parts[1].problem)
    assert "many times" in str(card.parts[2].problem) and all("--memory" in str(p.problem) for p in card.parts[1:])
    opened.clear()
    monkeypatch.undo()
    monkeypatch.setattr(run, "scanned", lambda quick: [BY_NAME[name] for name in names[:1]])
    card = scan(model, out=tmp_path / "large", quick=True)
    assert isinstance(card, SinkCard) and card.parts[0].problem is None


def test_time_left_goes_by_the_weights_of_the_parts() -> None:
    now, shown = [0.0], list[tuple[str, int, int]]()
    clock = Clock({"a": 1.0, "b": 9.0}, lambda *told: shown.append(told), lambda: now[0])
    clock.begin("a")
    assert clock.left == 10
    now[0] = 4.0
    clock.end("a")
    clock.begin("b")
    assert clock.left == 36  # four times slower than thought, and nine times as much
    now[0] = 24.0
    clock("texts", 1, 4)
    assert clock.left == 16 and shown[-1] == ("scan: b", 24, 40)
    now[0] = 90.0
    assert clock.left == pytest.approx(3.6)  # it takes longer than thought
    clock.end("b")
    assert clock.left == 0


def test_a_part_that_was_there_does_not_count_for_the_pace() -> None:
    now = [0.0]
    clock = Clock({"a": 5.0, "b": 2.0}, lambda *_: None, lambda: now[0])
    clock.begin("a")
    clock.end("a", counts=False)
    clock.begin("b")
    assert clock.left == 2


def changed(card: SinkCard, **more: Any) -> SinkCard:
    return replace(card, numbers=tuple(replace(n, **more) if n.margin else n for n in card.numbers))


def test_a_card_against_itself_has_no_change(made: Path) -> None:
    card = read_card(made)
    same = card.compared(card)
    assert not any(c.changed for c in same.changes) and len(same.changes) == len(card.numbers) + len(card.facts)
    assert "0 of " in same.conclusion() and "more than their margin" in same.conclusion()
    assert len(same.rows()) == len(same.changes)


@pytest.mark.parametrize(("by", "moved"), [(0.5, False), (1.3, False), (1.5, True)])
def test_a_change_counts_beyond_both_margins(made: Path, by: float, moved: bool) -> None:
    card = replace(read_card(made), numbers=(CardNumber("a", "x", 10.0, 0.0, 1.0), CardNumber("a", "y", 1.0, 0.0)))
    after = replace(card, numbers=(CardNumber("a", "x", 10.0 + by, 0.0, 1.0), CardNumber("a", "y", 2.0, 0.0)))
    found = {c.label: c for c in after.compared(card).changes}
    assert found["x"].changed is moved and found["x"].margin == pytest.approx(2**0.5)
    assert found["y"].changed is None


def test_a_fact_that_changed_is_named(made: Path) -> None:
    card = read_card(made)
    other = replace(card, facts=tuple(replace(f, value="L9.N9") if "neurons" in f.label else f for f in card.facts))
    found = card.compared(other)
    assert found.changes[0].changed and (found.changes[0].before, found.changes[0].after) == ("L9.N9", neuron())
    assert f"neurons that make the spike: L9.N9 before, {neuron()} now" in found.conclusion()
    assert "L9.N9" in found.markdown() and "L9.N9" in found.to_html()


def test_cards_of_different_settings_are_not_compared(made: Path) -> None:
    card = read_card(made)
    with pytest.raises(SinkscopeError, match="--quick"):
        card.compared(replace(card, quick=False))
    with pytest.raises(SinkscopeError, match="no number in common"):
        card.compared(replace(card, numbers=(), facts=()))


def test_names_of_a_model_are_text_on_the_card(made: Path) -> None:
    card = read_card(made)
    bad = replace(card, model=replace(card.model, name="<img src=x>|`a`"))
    assert "<img" not in bad.markdown() and "\\|\\`a\\`" in bad.markdown()
    assert "<img" not in bad.compared(bad).to_html()


def test_a_scan_under_a_patch(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The patched neuron no longer makes a sink of repeated tokens; the card says whose it is."""
    entry = BY_NAME["repeat_norms"]
    measure: Any = entry.load()
    monkeypatch.setattr(measure, "scan", {**measure.scan, "quick": {"max_repeats": 160}})
    monkeypatch.setattr(run, "scanned", lambda quick: [entry])
    SinkPatch(sites=list(planted().truth.neurons)).save(patch := tmp_path / "patch.json")
    before = scan(model, out=tmp_path / "before", quick=True)
    after = scan(model, out=tmp_path / "after", quick=True, patch=patch, against=tmp_path / "before")
    assert isinstance(before, SinkCard) and isinstance(after, SinkCard)
    assert after.model.name == "model patched"
    norm = next(c for c in after.changes if c.label == "norm after the last repetition")
    assert norm.changed and float(norm.after) < 0.1 * float(norm.before)
    with pytest.raises(SinkscopeError, match="begun with other settings"):
        scan(model, out=tmp_path / "before", quick=True, patch=patch)


def test_several_models(few: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted().save(tmp_path / "a")
    organism("llama", 2, kind="none").save(tmp_path / "b")
    (tmp_path / "c").mkdir()
    (tmp_path / "c/config.json").write_text("{")
    cards = scan([tmp_path / name for name in "abc"], out=tmp_path / "s", quick=True)
    assert isinstance(cards, run.SinkCards) and list(cards.known) == ["a", "b"]
    assert cards.cards[2].failed is not None and "config.json" in cards.cards[2].failed
    assert str(tmp_path) not in cards.cards[2].failed
    assert cards.conclusion().startswith("2 of 3 models were scanned; they differ in ")
    assert "sink layer" in cards.conclusion()
    assert {row["model"] for row in cards.rows()} == {"a", "b"}
    assert (tmp_path / "s/a/card.html").is_file() and (tmp_path / "s/cards.html").is_file()
    assert Result.load(tmp_path / "s/cards.json").to_dict() == cards.to_dict()
    opened: list[Any] = []
    real = Setup.open
    monkeypatch.setattr(Setup, "open", lambda model, **given: opened.append(model) or real(model, **given))
    scan([tmp_path / name for name in "abc"], out=tmp_path / "s", quick=True)
    assert opened == [tmp_path / "c"]  # what failed is tried again, and nothing else


@pytest.mark.slow
def test_several_models_over_ray(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    for name in "ab":
        organism("llama", 2).save(tmp_path / name)
    cards = scan([tmp_path / name for name in "ab"], out=tmp_path / "s", quick=True, workers=2)
    assert isinstance(cards, run.SinkCards) and len(cards.known) == 2
    assert (tmp_path / "s/b/card.html").is_file()


@pytest.mark.slow
def test_a_whole_quick_scan_and_the_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["demo", "--no-open"]) == 0
    out = capsys.readouterr().out
    card = read_card(tmp_path / "sinkscope-demo")
    assert all(p.problem is None for p in card.parts) and len(card.parts) == len(scanned(quick=True)) >= 14
    assert out.count("   $ sinkscope ") == len(card.parts) and "sinkscope-demo/card.html" in out
    assert all(n.control is not None for n in card.numbers)
    assert max(len(n.label) for n in card.numbers) <= 42  # tables fit 80 columns


@dataclass(frozen=True)
class Inner:
    x: float | None


def test_paths_of_numbers() -> None:
    result = SimpleNamespace(a=Inner(2.0), b=(Inner(1.0), Inner(None), Inner(5.0)), c=None, d=(3.0, 9.0), e=True)
    assert at_path(result, "a.x") == 2
    assert at_path(result, "b.*.x") == 3  # the median of those that there are
    assert at_path(result, "b.-1.x") == 5 and at_path(result, "b.7.x") is None
    assert at_path(result, "c.x") is None and at_path(result, "") is None and at_path(result, "e") is None
    assert at_path(result, "a.x - b.-1.x") == 3 and at_path(result, "a.x - c") is None
    assert at_path(result, "d") == 6
    with pytest.raises(AttributeError):
        at_path(result, "a.y")
