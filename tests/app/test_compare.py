"""Results of two or more models side by side: paired differences by hand, what came and went, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from sample_results import NEEDED, sample_find_sinks, share, with_rows, writer
from scipy import stats

import sinkscope as ss
from sinkscope.app.card import CardPart, SinkCard
from sinkscope.app.compare import CAME, CHANGED, SAME, UNJUDGED, WENT, Compared, Comparison, expanded, merge
from sinkscope.results.result import Result
from sinkscope.results.row import Mean, Row, row_of
from sinkscope.sinks.spikes.result import FindSinks

# --- rows ---


def one(value: float = 1.0, about: str = "", **more) -> Row:
    return Row("t", "x", {"n": Mean(value, **more)}, about=about)


def test_a_change_is_the_mean_of_paired_differences_with_students_interval():
    """Texts are paired by their names and not by their order; a text that one result lacks counts in neither."""
    before = Row("t", "x", {"n": Mean(5.0, 14.0, (30.0, 34.0, 20.0, 9.0))}, texts=tuple("abcd"))
    after = Row("t", "x", {"n": Mean(7.0, 14.0, (90.0, 17.0, 33.0, 29.0))}, texts=tuple("ecba"))
    (row,) = merge([before], [after])
    differences = np.array([-1.0, -1.0, -3.0])
    half = stats.t.ppf(0.975, 2) * differences.std(ddof=1) / np.sqrt(3)
    said = [row.get(number) for number in ("change", "before", "after", "texts")]
    assert [*said, row.margin("change")] == pytest.approx([differences.mean(), 28.0, 79 / 3, 3, half])
    assert row.table == SAME  # three texts are few


@pytest.mark.parametrize(
    ("before", "after", "margins", "verdict"),
    [
        (1.0, 1.45, (0.3, 0.4), SAME),  # the margin is that of both together
        (1.0, 1.6, (0.3, 0.4), CHANGED),
        (1.0, 9.0, (None, 0.4), UNJUDGED),
        (100.0, 100.9, (0.1, 0.1), SAME),  # by less than 1 %
        (100.0, 101.1, (0.1, 0.1), CHANGED),
    ],
)
def test_without_texts_a_change_is_judged_by_both_margins(before, after, margins, verdict):
    (row,) = merge([one(before, margin=margins[0])], [one(after, margin=margins[1])])
    assert row.table == verdict


@pytest.mark.parametrize(
    ("after", "partner"),
    [
        (["Spike at 30 places, layer 8"], 0),
        (["Spike at 9 places, layers 9-12"], None),
        (["Spike at 9 places, layers 7-11", "Spike at 9 places, layers 2-9"], 1),  # by most common layers
    ],
)
def test_subjects_are_the_same_by_their_names_but_for_numbers_and_by_common_layers(after, partner):
    before = "Spike at 29 places, layers 2-8"
    rows = merge([one(1.0, before)], [one(number, name) for number, name in enumerate(after)])
    assert [row.get("after") for row in rows if row.about == before] == [partner][: partner is not None]
    apart = [name for number, name in enumerate(after) if number != partner]
    assert [row.name for row in rows if row.table == CAME] == apart


def test_what_the_control_does_is_not_compared():
    """Only what it is the control of: however far a control moved, and where it moved more."""
    before, after = (Row("t", "x", {"share": share(0.5, 0.01), "control": share(of, 0.01)}) for of in (0.1, 0.9))
    (row,) = merge([before], [after])
    assert (row.table, row.get("change")) == (SAME, 0.0)


@pytest.mark.parametrize(("value", "is_named"), [(0.06, True), (-0.06, True), (0.04, False), (-0.04, False)])
def test_a_row_that_goes_is_named_by_the_size_of_its_share(value, is_named):
    """A neuron that lowers a spike has a negative share."""
    row = Row("t", "y", {"share": share(value)})
    assert [one.table for one in merge([row, one(1.0)], [one(1.0)])].count(WENT) == is_named
    assert [one.table for one in merge([one(1.0)], [row, one(1.0)])].count(CAME) == is_named


def test_the_conclusion_says_how_many_numbers_would_seem_to_change_by_chance():
    """The control of a comparison: with 40 numbers, two. It is the same whether none changed or all did."""
    found = sample_find_sinks()
    for moved in (0.0, 0.5):
        before = tuple(Row("t", f"x{n}", {"n": Mean(1.0, 0.1)}) for n in range(40))
        after = tuple(Row("t", f"x{n}", {"n": Mean(1.0 + moved, 0.1)}) for n in range(40))
        compared = Compared("b", tuple(merge(before, after)))
        said = Comparison(of=found.kind, first="a", results=(compared,)).conclusion()
        assert f"{40 * bool(moved)} of 40 judged numbers changed (2 by chance)" in said


# --- results ---

BEFORE, AFTER = (30.0, 34.0, 32.0, 32.0, 20.0, 40.0), (27.0, 33.0, 29.0, 30.0, 16.0, 38.0)


def with_heads(by_text: tuple[float, ...], name: str = "tiny") -> FindSinks:
    """A result with these counts of heads in each text."""
    found = sample_find_sinks()
    readers = row_of("attention", "the first token", heads=Mean(32, 14.0, by_text, "count"), total=48)
    return replace(found, attention=(readers, *found.attention[1:]), model=replace(found.model, name=name))


def test_checkpoints_are_compared_with_the_first_in_the_order_of_their_numbers(tmp_path, typed):
    """The margins of both counts, 14 heads each, would hide the change; paired text by text it is seen."""
    for step, by_text in ((9, BEFORE), (100, AFTER), (20, BEFORE)):
        with_heads(by_text).save(tmp_path / f"step{step}.json")
    typed(f"compare {tmp_path} --json {tmp_path}/out/c.json")
    found = Result.load(tmp_path / "out/c.json")
    assert (found.first, [one.name for one in found.results]) == ("step9", ["step20", "step100"])
    assert found.results[0].moved == []
    (row,) = found.results[1].moved
    assert (row.name, row.get("texts")) == ("the first token: heads", 6)
    said = found.conclusion()
    assert said.startswith("step100 against step9, text by text: 1 of ")
    assert said.endswith(f"; the first token: heads -2.5 ± {row.margin('change'):.3g}.")
    (line,) = found.figure().data
    assert [*line.x] == ["step20", "step100"] and [*line.y] == pytest.approx([0, -2.5])
    assert line.error_y.array[1] == row.margin("change")


def test_neurons_that_come_go_and_change_and_places_are_named():
    base = sample_find_sinks()
    spike, stop = base.spikes
    spike = with_rows(spike, writer("L2.N77", 0.14, 0.9, "needed"), writer("L2.N3", 0.001, 1.0, "backup"))
    rows = writer(NEEDED, 0.73, 0.3, "needed", 0.01), writer("L3.N9", 0.2, 0.5, "needed")
    tuned = replace(base, spikes=(with_rows(replace(spike, layers=(2, 5)), *rows, without=("writers",)),))
    found = ss.compare(replace(base, spikes=(spike, stop)), tuned)
    name = "Spike at the first token, layers 1-5"
    cards = {card.title.partition(": ")[0]: dict(card.rows) for card in found.cards()}
    card = cards[name]
    assert card[f"{NEEDED}: share"] == "100.0% -> 73.0% (-27.0 points ± 1.0)"
    assert card["layers"] == "1-5 -> 2-5" and card["L3.N9"].startswith("came: share 20%")
    assert card["L2.N77"].startswith("went: ") and "L2.N3" not in card  # a thousandth: the search lists it, or not
    assert (WENT, f"Spike at {stop.place.words}, layers 1-5") in [
        (row.table, row.name) for row in found.results[0].rows
    ]


def test_what_cannot_be_compared_is_refused_in_one_line(tmp_path, typed, monkeypatch):
    path = with_heads(BEFORE).save(tmp_path / "base.json")
    whole = json.loads(path.read_text())
    (tmp_path / "circuit.json").write_text(json.dumps(whole | {"kind": "why-sink"}))
    (tmp_path / "plain.json").write_text(json.dumps(whole | {"settings": whole["settings"] | {"bos": False}}))
    monkeypatch.setattr("sinkscope.measure.setup.open_target", lambda *_, **__: pytest.fail("a model is read"))
    for other, says in {
        "circuit.json": "base holds find-sinks, and circuit holds why-sink: give results of one kind",
        "plain.json": "base and plain were measured with other settings (bos was True, now False): measure both in",
        # What is known is compared before a model is read, wherever it stands.
        f"circuit.json {tmp_path}/model": "base holds find-sinks, and circuit holds why-sink: give results of one kind",
        "model --measure repeat": "base holds find-sinks, and models are measured with repeat: give --measure find-si",
    }.items():
        assert says in typed(f"compare {path} {tmp_path}/{other}", 2).err


@pytest.mark.parametrize(("settings", "is_paired"), [({"seed": 1}, True), ({"text_read": "b", "texts": 4}, False)])
def test_other_seeds_are_paired_and_other_texts_are_compared_by_both_intervals(settings, is_paired):
    """Of tokenizers that read the same texts, the hash of the texts is the same."""
    base, tuned = with_heads(BEFORE), with_heads(AFTER, "tuned")
    found = ss.compare(base, replace(tuned, settings=base.settings | settings))
    (row,) = [row for row in found.results[0].rows if row.name == "the first token: heads"]
    assert (row.table, row.get("texts")) == ((CHANGED, 6) if is_paired else (SAME, 0))
    assert is_paired or row.margin("change") == pytest.approx(14 * 2**0.5)
    how = "text by text" if is_paired else "by both intervals (other texts)"
    assert found.conclusion().startswith(f"tuned against tiny, {how}: {int(is_paired)} of ")
    assert any("read other texts than tiny" in line for line in found.details()) != is_paired


def test_cards_are_compared_by_their_parts(tmp_path):
    """Two parts may use one name, and a folder of scans stands for its cards, in the order of their numbers."""
    for step, value in ((1000, 0.3), (20, 0.1)):
        row = row_of("findings", "lost", share=share(value, 0.01), control=0.0)
        parts = (CardPart("a", "a", "It is so.", (row,)), CardPart("b", "b", "So.", (replace(row, numbers={}),)))
        (tmp_path / f"step-{step}").mkdir()
        SinkCard(quick=True, parts=parts).save(tmp_path / f"step-{step}/card.json")
    found = ss.compare(tmp_path)
    assert (found.first, found.results[0].name) == ("step-20", "step-1000")
    assert [(row.about, row.table) for row in found.results[0].rows if row.numbers] == [("a", CHANGED)]


def test_a_model_is_measured_and_equals_itself(model, tmp_path, typed, monkeypatch):
    """Two names of one model of the hub: no number that is judged moves at all, and its results are files."""
    named = replace(sample_find_sinks().model, name="org/llama")
    monkeypatch.setattr("sinkscope.measure.setup.model_info", lambda _: named)
    typed(f"compare {model} {model} --out {tmp_path}/kept --json {tmp_path}/c.json")
    judged = Result.load(tmp_path / "c.json").results[0].judged
    assert len(judged) >= 4 and all(row.get("change") == 0 for row in judged)
    assert [path.name for path in expanded(tmp_path / "kept")] == ["llama (2).json", "llama.json"]
