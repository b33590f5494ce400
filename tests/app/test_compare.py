"""Results of two or more models side by side: paired differences by hand, what came and went, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from refusals import refused
from sample_results import sample_find_sinks
from scipy import stats

import sinkscope as ss
from sinkscope.app.compare import MOST_PANELS, Comparison, expanded
from sinkscope.measure.changes import change_of
from sinkscope.results.result import Number, Result
from sinkscope.sinks.spikes.records import Candidate
from sinkscope.sinks.spikes.result import FindSinks

BEFORE, AFTER = (30, 34, 32, 32, 20, 40), (27, 33, 29, 30, 16, 38)


def with_heads(by_text: tuple[int, ...], name: str = "tiny", **changes) -> FindSinks:
    """A result with these counts of heads in each text."""
    found = sample_find_sinks(**changes)
    readers = replace(found.readers, by_text=by_text, texts=len(by_text), margin=14.0)
    return replace(found, readers=readers, model=replace(found.model, name=name))


def by_label(found: Comparison, result: int = -1) -> dict[str, object]:
    return {f"{one.about}: {one.label}": one for one in found.results[result].changes}


def test_the_change_of_the_heads_is_the_mean_of_the_paired_differences_with_students_interval():
    """The margins of both counts, 14 heads each, would hide it."""
    found = ss.compare(with_heads(BEFORE, "base"), with_heads(AFTER, "tuned"))
    change = by_label(found)["Attention: heads that attend to the first token"]
    differences = np.array(AFTER) - np.array(BEFORE)
    half = stats.t.ppf(0.975, 5) * differences.std(ddof=1) / np.sqrt(6)
    assert [48 * change.value, 48 * change.lower, 48 * change.upper] == pytest.approx(
        [differences.mean(), differences.mean() - half, differences.mean() + half]
    )
    assert (48 * change.before, 48 * change.after) == pytest.approx((np.mean(BEFORE), np.mean(AFTER)))
    assert change.changed and change.texts == 6
    said = found.conclusion()
    assert said.startswith("tuned against base: 1 of ") and "heads that attend to the first token -2.50 of 48" in said
    assert len(said.split()) <= 30


def test_texts_are_paired_by_their_names_and_not_by_their_order():
    one = Number("x", "X", 2.0, samples={"a": 1.0, "b": 2.0, "c": 3.0, "d": 9.0})
    other = Number("x", "X", 2.5, samples={"c": 3.5, "b": 2.5, "a": 1.5, "e": 90.0})
    change = change_of(one, other, paired=True)
    assert (change.value, change.lower, change.upper, change.texts) == pytest.approx((0.5, 0.5, 0.5, 3))
    assert change_of(one, other, paired=False).lower is None


@pytest.mark.parametrize(
    ("after", "margins", "half", "changed"),
    [
        (112.0, (3.0, 4.0), 5.0, True),
        (99.0, (3.0, 4.0), 5.0, False),
        (80.0, (3.0, 4.0), 5.0, True),
        (95.5, (0.0, 0.0), 0.0, False),  # by half a per cent of its value
    ],
)
def test_without_values_of_texts_both_margins_are_taken_together(after, margins, half, changed):
    one, other = (Number("x", "X", value, margin=at) for value, at in zip((95.0, after), margins, strict=True))
    change = change_of(one, other, paired=True)
    moved = after - 95
    assert (change.value, change.lower, change.upper, change.texts) == (moved, moved - half, moved + half, 0)
    assert change.changed is changed


def test_neurons_that_come_go_and_change_and_places_are_named():
    base = with_heads(BEFORE, "base")
    spike, stop = base.spikes
    shares = (0.8, 0.82, 0.84, 0.86, 0.83, 0.83)
    first = tuple(replace(one, by_text=shares) if one.neuron == 412 else one for one in spike.neurons)
    later = [replace(one, by_text=tuple(share - 0.1 for share in shares)) for one in first if one.neuron == 412]
    later.append(Candidate(3, None, 9, 0.2, 0.01, 0.0, 0.5, "needed"))
    numbers = (0, 1, 2, 3, 4, 5)
    tuned = replace(
        base,
        spikes=(replace(spike, neurons=tuple(later), text_numbers=numbers, layers=(2, 5)),),
        model=replace(base.model, name="tuned"),
    )
    base = replace(base, spikes=(replace(spike, neurons=first, text_numbers=numbers), stop))
    changes = by_label(ss.compare(base, tuned))
    name = "Spike at the first token, layers 2-4"
    moved = changes[f"{name}: share of L2.N412"]
    assert moved.changed and moved.value == pytest.approx(-0.1) and moved.texts == 6
    assert (moved.layer, moved.neuron, moved.expert) == (2, 412, None)
    assert changes[f"{name}: share of L3.N9"].which == "came" and changes[f"{name}: share of L2.N77"].which == "went"
    assert f"{name}: share of L2.N3" not in changes  # it wrote a thousandth: the search decides whether it is listed
    assert changes[f"Spikes: {name}"].sentence() == "2-4 -> 2-5"
    (gone,) = [one for label, one in changes.items() if one.which == "went" and one.about == "Spikes"]
    assert "'.' wherever it stands" in gone.label


def test_a_frame_has_whole_layers_and_neurons_and_the_ends_of_intervals(tmp_path):
    found = ss.compare(with_heads(BEFORE, "base"), with_heads(AFTER, "tuned"))
    frame = found.to_frame()
    assert str(frame["layer"].dtype) == str(frame["neuron"].dtype) == "Int64"
    row = frame[frame["label"] == "heads that attend to the first token"].iloc[0]
    assert row["lower"] < row["value"] < row["upper"] < 0
    assert Result.load(found.save(tmp_path / "c.json")) == found
    assert "base" in found.to_html()


def test_checkpoints_are_compared_with_the_first_in_the_order_of_their_numbers(tmp_path, typed):
    for step, by_text in ((9, BEFORE), (100, AFTER), (20, BEFORE)):
        with_heads(by_text, f"step{step}").save(tmp_path / f"step{step}.json")
    typed(f"compare {tmp_path} --json {tmp_path}/out/c.json --html {tmp_path}/out/c.html")
    found = Result.load(tmp_path / "out/c.json")
    assert (found.first, [one.name for one in found.results]) == ("step9", ["step20", "step100"])
    assert found.results[0].moved == [] and len(found.results[1].moved) == 1
    figure = found.figure(panel="heads that attend")
    (line,) = figure.data
    assert [*line.x] == ["step9", "step20", "step100"] and line.y[1] == 0 and line.y[2] == pytest.approx(-2.5)
    change = found.results[1].moved[0]
    assert line.error_y.array[2] == pytest.approx(48 * (change.upper - change.value))


def test_the_first_number_has_a_panel_however_many_others_changed():
    found = ss.compare(with_heads(BEFORE, "base"), with_heads(BEFORE, "tuned"))
    (same,) = [one for one in found.results[0].changes if one.label.startswith("heads that attend")]
    others = [replace(same, label=f"number {n}", key=str(n), changed=True) for n in range(MOST_PANELS)]
    crowded = replace(found, results=(replace(found.results[0], changes=(same, *others)),))
    (line,) = crowded.figure(panel="heads that attend").data
    assert line.y[1] == 0 and len(crowded.figure().data) == MOST_PANELS


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"settings": {"seed": 1, "text": None}}, "seed is 0 and 1"),
        ({"settings": {"seed": 0, "text": "mine.txt"}}, "text is None and 'mine.txt'"),
        ({"settings": {"seed": 0, "text": None, "all_layers": True}}, "all_layers is None and True"),
    ],
)
def test_results_of_other_settings_and_texts_are_refused(changes, words):
    with refused(f"other settings or texts .*{words}"):
        ss.compare(with_heads(BEFORE, "base"), with_heads(AFTER, "tuned", **changes))


def test_files_of_one_text_under_two_names_are_compared_and_other_tokens_are_refused():
    one, same = ({"seed": 0, "text": name, "text_read": "abc"} for name in ("a.txt", "b.txt"))
    ss.compare(with_heads(BEFORE, settings=one), with_heads(AFTER, settings=same))
    with refused("text_read is 'abc' and 'def'"):
        ss.compare(with_heads(BEFORE, settings=one), with_heads(AFTER, settings={**same, "text_read": "def"}))


def test_other_kinds_one_result_and_empty_folders_are_refused_in_one_line(tmp_path, typed):
    path = with_heads(BEFORE, "base").save(tmp_path / "base.json")
    circuit = json.loads(path.read_text()) | {"kind": "circuit"}
    (tmp_path / "circuit.json").write_text(json.dumps(circuit))
    printed = typed(f"compare {path} {tmp_path}/circuit.json", 2)
    assert printed.err == "error: base holds find-sinks, and circuit holds circuit: give results of one kind\n"
    assert "1 result to compare: give two or more" in typed(f"compare {path}", 2).err
    (tmp_path / "empty").mkdir()
    assert "holds no results and no checkpoints" in typed(f"compare {path} {tmp_path}/empty", 2).err


def test_a_model_is_measured_and_equals_itself(model, tmp_path, typed):
    """Two names of one model: no number that is judged moves at all."""
    typed(f"compare {model} {model} --out {tmp_path}/kept --json {tmp_path}/c.json")
    found = Result.load(tmp_path / "c.json")
    judged = found.results[0].judged
    assert len(judged) >= 4 and all(change.value == 0 for change in judged)
    assert [path.name for path in expanded(tmp_path / "kept")] == ["llama (2).json", "llama.json"]
