"""Results of two or more models side by side: paired differences by hand, what came and went, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from sample_results import sample_find_sinks, share, with_rows, writer

import sinkscope as ss
from sinkscope.app.card import CardPart, SinkCard
from sinkscope.app.compare import CAME, CHANGED, SAME, WENT, expanded
from sinkscope.results.result import Result
from sinkscope.results.row import Mean, row_of
from sinkscope.sinks.spikes.result import FindSinks

BEFORE, AFTER = (30.0, 34.0, 32.0, 32.0, 20.0, 40.0), (27.0, 33.0, 29.0, 30.0, 16.0, 38.0)
HEADS = "the first token: heads"


def with_heads(by_text: tuple[float, ...], name: str = "tiny") -> FindSinks:
    """A result with these counts of heads in each text."""
    found = sample_find_sinks()
    readers = row_of("attention", "the first token", heads=Mean(32, 14.0, by_text, "count"), total=48)
    return replace(found, attention=(readers, *found.attention[1:]), model=replace(found.model, name=name))


def test_the_change_of_the_heads_stands_in_the_conclusion():
    """The margins of both counts, 14 heads each, would hide it; paired text by text it is seen."""
    found = ss.compare(with_heads(BEFORE, "base"), with_heads(AFTER, "tuned"))
    (row,) = found.results[0].moved
    assert (row.name, row.get("texts")) == (HEADS, 6)
    said = f"{HEADS} -2.5 ± {row.margin('change'):.3g}."
    assert found.conclusion().startswith("tuned against base: 1 of ") and found.conclusion().endswith(said)
    card = dict(found.cards()[0].rows)
    assert card[HEADS].startswith("31.33 -> 28.83 (-2.5 ± ") and "sink rate" in card[SAME]


def test_neurons_that_come_go_and_change_and_places_are_named():
    base = sample_find_sinks()
    spike, stop = base.spikes
    rows = writer("L2.N412", 0.73, 0.3, "needed", 0.01), writer("L3.N9", 0.2, 0.5, "needed")
    tuned = replace(base, spikes=(with_rows(replace(spike, layers=(2, 5)), *rows, without=("writers",)),))
    found = ss.compare(base, tuned)
    verdicts = {(row.about, row.name): row.table for row in found.results[0].rows}
    name = "Spike at the first token, layers 2-4"
    assert verdicts[name, "L2.N412: share"] == CHANGED
    assert (verdicts[name, "L3.N9"], verdicts[name, "L2.N77"]) == (CAME, WENT)
    assert (name, "L2.N3") not in verdicts  # it wrote a thousandth: the search decides whether it is listed
    assert verdicts["", f"Spike at {stop.place.words}, layers 2-4"] == WENT
    (card,) = [dict(card.rows) for card in found.cards() if card.title.startswith("Spike at the first")]
    assert card["L2.N412: share"] == "83.0% -> 73.0% (-10.0 points ± 1.4)"
    assert card["layers"] == "2-4 -> 2-5" and card["L3.N9"].startswith("came: share 20%")


def test_checkpoints_are_compared_with_the_first_in_the_order_of_their_numbers(tmp_path, typed):
    for step, by_text in ((9, BEFORE), (100, AFTER), (20, BEFORE)):
        with_heads(by_text, f"step{step}").save(tmp_path / f"step{step}.json")
    typed(f"compare {tmp_path} --json {tmp_path}/out/c.json --html {tmp_path}/out/c.html")
    found = Result.load(tmp_path / "out/c.json")
    assert (found.first, [one.name for one in found.results]) == ("step9", ["step20", "step100"])
    assert found.results[0].moved == []
    (line,) = found.figure().data
    assert [*line.x] == ["step20", "step100"] and [*line.y] == pytest.approx([0, -2.5])
    assert line.error_y.array[1] == found.results[1].moved[0].margin("change")


def test_what_cannot_be_compared_is_refused_in_one_line(tmp_path, typed):
    path = with_heads(BEFORE, "base").save(tmp_path / "base.json")
    whole = json.loads(path.read_text())
    (tmp_path / "circuit.json").write_text(json.dumps(whole | {"kind": "why-sink"}))
    (tmp_path / "before.json").write_text(json.dumps(whole | {"schema": 5}))
    (tmp_path / "seed.json").write_text(json.dumps(whole | {"settings": whole["settings"] | {"seed": 1}}))
    (tmp_path / "empty").mkdir()
    for other, says in {
        "circuit.json": "base holds find-sinks, and circuit holds why-sink: give results of one kind",
        "before.json": "schema 5, and this version reads 6: run the command again",
        "seed.json": "base and seed were measured with other settings or texts (seed was 0, now 1): measure both",
        "empty": "empty holds no results and no checkpoints",
    }.items():
        assert says in typed(f"compare {path} {tmp_path}/{other}", 2).err
    assert "1 result to compare: give two or more" in typed(f"compare {path}", 2).err


def test_cards_are_compared_by_their_parts(tmp_path):
    """Two parts may use one name, and a folder of scans stands for its cards, in the order of their numbers."""
    for step, value in ((1000, 0.3), (20, 0.1)):
        row = row_of("findings", "lost", share=share(value, 0.01), control=0.0)
        parts = (CardPart("a", "a", "It is so.", (row,)), CardPart("b", "b", "So.", (replace(row, numbers={}),)))
        (tmp_path / f"step-{step}").mkdir()
        SinkCard(quick=True, parts=parts).save(tmp_path / f"step-{step}/card.json")
    found = ss.compare(tmp_path)
    assert (found.first, found.results[0].name) == ("step-20", "step-1000")
    assert [(row.about, row.table) for row in found.results[0].judged] == [("a", CHANGED)]


def test_a_model_is_measured_and_equals_itself(model, tmp_path, typed, monkeypatch):
    """Two names of one model of the hub: no number that is judged moves at all, and its results are files."""
    named = replace(sample_find_sinks().model, name="org/llama")
    monkeypatch.setattr("sinkscope.measure.setup.model_info", lambda _: named)
    typed(f"compare {model} {model} --out {tmp_path}/kept --json {tmp_path}/c.json")
    judged = Result.load(tmp_path / "c.json").results[0].judged
    assert len(judged) >= 4 and all(row.get("change") == 0 for row in judged)
    assert [path.name for path in expanded(tmp_path / "kept")] == ["llama (2).json", "llama.json"]
