"""The edits of a model that a view can switch on, each with the same edit of random neurons or heads as its control."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sinkscope.app.view.model_sink import ModelSink
from sinkscope.errors import SinkscopeError
from sinkscope.hooks.edit import Ablate, SinkPatch
from sinkscope.hooks.edit.base import Intervention
from sinkscope.hooks.edit.sites import head_of, site_of
from sinkscope.models.checks import check_site
from sinkscope.models.draws import draws
from sinkscope.results.notation import word_list

RANDOM = "random neurons zeroed"
"""The switch that is the control of the sink neurons."""


@dataclass(frozen=True)
class Switch:
    """An edit that can be switched on, and the edit that is its control.

    Attributes:
        name: What is edited.
        edit: The edit.
        control: The same of random neurons or heads. None if there are too few.
    """

    name: str
    edit: Intervention
    control: Intervention | None = None


def switches_of(sink: ModelSink) -> list[Switch]:
    """The edits that this model has."""
    switches: list[Switch] = []
    if sink.sinks is not None and sink.neurons:
        zeroed = switch_off(sink, "sink neurons zeroed", sink.neurons, [])
        switches.append(zeroed)
        if sink.sinks.spike is not None and sink.sinks.spike.place.is_first:
            switches.append(Switch("patched", SinkPatch.from_result(sink.sinks), zeroed.control))
        if zeroed.control is not None:
            switches.append(Switch(RANDOM, zeroed.control))
    if sink.marks:
        switches.insert(1, switch_off(sink, "marking heads replaced", [], sink.marks))
    return switches


def switch_off(
    sink: ModelSink, name: str, neurons: Sequence[tuple[int, ...]], heads: Sequence[tuple[int, int]]
) -> Switch:
    """Zero some neurons and replace some heads by their mean; the control does the same to random ones."""
    widths = [sink.setup.target.width(site[0], *site[1:-1]) for site in neurons]
    other_neurons = random_others(sink, neurons, widths)
    other_heads = random_others(sink, heads, [sink.setup.n_heads] * len(heads))
    control = None
    if len(other_neurons) == len(neurons) and len(other_heads) == len(heads):
        control = _off(other_neurons, other_heads)
    return Switch(name, _off(neurons, heads), control)


def random_others(sink: ModelSink, places: Sequence[tuple[int, ...]], widths: Sequence[int]) -> list[tuple[int, ...]]:
    """As many other neurons or heads of the same layers and experts, as far as there are any.

    Args:
        places: The neurons or heads.
        widths: How many there are where each of them is.
    """
    drawn: list[tuple[int, ...]] = []
    for place, width in zip(places, widths, strict=True):
        taken = {*places, *sink.neurons, *sink.marks, *drawn}
        generator = draws(sink.setup.seed, f"beside {place}, {len(drawn)} drawn before")
        order = torch.randperm(width, generator=generator).tolist()
        others = [(*place[:-1], number) for number in order if (*place[:-1], number) not in taken]
        drawn += others[:1]
    return drawn


def switch_named(sink: ModelSink, name: str) -> Switch:
    """The switch of this name.

    Raises:
        SinkscopeError: There is no such switch.
    """
    for switch in switches_of(sink):
        if switch.name == name:
            return switch
    raise SinkscopeError(f"{name!r} is no switch of this model: expected one that the page shows")


def switch_without(sink: ModelSink, names: Sequence[str]) -> Switch:
    """The switch that switches neurons and heads off.

    Raises:
        SinkscopeError: A name is no neuron and no head that the model has.
    """
    target = sink.setup.target
    neurons: list[tuple[int, ...]] = []
    heads: list[tuple[int, int]] = []
    for name in names:
        if "H" in name.upper():
            layer, head = head_of(name)
            check_site(target, layer, head=head)
            heads.append((layer, head))
        else:
            site = site_of(name)
            check_site(target, site.layer, site.neuron, site.expert)
            neurons.append(site.site)
    return switch_off(sink, f"without {word_list(names)}", neurons, heads)


def _off(neurons: Sequence[tuple[int, ...]], heads: Sequence[tuple[int, ...]]) -> Intervention:
    """Zero neurons and replace heads by their mean output."""
    if not heads:
        return Ablate(sites=[*neurons])
    replaced = Ablate(heads=[*heads], value="mean")
    if not neurons:
        return replaced
    return Ablate(sites=[*neurons]) | replaced
