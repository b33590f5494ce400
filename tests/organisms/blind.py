"""Models with spikes of other kinds than those that `find_sinks` was written on, and what is so in each.

What is expected stood here before `find_sinks` and `circuit` saw one of them. Parts have the names of the JSON.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from sinkscope.results.notation import Neuron

from .build import HardBuild, kinds
from .hard import calm
from .noise import NORM
from .organism import SECOND, Parts, PlantedSpike, Site, Truth
from .plant import MARK
from .tokens import BOS

BLIND: dict[str, tuple[str, ...]] = {}
"""Every kind, and the families that it is built in."""
_kind = kinds(BLIND, "blind ")


def names(*sites: Site) -> Parts:
    """The names of neurons in the JSON."""
    return frozenset(str(Neuron.of(site)) for site in sites)


def marks_of(b: HardBuild) -> tuple[str, ...]:
    """What marks the first token after `Build.mark`: heads that read the embedding, or positions of the embedding."""
    return ("attention 0", "embedding") if b.plan.by_heads else ("embedding",)


def planted(b: HardBuild, *sites: Site, **more) -> PlantedSpike:
    """A spike that neurons of the sink layer write at the first token, if nothing else is said."""
    usual = {
        "first": b.at,
        "last": b.plan.n_layers - 1,
        "needs": (names(*sites),),
        "writers": (f"mlp {b.at}",),
        "marks": marks_of(b),
    }
    return PlantedSpike(**usual | more)


def truth_of(*spikes: PlantedSpike, **more) -> Truth:
    return Truth(planted=spikes, **more)


@_kind("mistral", "gpt2", count=1, layers=(9, 9), at=1)
def _restart(b: HardBuild) -> Truth:
    """A spike that an eraser ends, and that another MLP starts again."""
    b.mark()
    one = b.fire(b.space.mark, b.way)
    b.take_away(3)
    two = b.fire(b.space.mark, b.way, b.surgeon.size(5), layer=5, neuron=b.spare[1])
    b.read(range(2, 4), b.way)
    b.read(range(6, 9), b.way)
    early = planted(b, one, last=2, erasers=("mlp 3",))
    return truth_of(early, planted(b, two, first=5, writers=("mlp 5",)))


@_kind("llama", "gpt2", count=2, layers=(7, 8), at=2)
def _backup_of_two(b: HardBuild) -> Truth:
    """A neuron of the next layer reads the mark, which the norm hides from it unless two writers are gone."""
    b.mark()
    third = b.fire(b.space.mark, b.way, layer=3, neuron=b.spare[1])
    rows = [b.surgeon.on(2, b.space.mark)] * 2
    b.surgeon.write(2, b.plan.neurons, rows, [b.way] * 2, [0.5, 0.5], b.surgeon.size(2))
    b.read(range(4, b.plan.n_layers), b.way)
    return truth_of(planted(b, *b.sites(), third, backups=names(third)))


@_kind("gpt2", count=1)
def _second_position(b: HardBuild) -> Truth:
    """The second position is marked, whatever stands there."""
    b.views.positions[1] += MARK * b.space.mark
    where = torch.zeros_like(b.tokens, dtype=torch.bool)
    where[:, 1] = True
    calm(b)
    site = b.fire(b.space.mark, b.way, where=where)
    b.read(b.behind, b.way, where=where)
    return truth_of(planted(b, site, place=SECOND))


@_kind("mixtral", "qwen3_moe", count=1)
def _two_experts(b: HardBuild) -> Truth:
    """The first token goes to two experts, and a neuron of each writes about half of the spike."""
    b.mark()
    size, experts = b.surgeon.size(b.at), (b.plan.expert, (b.plan.expert + 1) % b.plan.family.experts)
    sites = []
    for expert in experts:
        b.plan = replace(b.plan, expert=expert)
        sites.append(b.fire(b.space.mark, b.way, size / 2))
    columns = [b.views.layers[b.at].down[site[1], site[2]] for site in sites]
    parts = []
    for _column, other in (columns, columns[::-1]):
        kept = other.clone()
        other.zero_()
        parts.append(float(b.surgeon.seen(b.views.layers[b.at].mlp) @ b.way))
        other.copy_(kept)
    for column, part in zip(columns, parts, strict=True):
        column.mul_(0.5 * size / part)
    b.read(b.behind, b.way)
    return truth_of(planted(b, *sites))


@_kind("llama", "qwen2", count=2)
def _saturated(b: HardBuild) -> Truth:
    """The embedding and heads both mark the first token, and one suffices: of two neurons the second writes against
    the first what is more than one mark."""
    b.mark()
    one, two = b.plan.neurons
    b.fire(b.space.mark, b.way)
    layer, expert = b.views.layers[b.at], b.plan.expert
    gate, up = b.surgeon.on(b.at, b.space.mark)
    const = b.space.const / (b.surgeon.mlp_input(b.at) @ b.space.const)
    b.surgeon.set_neuron(layer, two, gate - 0.3 * b.plan.sharpness * const, up)
    layer.down[expert, two] = -layer.down[expert, one]
    b.views.embed[BOS] += MARK * b.space.mark / b.plan.embed_scale
    b.read(b.behind, b.way)
    needs = names(*b.sites()), frozenset({f"mlp {b.at}"})
    return truth_of(planted(b, needs=needs, marks=()))


@_kind("mistral", "qwen3", count=1)
def _attention_spike(b: HardBuild) -> Truth:
    """Heads of layer 0 write the spike of BOS themselves."""
    b.mark()
    own = [(head, slot) for head, group, slot in b.plan.slots if group == b.plan.groups[BOS]]
    for head, slot in own:
        b.views.layers[0].o[head, slot] = b.plan.spike * NORM / len(own) * b.way
    b.read(b.later_layers, b.way)
    needs = (frozenset({"attention 0"}), frozenset({"embedding"}))
    return truth_of(planted(b, needs=needs, first=0, writers=("attention 0",), marks=("embedding",)))


@_kind("gpt2", "qwen3", count=12)
def _many_small(b: HardBuild) -> Truth:
    """Twelve neurons write a twelfth each: all of them are needed, and no few."""
    b.mark()
    rows, n = b.surgeon.on(b.at, b.space.mark), len(b.plan.neurons)
    b.surgeon.write(b.at, b.plan.neurons, [rows] * n, [b.way] * n, [1 / n] * n, b.surgeon.size(b.at))
    b.read(b.behind, b.way)
    return truth_of(planted(b, *((b.at, neuron) for neuron in b.plan.neurons)))


@_kind("llama", "gpt2", count=1, layers=(8, 8), at=1)
def _relay(b: HardBuild) -> Truth:
    """A neuron writes a spike, and one of a later layer reads it and writes one four times as large in another way."""
    b.mark()
    one = b.fire(b.space.mark, b.way)
    two = b.fire(b.way, b.side, 4 * b.surgeon.size(1), layer=4, neuron=b.spare[0])
    b.read(range(2, 5), b.way)
    b.read(range(5, 8), b.side)
    needs, marks = (names(two), names(one)), ("mlp 1", *marks_of(b))
    late = planted(b, needs=needs, first=4, writers=("mlp 4",), marks=marks)
    return truth_of(planted(b, one, last=3), late)


@_kind("mistral", "mixtral", count=3)
def _thirds(b: HardBuild) -> Truth:
    """Three neurons write a third each: without any two, a third is left, which is more than a quarter."""
    b.mark()
    rows = [b.surgeon.on(b.at, b.space.mark)] * 3
    b.surgeon.write(b.at, b.plan.neurons, rows, [b.way] * 3, [1 / 3] * 3, b.surgeon.size(b.at))
    b.read(b.behind, b.way)
    return truth_of(planted(b, *b.sites()))
