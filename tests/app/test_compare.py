"""Results of two or more models side by side: paired differences by hand, what came and went, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from sample_results import NEEDED, sample_find_sinks, with_writers, writer
from scipy import stats

import sinkscope as ss
from sinkscope.app.card import CardPart, SinkCard
from sinkscope.app.changes import Verdict, merge
from sinkscope.app.compare import Compared, Comparison, expanded
from sinkscope.results.headline import Headline
from sinkscope.results.headline import Verdict as Shown
from sinkscope.results.mean import Mean
from sinkscope.results.notation import Neuron
from sinkscope.results.result import Result
from sinkscope.results.table import Row, Subject, optional, whole
from sinkscope.sinks.spikes.result import FindSinks
from sinkscope.sinks.spikes.spike import PlaceKey, PlaceKind
from sinkscope.sinks.spikes.tables import Role, SpikeKey

# --- rows ---


@dataclass(frozen=True, kw_only=True)
class Drop(Row, table="drops", title="dropped"):
    """A row with a number and its control."""

    key: str = "x"
    n: Mean | None = optional("number", "number", "A number.")
    share: Mean | None = optional("share", "share", "A share.")
    control: Mean | None = optional("control", "share", "What the control does.")


def subject(*rows: Row, key: Any = "", texts: Sequence[str] = ()) -> Subject:
    return Subject("", rows, key, tuple(texts))


def one(value: float = 1.0, key: Any = "", texts: Sequence[str] = (), **more) -> Subject:
    return subject(Drop(n=Mean(value, **more)), key=key, texts=texts)


def test_a_change_is_the_mean_of_paired_differences_with_students_interval():
    """Texts are paired by their names and not by their order; a text that one result lacks counts in neither."""
    before = one(5.0, margin=14.0, by_text=(30.0, 34.0, 20.0, 9.0), texts="abcd")
    after = one(7.0, margin=14.0, by_text=(90.0, 17.0, 33.0, 29.0), texts="ecba")
    (row,) = merge([before], [after])
    differences = np.array([-1.0, -1.0, -3.0])
    half = stats.t.ppf(0.975, 2) * differences.std(ddof=1) / np.sqrt(3)
    numbers = [row[number].value for number in ("change", "before", "after", "texts")]
    assert [*numbers, row.margin] == pytest.approx([differences.mean(), 28.0, 79 / 3, 3, half])
    assert row.verdict is Verdict.SAME  # three texts are few


@pytest.mark.parametrize(
    ("before", "after", "margins", "verdict"),
    [
        (1.0, 1.45, (0.3, 0.4), Verdict.SAME),  # the margin is that of both together
        (1.0, 1.6, (0.3, 0.4), Verdict.CHANGED),
        (1.0, 9.0, (None, 0.4), Verdict.UNJUDGED),
        (100.0, 100.9, (0.1, 0.1), Verdict.SAME),  # by less than 1 %
        (100.0, 101.1, (0.1, 0.1), Verdict.CHANGED),
    ],
)
def test_without_texts_a_change_is_judged_by_both_margins(before, after, margins, verdict):
    (row,) = merge([one(before, margin=margins[0])], [one(after, margin=margins[1])])
    assert row.verdict is verdict


def spike_key(first: int, last: int, kind: PlaceKind = PlaceKind.FIRST) -> SpikeKey:
    return SpikeKey(PlaceKey(kind), (first, last))


@pytest.mark.parametrize(
    ("after", "partner"),
    [
        ([spike_key(8, 8)], 0),
        ([spike_key(9, 12)], None),
        ([spike_key(2, 8, PlaceKind.OTHER)], None),  # elsewhere
        ([spike_key(7, 11), spike_key(2, 9)], 1),  # by most common layers
    ],
)
def test_spikes_are_the_same_by_their_place_and_by_common_layers(after, partner):
    before = spike_key(2, 8)
    rows = merge([one(1.0, before)], [one(number, key) for number, key in enumerate(after)])
    found = [row["after"].value for row in rows if row.after is not None]
    assert found == [partner][: partner is not None]
    apart = [str(key) for number, key in enumerate(after) if number != partner]
    assert [row.key.row for row in rows if row.verdict is Verdict.CAME] == apart


def test_what_the_control_does_is_not_compared():
    """Only what it is the control of: however far a control moved, and where it moved more."""
    before, after = (subject(Drop(share=Mean(0.5, 0.01), control=Mean(of, 0.01))) for of in (0.1, 0.9))
    (row,) = merge([before], [after])
    assert (row.verdict, row["change"].value) == (Verdict.SAME, 0.0)


@pytest.mark.parametrize(("value", "is_named"), [(0.06, True), (-0.06, True), (0.04, False), (-0.04, False)])
def test_a_row_that_goes_is_named_by_the_size_of_its_share(value, is_named):
    """A neuron that lowers a spike has a negative share."""
    few = subject(Drop(n=Mean(1.0)))
    more = subject(Drop(n=Mean(1.0)), Drop(key="y", share=Mean(value)))
    assert [row.verdict for row in merge([more], [few])].count(Verdict.WENT) == is_named
    assert [row.verdict for row in merge([few], [more])].count(Verdict.CAME) == is_named


def test_the_conclusion_says_how_many_numbers_would_seem_to_change_by_chance():
    """The control of a comparison: with 40 numbers, two. It is the same whether none changed or all did."""
    found = sample_find_sinks()
    for moved in (0.0, 0.5):
        before = subject(*(Drop(key=f"x{n}", n=Mean(1.0, 0.1)) for n in range(40)))
        after = subject(*(Drop(key=f"x{n}", n=Mean(1.0 + moved, 0.1)) for n in range(40)))
        compared = Compared("b", tuple(merge([before], [after])))
        conclusion = Comparison(of=found.kind, first="a", results=(compared,)).conclusion()
        assert f"{40 * bool(moved)} of 40 judged numbers changed (2 by chance)" in conclusion


# --- results ---

BEFORE, AFTER = (30.0, 34.0, 32.0, 32.0, 20.0, 40.0), (27.0, 33.0, 29.0, 30.0, 16.0, 38.0)


def with_heads(by_text: tuple[float, ...], name: str = "tiny") -> FindSinks:
    """A result with these counts of heads in each text."""
    found = sample_find_sinks()
    readers = replace(found.attention[0], heads=Mean(32, 14.0, by_text, "count"), total=whole(48))
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
    assert (row.key.row, row["texts"].value) == ("the first token", 6)
    said = found.conclusion()
    assert said.startswith("step100 against step9: the norm spike at the first token, layers 1-5 is kept: 20 heads ")
    assert f" In all, 1 of {len(found.results[1].judged)} judged numbers changed text by text (" in said
    (line,) = found.figure().data
    assert [*line.x] == ["step20", "step100"] and [*line.y] == pytest.approx([0, -2.5])
    assert line.error_y.array[1] == row.margin


def test_neurons_that_come_go_and_change_and_places_are_named():
    base = sample_find_sinks()
    spike, stop = base.spikes
    went, rare, came = (Neuron(layer, None, number) for layer, number in ((2, 77), (2, 3), (3, 9)))
    spike = with_writers(spike, writer(went, 0.14, 0.9, Role.NEEDED), writer(rare, 0.001, 1.0, Role.BACKUP))
    writers = writer(NEEDED, 0.73, 0.3, Role.NEEDED, 0.01), writer(came, 0.2, 0.5, Role.NEEDED)
    tuned = replace(base, spikes=(replace(spike, layers=(2, 5), writers=writers),))
    changes = ss.compare(replace(base, spikes=(spike, stop)), tuned).results[0].rows
    of_row = {(row.key.row, row.key.column): row for row in changes if row.key.about == str(spike.key)}
    share = next(row for (name, column), row in of_row.items() if name == str(NEEDED) and "share" in column)
    assert (share.verdict, share["change"].value) == (Verdict.CHANGED, pytest.approx(-0.27, abs=1e-3))
    moved = next(row for row in of_row.values() if row.words == f"{spike.key} -> {tuned.spikes[0].key}")
    assert moved.verdict is Verdict.CHANGED
    verdicts = {name: row.verdict for (name, column), row in of_row.items() if not column}
    assert (verdicts[str(went)], verdicts[str(came)]) == (Verdict.WENT, Verdict.CAME)
    assert str(rare) not in verdicts  # a thousandth: the search lists it, or not
    assert (Verdict.WENT, str(stop.key)) in [(row.verdict, row.key.row) for row in changes]


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
    (row,) = [row for row in found.results[0].rows if row.key.row == "the first token" and row.margin]
    assert (row.verdict, row["texts"].value) == ((Verdict.CHANGED, 6) if is_paired else (Verdict.SAME, 0))
    assert is_paired or row.margin == pytest.approx(14 * 2**0.5)
    how = "text by text" if is_paired else "by both intervals (other texts)"
    assert f" In all, {int(is_paired)} of " in found.conclusion()
    assert f" judged numbers changed {how} (" in found.conclusion()
    assert any("read other texts than tiny" in line for line in found.details()) != is_paired


def test_scans_are_compared_by_the_files_of_their_parts(tmp_path):
    """A folder of scans stands for them in the order of their numbers; a part whose file is gone is left out."""
    for step, by_text in ((1000, AFTER), (20, BEFORE)):
        folder = tmp_path / f"step-{step}"
        folder.mkdir()
        headline = Headline("heads", "32 of 48", "0", Shown.SHOWN)
        parts = [CardPart(name, name, "It is so.", (headline,)) for name in ("find-sinks", "lines")]
        SinkCard(quick=True, parts=tuple(parts)).save(folder / "card.json")
        with_heads(by_text).save(folder / "find-sinks.json")
    found = ss.compare(tmp_path)
    assert (found.first, found.results[0].name) == ("step-20", "step-1000")
    assert [(row.key.about, row.key.row) for row in found.results[0].moved] == [
        ("find-sinks: attention", "the first token")
    ]


def test_a_model_is_measured_and_equals_itself(model, tmp_path, typed, monkeypatch):
    """Two names of one model of the hub: no number that is judged moves at all, and its results are files."""
    named = replace(sample_find_sinks().model, name="org/llama")
    monkeypatch.setattr("sinkscope.measure.setup.model_info", lambda _: named)
    typed(f"compare {model} {model} --out {tmp_path}/kept --json {tmp_path}/c.json")
    judged = Result.load(tmp_path / "c.json").results[0].judged
    assert len(judged) >= 4
    assert all(row["change"].value == 0 for row in judged)
    assert [path.name for path in expanded(tmp_path / "kept")] == ["llama (2).json", "llama.json"]
