"""The controls of the view: which neurons and heads may be drawn, and what is said where a control does more."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest

from sinkscope.app.view import switches
from sinkscope.app.view.readings import ModelSink
from sinkscope.app.view.switches import Switch, switch_off, switch_without
from sinkscope.hooks.edit import Ablate
from sinkscope.results.notation import Head, Neuron
from sinkscope.sinks.spikes.controls import OtherNeurons

TEXT = "A class is a block."
QUIET = Neuron(1, None, 0)


@pytest.mark.parametrize("seed", range(4))
def test_heads_of_the_control_are_neither_those_that_are_edited_nor_marking_ones(seed):
    setup = SimpleNamespace(target=SimpleNamespace(n_heads=5), ids=None, seed=seed)
    sink = mock.Mock(spec=ModelSink, setup=setup, marks=[Head(2, 1), Head(2, 3), Head(3, 0)], neurons=())
    drawn = switch_off(sink, "x", (), [Head(2, 0)]).control
    assert drawn in [Ablate(heads=[(2, head)], value="mean") for head in (2, 4)]
    assert switch_off(sink, "x", (), [Head(2, 0), Head(2, 4)]).control is None, "one is left, and two are needed"


def test_neurons_of_the_control_are_none_of_the_sink(bundled, monkeypatch):
    asked = []

    def choose(survey, neurons, excluded, seed):
        asked.append((neurons, excluded))
        return OtherNeurons((Neuron(1, None, 3),), 1.0, as_many=False)

    monkeypatch.setattr(switches, "other_neurons", choose)
    control = switch_without(bundled, [str(QUIET)]).control
    assert asked == [((QUIET,), bundled.neurons)]
    assert control == Ablate(sites=[Neuron(1, None, 3)])


@pytest.mark.parametrize("control_wins", [False, True])
def test_the_control_is_said_whichever_of_both_does_more(bundled, control_wins):
    """The neuron of the sink and a quiet one, each as the edit and as its control."""
    sink, quiet = Ablate(sites=bundled.neurons), Ablate(sites=[QUIET])
    edit, control = (quiet, sink) if control_wins else (sink, quiet)
    (text,) = bundled.result(TEXT, [None, Switch("edited", edit, control)]).texts
    intact, edited = (variant.norm[bundled.layer, 0] for variant in text.variants)
    sentence = text.variants[1].sentence
    beside = float(sentence.partition("control: ")[2].partition(")")[0].replace(",", ""))
    if control_wins:
        position = int(sentence.partition("at token ")[2].partition(",")[0])
        assert edited == pytest.approx(intact, rel=0.01)
        assert position or beside < 0.5 * intact
    else:
        assert edited < 0.5 * intact and beside == pytest.approx(intact, rel=0.01)
