"""The edits that a view can switch on, each with its control: other neurons that write as much, or other heads."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import product, starmap
from operator import or_

from sinkscope.app.view.readings import ModelSink
from sinkscope.errors import SinkscopeError
from sinkscope.hooks.edit import Ablate, SinkPatch
from sinkscope.hooks.edit.base import Intervention
from sinkscope.hooks.edit.knockout import Knockout
from sinkscope.hooks.edit.sites import head_of, site_of
from sinkscope.models.draws import draws, some_of
from sinkscope.models.inputs import check_site
from sinkscope.results.notation import Head, Neuron, word_list
from sinkscope.sinks.spikes.controls import OtherNeurons, other_neurons

FEWEST_TOKENS = 8  # of a text whose middle one can be switched
OTHERS_SWITCH = "other neurons zeroed"
"""The switch that is the control of the sink neurons."""


@dataclass(frozen=True)
class Switch:
    """An edit that can be switched on, and the edit that is its control.

    Attributes:
        name: What is edited.
        edit: The edit.
        control: The same of other neurons that write as much, and of random heads. None if there are too few, or a
            token is changed.
        meaning: What the edit does, in a sentence.
        first_at: The position that gets the id of the first token. None: no token changes.
    """

    name: str
    edit: Intervention | None
    control: Intervention | None = None
    meaning: str = ""
    first_at: int | None = None

    def of(self, ids: list[int]) -> list[int]:
        """Return the tokens of a text under the switch."""
        if self.first_at is None:
            return ids
        return [*ids[: self.first_at], ids[0], *ids[self.first_at + 1 :]]


def switches_of(sink: ModelSink) -> list[Switch]:
    """Return the edits that this model has."""
    switches: list[Switch] = []
    names = word_list(sink.neurons)
    if sink.neurons:
        zeroed = switch_off(sink, "sink neurons zeroed", sink.neurons, [], f"Set to 0 at each token: {names}.")
        switches.append(zeroed)
        if sink.circuit.first_spikes and sink.circuit.first_spikes[0] is sink.circuit.spike:
            meaning = f"Set to an ordinary value at each token but the first, which keeps its own: {names}."
            switches.append(Switch("patched", SinkPatch.from_result(sink.circuit), zeroed.control, meaning))
        others = others_of(sink, sink.neurons)
        if zeroed.control is not None and others is not None:
            fair = "This is the control." if others.is_fair else "This is no fair control: they write too little."
            meaning = f"Set to 0 at each token: {others.words}. {fair}"
            switches.append(Switch(OTHERS_SWITCH, zeroed.control, meaning=meaning))
    if sink.marks:
        meaning = f"Replaced by their mean output at each token: {word_list(sink.marks)}."
        switches.insert(1, switch_off(sink, "marking heads replaced", (), sink.marks, meaning))
    return switches


def switch_off(
    sink: ModelSink, name: str, neurons: tuple[Neuron, ...], heads: Sequence[Head], meaning: str = ""
) -> Switch:
    """Zero some neurons and replace some heads by their mean; the control does the same to others."""
    setup, edit = sink.setup, _off(neurons, heads)
    every = starmap(Head, product(sorted({head.layer for head in heads}), range(setup.target.n_heads)))
    others = [head for head in every if head not in (*heads, *sink.marks)]
    if len(others) < len(heads):
        return Switch(name, edit, meaning=meaning)
    other_heads = some_of(others, len(heads), draws(setup.seed, f"heads beside {word_list(heads)}"))
    control = others_of(sink, neurons)
    if neurons and control is None:
        return Switch(name, edit, meaning=meaning)
    return Switch(name, edit, _off(() if control is None else control.neurons, other_heads), meaning)


def others_of(sink: ModelSink, neurons: tuple[Neuron, ...]) -> OtherNeurons | None:
    """Return other neurons of the same layers that write as much, none of the sink; None: no other writes anything."""
    if not neurons:
        return None
    setup = sink.setup
    draw = partial(other_neurons, sink.sinks.survey, neurons, sink.neurons, setup.seed)
    return setup.once((other_neurons, neurons), draw)


MOVED = re.compile(r"token (\d+) (isolated|with the first id)")
"""Switches of one token of a text."""


def moved_names(sink: ModelSink, length: int) -> list[str]:
    """Return the switches of the token in the middle of a text, where it is known what makes the first one the sink."""
    answered = sink.circuit.answered
    if answered is None or not answered.conditions or length < FEWEST_TOKENS:
        return []
    return [f"token {length // 2} isolated", f"token {length // 2} with the first id"]


def switch_named(sink: ModelSink, name: str, length: int) -> Switch:
    """Return the switch of this name.

    Args:
        sink: The model and its sink.
        name: The name.
        length: Number of tokens of the text.

    Raises:
        SinkscopeError: There is no such switch, or no such token in the text.
    """
    for switch in switches_of(sink):
        if switch.name == name:
            return switch
    match = MOVED.fullmatch(name)
    if match is None:
        raise SinkscopeError(f"{name!r} is no switch of this model: expected one that the page shows")
    at = int(match[1])
    if not 0 < at < length:
        raise SinkscopeError(f"{name!r}, where the text has {length} tokens: expected a token from 1 to {length - 1}")
    if match[2] != "isolated":
        return Switch(name, None, meaning=f"Token {at} carries the id of the first token.", first_at=at)
    meaning = f"Token {at} sees only itself in every layer, as the first one does."
    return Switch(name, Knockout(range(at), queries=[at]), meaning=meaning)


def switch_without(sink: ModelSink, names: Sequence[str]) -> Switch:
    """Return the switch that switches neurons and heads off.

    Raises:
        SinkscopeError: A name is no neuron and no head that the model has.
    """
    target = sink.setup.target
    neurons: list[Neuron] = []
    heads: list[Head] = []
    for name in names:
        if "H" in name.upper():
            layer, head = head_of(name)
            check_site(target, layer, head=head)
            heads.append(Head(layer, head))
        else:
            site = site_of(name)
            check_site(target, site.layer, site.neuron, site.expert)
            neurons.append(site)
    return switch_off(sink, f"without {word_list(names)}", tuple(neurons), heads)


def _off(neurons: tuple[Neuron, ...], heads: Sequence[Head]) -> Intervention:
    """Zero neurons and replace heads by their mean output."""
    edits: list[Intervention] = []
    if neurons:
        edits.append(Ablate(sites=neurons))
    if heads:
        edits.append(Ablate(heads=[(head.layer, head.head) for head in heads], value="mean"))
    return reduce(or_, edits)
