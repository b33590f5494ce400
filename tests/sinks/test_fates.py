"""What became of a spike in another model: a planted pair for each verdict, and effects of one set in both."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from sample_results import STOP, sample_find_sinks

import sinkscope as ss
from sinkscope.results.mean import Mean
from sinkscope.results.notation import Neuron
from sinkscope.results.table import whole
from sinkscope.sinks.spikes.find import find_sinks
from sinkscope.sinks.spikes.kept import Fate, fates_of, with_one_set
from sinkscope.sinks.spikes.record import SpikeResult
from sinkscope.sinks.spikes.result import FindSinks
from sinkscope.sinks.spikes.tables import Done

SAMPLE = sample_find_sinks()
SPIKE = replace(SAMPLE.spikes[0], place=SAMPLE.spikes[0].place)


def found(*spikes: SpikeResult) -> FindSinks:
    return replace(SAMPLE, spikes=spikes)


def with_heads(heads: float, hidden: float = 0.16) -> SpikeResult:
    """The spike with so many heads, and what hiding its place costs."""
    effects = []
    for row in SPIKE.effects:
        effects.append(replace(row, loss=Mean(hidden, 0.05)) if row.key.done is Done.HIDDEN else row)
    return replace(SPIKE, size=replace(SPIKE.size, heads=whole(int(heads))), effects=tuple(effects))


@pytest.mark.parametrize(
    ("after", "fate"),
    [
        ([with_heads(20)], Fate.KEPT),
        ([with_heads(10)], Fate.KEPT),  # half of the heads
        ([with_heads(9)], Fate.WEAKER),
        ([with_heads(20, hidden=0.02)], Fate.WEAKER),
        ([with_heads(20, hidden=0.07)], Fate.WEAKER),
        ([with_heads(20, hidden=0.12)], Fate.KEPT),
        ([replace(SPIKE, layers=(3, 4))], Fate.KEPT),  # other layers, of which it shares some
        ([replace(SPIKE, layers=(6, 7))], Fate.MOVED),
        ([replace(SPIKE, place=STOP)], Fate.MOVED),
        ([replace(SPIKE, place=STOP, dims=(5,))], Fate.GONE),
        ([], Fate.GONE),
    ],
)
def test_the_fate_of_a_spike(after, fate):
    (row,) = fates_of(found(SPIKE), found(*after))
    assert row.fate is fate
    assert f" is {fate}" in row.sentence


def test_a_fall_within_the_margin_is_no_fall():
    """Half of the cost is gone, and the margin is as large."""
    wide = with_heads(20, hidden=0.07)
    effects = []
    for row in wide.effects:
        effects.append(replace(row, loss=Mean(0.07, 0.2)) if row.key.done is Done.HIDDEN else row)
    (row,) = fates_of(found(SPIKE), found(replace(wide, effects=tuple(effects))))
    assert row.fate is Fate.KEPT


def test_effects_of_other_sets_are_not_compared():
    """Of files: what two neurons do stands beside nothing, and it is said."""
    other = replace(SPIKE, needed=(Neuron(1, None, 7),))
    before, after = with_one_set(found(SPIKE), found(other), None)
    for result in (before, after):
        done = [row.key.done for row in result.spikes[0].effects if not row.is_control]
        assert set(done) == {Done.INTACT, Done.HIDDEN}
    comparison = ss.compare(found(SPIKE), found(other))
    assert any("their effects are not compared. Give the model" in line for line in comparison.details())
    same = with_one_set(found(SPIKE), found(SPIKE), None)
    assert same == (found(SPIKE), found(SPIKE))


def test_of_open_models_what_the_first_set_does_is_measured_in_the_other():
    """The neuron writes half as much; another one joins it, and the set that is compared stays the first one."""
    tuned = ss.load()
    with torch.no_grad():
        tuned.model.layers[1].mlp.down_proj.weight[:, 338] *= 0.9
    base = find_sinks(ss.load())
    spike = base.spikes[0]
    pair = (Neuron(1, None, 338), Neuron(1, None, 5))
    effects = [replace(row, parts=pair) if row.key.done is Done.NEEDED else row for row in spike.effects]
    renamed = replace(base, spikes=(replace(spike, needed=pair, effects=tuple(effects)),))  # as if two were needed
    comparison = ss.compare(renamed, tuned)
    (line,) = (line for line in comparison.details() if line.startswith("At the first token"))
    assert line.endswith("effects are those of L1.N338 and L1.N5 in both models.")
    left = next(row for row in comparison.results[0].rows if row.key.column == "spike left" and row.before is not None)
    assert left.key.row == "L1.N338 and L1.N5 zeroed: at this place alone"
    assert left["before"].value == pytest.approx(spike.effect["left"].value)
    assert left["after"].value < 0.01, "the pair is zeroed in the other model, too"
