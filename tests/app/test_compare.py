"""Results of two or more models side by side: paired differences by hand, what came and went, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from sample_results import sample_find_sinks, with_rows, writer

import sinkscope as ss
from sinkscope.app.compare import Comparison, expanded
from sinkscope.measure.merge import CAME, CHANGED, WENT
from sinkscope.results.result import Result
from sinkscope.results.row import Mean, Row, row_of
from sinkscope.sinks.spikes.result import FindSinks

BEFORE, AFTER = (30.0, 34.0, 32.0, 32.0, 20.0, 40.0), (27.0, 33.0, 29.0, 30.0, 16.0, 38.0)
HEADS = "the first token: heads"


def with_heads(by_text: tuple[float, ...], name: str = "tiny", **changes) -> FindSinks:
    """A result with these counts of heads in each text."""
    found = sample_find_sinks(**changes)
    readers = row_of("attention", "the first token", heads=Mean(32, 14.0, by_text, "count"), total=48)
    return replace(found, attention=(readers, *found.attention[1:]), model=replace(found.model, name=name))


def by_name(found: Comparison, result: int = -1) -> dict[str, Row]:
    return {f"{row.about}: {row.name}": row for row in found.results[result].rows}


def test_the_change_of_the_heads_stands_in_the_conclusion():
    """The margins of both counts, 14 heads each, would hide it; paired text by text it is seen."""
    found = ss.compare(with_heads(BEFORE, "base"), with_heads(AFTER, "tuned"))
    row, said = by_name(found)[f": {HEADS}"], found.conclusion()
    assert row.table == CHANGED and row.get("texts") == 6
    assert said.startswith("tuned against base: 1 of ") and f"{HEADS} -2.5, 95 % " in said
    assert len(said.split()) <= 30
    assert dict(found.cards()[0].rows)[HEADS].startswith("31.33 -> 28.83 (-2.5, 95 % ")


def test_neurons_that_come_go_and_change_and_places_are_named():
    base = with_heads(BEFORE, "base")
    spike, stop = base.spikes
    shares, texts = (0.8, 0.82, 0.84, 0.86, 0.83, 0.83), (0, 1, 2, 3, 4, 5)
    other = writer("L2.N412", 0.83, 0.3, "needed")
    first = replace(other, numbers=other.numbers | {"share": Mean(0.83, 0.01, shares, "share")})
    fewer = Mean(0.73, 0.01, tuple(share - 0.1 for share in shares), "share")
    later = [replace(first, numbers=first.numbers | {"share": fewer}), writer("L3.N9", 0.2, 0.5, "needed")]
    tuned = with_rows(replace(spike, texts=texts, layers=(2, 5)), *later, without=("writers",))
    tuned = replace(base, spikes=(tuned,), model=replace(base.model, name="tuned"))
    base = replace(base, spikes=(with_rows(replace(spike, texts=texts), first), stop))
    found = ss.compare(base, tuned)
    rows, name = by_name(found), "Spike at the first token, layers 2-4"
    moved = rows[f"{name}: L2.N412: share"]
    assert moved.table == CHANGED and moved.get("change") == pytest.approx(-0.1) and moved.get("texts") == 6
    assert rows[f"{name}: L3.N9"].table == CAME and rows[f"{name}: L2.N77"].table == WENT
    assert f"{name}: L2.N3" not in rows  # it wrote a thousandth: the search decides whether it is listed
    assert rows[f"{name}: layers"].note == "2-4 -> 2-5"
    assert rows[f": Spike at {stop.place.words}, layers 2-4"].table == WENT
    (card,) = [dict(card.rows) for card in found.cards() if card.title.startswith("Spike at the first")]
    assert card["L2.N412: share"] == "83.0% -> 73.0% (-10.0 points in each of 6 texts)"
    assert card["layers"] == "2-4 -> 2-5" and card["L3.N9"].startswith("came: share 20%")


def test_checkpoints_are_compared_with_the_first_in_the_order_of_their_numbers(tmp_path, typed):
    for step, by_text in ((9, BEFORE), (100, AFTER), (20, BEFORE)):
        with_heads(by_text, f"step{step}").save(tmp_path / f"step{step}.json")
    typed(f"compare {tmp_path} --json {tmp_path}/out/c.json --html {tmp_path}/out/c.html")
    found = Result.load(tmp_path / "out/c.json")
    assert (found.first, [one.name for one in found.results]) == ("step9", ["step20", "step100"])
    assert found.results[0].moved == [] and len(found.results[1].moved) == 1
    figure = found.figure()
    line, *_ = figure.data
    assert [*line.x] == ["step20", "step100"] and [*line.y] == pytest.approx([0, -2.5])
    row = found.results[1].moved[0]
    assert line.error_y.array[1] == pytest.approx(row.get("upper") - row.get("change"))


def test_other_kinds_one_result_and_empty_folders_are_refused_in_one_line(tmp_path, typed):
    path = with_heads(BEFORE, "base").save(tmp_path / "base.json")
    circuit = json.loads(path.read_text()) | {"kind": "why-sink"}
    (tmp_path / "circuit.json").write_text(json.dumps(circuit))
    printed = typed(f"compare {path} {tmp_path}/circuit.json", 2)
    assert printed.err == "error: base holds find-sinks, and circuit holds why-sink: give results of one kind\n"
    before = json.loads(path.read_text()) | {"schema": 5}
    (tmp_path / "before.json").write_text(json.dumps(before))
    said = "before.json has schema 5, and this version reads 6: read it with sinkscope 0.2.0, or run the command again"
    assert typed(f"compare {path} {tmp_path}/before.json", 2).err == f"error: {said}\n"
    assert "1 result to compare: give two or more" in typed(f"compare {path}", 2).err
    (tmp_path / "empty").mkdir()
    assert "holds no results and no checkpoints" in typed(f"compare {path} {tmp_path}/empty", 2).err


def test_a_model_is_measured_and_equals_itself(model, tmp_path, typed):
    """Two names of one model: no number that is judged moves at all."""
    typed(f"compare {model} {model} --out {tmp_path}/kept --json {tmp_path}/c.json")
    found = Result.load(tmp_path / "c.json")
    judged = found.results[0].judged
    assert len(judged) >= 4 and all(row.get("change") == 0 for row in judged)
    assert [path.name for path in expanded(tmp_path / "kept")] == ["llama (2).json", "llama.json"]
