"""A scan of a model and its sink card: what runs, what is said, and how it goes on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from attack_kit import text_file
from organisms import organism

from sinkscope.app import scan as scanning
from sinkscope.app.card import SinkCard
from sinkscope.app.scan import scan
from sinkscope.opening.load import open_target
from sinkscope.sinks.spikes.find import find_sinks

pytestmark = pytest.mark.few_texts


@pytest.fixture
def parts(monkeypatch):
    """Let a scan run parts of these names alone, with some changes."""
    every = {part.name: part for part in scanning.PARTS}

    def choose(*names: str, **changes) -> None:
        chosen = [replace(every[name], **changes.get(name.replace("-", "_"), {})) for name in names]
        monkeypatch.setattr(scanning, "PARTS", chosen)

    return choose


def stopped(*_, **__):
    raise KeyboardInterrupt


def fails(*_, **__):
    raise ZeroDivisionError("<b>by zero</b>\nand more")


def test_without_a_model_a_scan_is_a_tour_of_the_bundled_one(tmp_path, monkeypatch, parts):
    parts("find-sinks")
    monkeypatch.chdir(tmp_path)
    card = scan()
    assert card.quick and card.model.name == "bundled" and "--quick" not in "".join(card.details())
    assert SinkCard.load("sinkscope-demo/card.json").to_dict() == card.to_dict()
    assert Path("sinkscope-demo/card.html").is_file()


def test_a_scan_goes_on_where_it_ended_and_a_part_that_fails_says_why(model, tmp_path, monkeypatch, parts, typed):
    monkeypatch.chdir(tmp_path)
    small = {"attack": {"quick": {"n_tokens": 12, "sequences": 2, "length": 2}}}
    parts("attack", "lines", lines={"measure": stopped}, **small)
    assert typed(f"scan {model} --quick --out s", 130).err.startswith("scan 1 of 2: attack: done\n")
    typed("report . --out report.html")
    parts("attack", "lines", attack={"measure": stopped}, lines={"measure": fails})  # attack is not measured again
    assert typed(f"scan {model} --quick --out s").err.endswith("Card: s/card.html\n")
    _, lines = SinkCard.load("s/card.json").parts
    assert lines.conclusion == "not measured, because it failed (ZeroDivisionError: <b>by zero</b>)."
    page = Path("s/card.html").read_text()
    assert "because it failed (ZeroDivisionError: &lt;b&gt;by zero" in page and "<b>by zero" not in page
    parts("attack", "lines", attack={"measure": stopped}, lines={"quick": {"count": 2, "length": 48}})
    assert scan(model, out="s", quick=True).parts[1].measured  # it is tried again
    assert "--only finds: expected attack, lines" in typed(f"scan {model} --quick --only finds --out t", 2).err


def test_the_card_holds_what_the_folder_holds(model, tmp_path, monkeypatch, parts):
    """A part that is run alone joins those that are there, in the order of the card."""
    monkeypatch.chdir(tmp_path)
    parts("attack", "lines", attack={"quick": {"n_tokens": 12, "sequences": 2, "length": 2}}, lines={"measure": fails})
    assert [part.measured for part in scan(model, out="s", quick=True, only=["attack"]).parts] == [True]
    parts("attack", "lines", attack={"measure": stopped}, lines={"quick": {"count": 2, "length": 48}})
    card = scan(model, out="s", quick=True, only=["lines"])
    assert [(part.name, part.measured) for part in card.parts] == [("attack", True), ("lines", True)]
    assert SinkCard.load("s/card.json").to_dict() == card.to_dict()
    assert "attack" in Path("s/card.html").read_text()


def test_a_model_that_does_not_fit_is_streamed_and_opened_once(model, tmp_path, monkeypatch, parts):
    parts("repeat", "why-sink")
    opened = []

    def opening(*args, **options):
        opened.append("whole" if options["in_memory"] else "stream")
        return open_target(*args, **options)

    monkeypatch.setattr("sinkscope.measure.setup.open_target", opening)
    monkeypatch.setattr("sinkscope.measure.setup.fits", lambda *_: False)
    card = scan(model, out=tmp_path / "small", quick=True)
    assert opened == ["stream"]
    said = {part.name: part.conclusion for part in card.parts}
    assert said["why-sink"] == "not measured, because it needs the whole model in memory." != said["repeat"]


def test_find_sinks_says_the_same_of_a_folder_that_is_streamed(tmp_path, monkeypatch):
    deep = organism("llama", 1, n_layers=7)
    text = text_file(deep, tmp_path, 20)
    memory = find_sinks(deep.model, tokenizer=deep.tokenizer, text=text)
    monkeypatch.setattr("sinkscope.models.checkpoints.stream.LAYER_BYTES", 0)  # no layer stays in memory
    target = open_target(deep.save(tmp_path / "m"))
    reads, tensor = [], target.store.source.tensor
    monkeypatch.setattr(target.store.source, "tensor", lambda name: reads.append(name) or tensor(name))
    streamed = find_sinks(target, text=text)
    assert max(map(reads.count, reads)) <= 15 and streamed.needed == memory.needed
    assert streamed.first_token_norm == pytest.approx(memory.first_token_norm, rel=1e-4)
    at_place, other = (one.spikes[0].effect for one in (streamed, memory))
    assert at_place.heads == other.heads
    assert at_place.loss is None
    assert other.loss is not None
