"""Models with spikes of other kinds than those that `find_sinks` was written on, and what is so in each.

What is expected stood here before `find_sinks` and `circuit` saw one of them. Parts have the names of the JSON.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from sinkscope.results.parts import Neuron

from .build import SECOND, Build, HardTruth, Parts, PlantedSpike, Site, kinds
from .hard import calm
from .noise import NORM
from .plant import MARK
from .tokens import BOS

BLIND: dict[str, tuple[str, ...]] = {}
"""Every kind, and the families that it is built in."""
_kind = kinds(BLIND, "blind ")


def names(*sites: Site) -> Parts:
    """The names of neurons in the JSON."""
    return frozenset(str(Neuron.of(site)) for site in sites)


def marks_of(b: Build) -> tuple[str, ...]:
    """What marks the first token after `Build.mark`: heads that read the embedding, or positions of the embedding."""
    return ("attention 0", "embedding") if b.plan.by_heads else ("embedding",)


def planted(b: Build, *sites: Site, **more) -> PlantedSpike:
    """A spike that neurons of the sink layer write at the first token, if nothing else is said."""
    usual = {
        "first": b.at,
        "last": b.plan.n_layers - 1,
        "needs": (names(*sites),),
        "writers": (f"mlp {b.at}",),
        "marks": marks_of(b),
    }
    return PlantedSpike(**usual | more)


def truth_of(*spikes: PlantedSpike, **more) -> HardTruth:
    return HardTruth(planted=spikes, **more)


@_kind("llama", "mistral", count=1)
def _shared_neuron(b: Build) -> HardTruth:
    """BOS and a delimiter have one feature, and one neuron makes one spike of both."""
    where = b.flag(BOS) | b.flag(b.delimiter)
    site = b.fire(b.feature, b.side, where=where)
    calm(b)
    reading = b.read(b.behind, b.side, where=where)
    for layer, head in reading:  # one query sees a few of these places, which share its attention
        b.views.layers[layer].q[head] *= 1.3
    return truth_of(planted(b, site, marks=("embedding",)), at_delimiter(b, site), delimiters=(b.delimiter,))


def at_delimiter(b: Build, site: Site) -> PlantedSpike:
    """The spike of one neuron at the delimiter, which the embedding marks."""
    return planted(b, site, place=b.delimiter, marks=("embedding",))


def second_writer(b: Build, layer: int, first: int, share: float, way: Tensor) -> Site:
    """A neuron that reads the mark in a later layer as if the first writer of `way` were not there."""
    before = b.const(layer)  # as long as nothing is written yet
    rows = b.surgeon.on(layer, b.space.mark)
    size = b.surgeon.size(first)
    one = b.fire(b.space.mark, way, (1 - share) * size, layer=first)
    rows = b.surgeon.on(layer, b.space.mark)
    # What the first writer writes shrinks the rest of the token in the norm of this layer: read it as it was before.
    seen = b.surgeon.mlp_input(layer)
    shrunk = seen @ b.space.const / before
    gate, up = (shrunk * row + (1 - shrunk) * (seen @ row) * way / (seen @ way) for row in rows)
    rows = gate, up
    b.write(rows, way, share * size, layer=layer, neuron=b.spare[1], route=b.space.mark)
    return one


@_kind("qwen3", "llama", count=1, layers=(8, 8), at=2)
def _split_writer(b: Build) -> HardTruth:
    """Two MLPs, two layers apart, write 60 and 40 % of one spike; without one the other is left."""
    b.mark()
    one = second_writer(b, 4, 2, 0.4, b.way)
    b.read(range(5, b.plan.n_layers), b.way)
    return truth_of(planted(b, one, b.site(4, b.spare[1]), writers=("mlp 2", "mlp 4")))


@_kind("mistral", "gpt2", count=1, layers=(9, 9), at=1)
def _restart(b: Build) -> HardTruth:
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
def _backup_of_two(b: Build) -> HardTruth:
    """A neuron of the next layer reads the mark, which the norm hides from it unless two writers are gone."""
    b.mark()
    third = b.fire(b.space.mark, b.way, layer=3, neuron=b.spare[1])
    rows = [b.surgeon.on(2, b.space.mark)] * 2
    b.surgeon.write(2, b.plan.neurons, rows, [b.way] * 2, [0.5, 0.5], b.surgeon.size(2))
    b.read(range(4, b.plan.n_layers), b.way)
    return truth_of(planted(b, *b.sites(), third, backups=names(third)))


@_kind("gpt2", count=1)
def _second_position(b: Build) -> HardTruth:
    """The second position is marked, whatever stands there."""
    b.views.positions[1] += MARK * b.space.mark
    where = torch.zeros_like(b.tokens, dtype=torch.bool)
    where[:, 1] = True
    calm(b)
    site = b.fire(b.space.mark, b.way, where=where)
    b.read(b.behind, b.way, where=where)
    return truth_of(planted(b, site, place=SECOND))


@_kind("neox", "qwen3", count=1)
def _separator_beside_first(b: Build) -> HardTruth:
    """A delimiter has a spike; other heads read the embedding of BOS, whose norm does not stand out."""
    where = b.flag(b.delimiter)
    b.views.embed[BOS] += MARK * b.side / b.plan.embed_scale
    calm(b)
    site = b.fire(b.feature, b.way, where=where)
    b.read(b.later_layers, b.side)
    b.read(b.behind, b.way, where=where, other=True)
    return truth_of(at_delimiter(b, site), delimiters=(b.delimiter,))


@_kind("qwen2", "mixtral")
def _two_reasons(b: Build) -> HardTruth:
    """No spike: some heads read the mark that heads put on the first token, others BOS's own embedding."""
    b.mark()
    b.flag(BOS)
    b.read(b.later_layers, b.space.mark)
    b.read(b.later_layers, b.feature, other=True)
    return HardTruth()


@_kind("mixtral", "qwen3_moe", count=1)
def _two_experts(b: Build) -> HardTruth:
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


@_kind("qwen3_moe", "mixtral", count=1)
def _expert_each(b: Build) -> HardTruth:
    """The first token and a delimiter have one direction, written by neurons of two experts."""
    where = b.flag(b.delimiter)
    b.mark()
    one = b.fire(b.space.mark, b.way)
    b.plan = replace(b.plan, expert=(b.plan.expert + 1) % b.plan.family.experts)
    two = b.fire(b.feature, b.way, neuron=b.spare[0], where=where)
    b.read(b.behind, b.way)
    return truth_of(planted(b, one), at_delimiter(b, two), delimiters=(b.delimiter,))


@_kind("llama", "neox", count=1, layers=(7, 8), at=3)
def _halves_of_mark(b: Build) -> HardTruth:
    """Heads of two layers write half of the mark each; the neuron needs both."""
    b.mark()
    for head, _, slot in b.plan.slots:
        b.views.layers[0].o[head, slot] *= 0.5
    b.plan = replace(b.plan, marking_layer=1)
    b.mark()
    for head, _, slot in b.plan.slots:
        b.views.layers[1].o[head, slot] *= 0.5
    b.plan = replace(b.plan, marking_layer=0)
    site = b.fire(b.space.mark, b.way)
    b.read(b.behind, b.way)
    marks = ("attention 0", "attention 1", "embedding")
    return truth_of(planted(b, site, marks=marks))


@_kind("llama", "qwen2", count=2)
def _saturated(b: Build) -> HardTruth:
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
def _attention_spike(b: Build) -> HardTruth:
    """Heads of layer 0 write the spike of BOS themselves."""
    b.mark()
    own = [(head, slot) for head, group, slot in b.plan.slots if group == b.plan.groups[BOS]]
    for head, slot in own:
        b.views.layers[0].o[head, slot] = b.plan.spike * NORM / len(own) * b.way
    b.read(b.later_layers, b.way)
    needs = (frozenset({"attention 0"}), frozenset({"embedding"}))
    return truth_of(planted(b, needs=needs, first=0, writers=("attention 0",), marks=("embedding",)))


@_kind("neox", "llama", count=1, at=0)
def _first_mlp(b: Build) -> HardTruth:
    """The first MLP makes the spike of BOS from its embedding."""
    b.flag(BOS)
    site = b.fire(b.feature, b.way)
    b.read(b.behind, b.way)
    return truth_of(planted(b, site, marks=("embedding",)))


@_kind("gpt2")
def _position_spike(b: Build) -> HardTruth:
    """The embedding of position 0 is the spike."""
    b.views.positions[0] += b.plan.spike * NORM * b.way
    b.read(b.later_layers, b.way)
    return truth_of(planted(b, needs=(frozenset({"embedding"}),), first=0, writers=("embedding",)))


@_kind("gpt2", "qwen3", count=12)
def _many_small(b: Build) -> HardTruth:
    """Twelve neurons write a twelfth each: no few neurons are needed, their MLP is."""
    b.mark()
    rows, n = b.surgeon.on(b.at, b.space.mark), len(b.plan.neurons)
    b.surgeon.write(b.at, b.plan.neurons, [rows] * n, [b.way] * n, [1 / n] * n, b.surgeon.size(b.at))
    b.read(b.behind, b.way)
    needs = (frozenset({f"mlp {b.at}"}),)
    return truth_of(planted(b, needs=needs))


@_kind("qwen2", "gpt2", count=2)
def _opposed(b: Build) -> HardTruth:
    """One neuron writes 150 % of the spike, another of its layer half of it against it."""
    b.mark()
    rows = [b.surgeon.on(b.at, b.space.mark)] * 2
    b.surgeon.write(b.at, b.plan.neurons, rows, [b.way] * 2, [1.5, -0.5], b.surgeon.size(b.at))
    b.read(b.behind, b.way)
    needs = (names(*b.sites()), frozenset({f"mlp {b.at}"}))
    return truth_of(planted(b, needs=needs))


@_kind("gemma2", "llama", count=1, layers=(8, 8), at=2)
def _partly_erased(b: Build) -> HardTruth:
    """A later MLP takes a third of the spike away, and the rest stays."""
    b.mark()
    site = b.fire(b.space.mark, b.way)
    gate, _ = b.surgeon.on(5, b.way)
    size = float(b.surgeon.seen(b.views.layers[5].block) @ b.way)
    b.write((gate, b.full(5, b.way)), -b.way, size / 3, layer=5, neuron=b.spare[0], route=b.way)
    b.read(b.behind, b.way)
    return truth_of(planted(b, site, erasers=("mlp 5",)))


@_kind("llama", "gpt2", count=1, layers=(8, 8), at=1)
def _relay(b: Build) -> HardTruth:
    """A neuron writes a spike, and one of a later layer reads it and writes one four times as large in another way."""
    b.mark()
    one = b.fire(b.space.mark, b.way)
    two = b.fire(b.way, b.side, 4 * b.surgeon.size(1), layer=4, neuron=b.spare[0])
    b.read(range(2, 5), b.way)
    b.read(range(5, 8), b.side)
    needs, marks = (names(two), names(one)), ("mlp 1", *marks_of(b))
    late = planted(b, needs=needs, first=4, writers=("mlp 4",), marks=marks)
    return truth_of(planted(b, one, last=3), late)


@_kind("qwen3", "neox", count=1, layers=(6, 6), at=5)
def _last_layer(b: Build) -> HardTruth:
    """The last layer makes the spike: no head can read it."""
    b.mark()
    site = b.fire(b.space.mark, b.way)
    calm(b, marked=True)
    return truth_of(planted(b, site))


@_kind("llama", "neox", count=1, spike=1.2)
def _massive_delimiter(b: Build) -> HardTruth:
    """A dimension is massive on every token, and a delimiter has a spike beside it."""
    b.surgeon.make_massive()
    where = b.flag(b.delimiter)
    calm(b)
    site = b.fire(b.feature, b.side, where=where)
    b.read(b.behind, b.side, where=where)
    return truth_of(at_delimiter(b, site), delimiters=(b.delimiter,))


@_kind("llama", "gpt2", count=2)
def _two_marks(b: Build) -> HardTruth:
    """One neuron reads what heads (in GPT-2 the position) write, the other a feature of BOS; each writes half."""
    b.mark()
    b.flag(BOS)
    size = b.surgeon.size(b.at) / 2
    one = b.fire(b.space.mark, b.way, size)
    gate, up = b.surgeon.on(b.at, b.feature)
    two = b.write((gate, up), b.way, size, neuron=b.plan.neurons[1])
    b.read(b.behind, b.way)
    marks = () if b.plan.by_heads else ("embedding",)
    return truth_of(planted(b, one, two, marks=marks))


@_kind("gpt2", count=1)
def _two_positions(b: Build) -> HardTruth:
    """The first two positions are marked, and one neuron makes one spike of both."""
    b.views.positions[:2] += MARK * b.space.mark
    where = torch.zeros_like(b.tokens, dtype=torch.bool)
    where[:, :2] = True
    calm(b, marked=True)
    site = b.fire(b.space.mark, b.way, where=where)
    b.read(b.behind, b.way, where=where)
    return truth_of(planted(b, site), planted(b, site, place=SECOND))


@_kind("qwen3", "neox", count=1, spike=4.5)
def _small_spike(b: Build) -> HardTruth:
    """A norm of four times the typical one, which heads read."""
    b.mark()
    site = b.fire(b.space.mark, b.way)
    b.read(b.behind, b.way)
    return truth_of(planted(b, site))


@_kind("mistral", "mixtral", count=3)
def _thirds(b: Build) -> HardTruth:
    """Three neurons write a third each: without any two, a third is left, which is more than a quarter."""
    b.mark()
    rows = [b.surgeon.on(b.at, b.space.mark)] * 3
    b.surgeon.write(b.at, b.plan.neurons, rows, [b.way] * 3, [1 / 3] * 3, b.surgeon.size(b.at))
    b.read(b.behind, b.way)
    return truth_of(planted(b, *b.sites()))


@_kind("gpt_oss", count=1)
def _spike_and_learned(b: Build) -> HardTruth:
    """Some heads read the spike, others of the same layers give their attention to a learned logit."""
    b.mark()
    site = b.fire(b.space.mark, b.way)
    reading = b.read(b.behind, b.way)
    for index in b.behind:
        for head in range(b.plan.n_heads):
            if (index, head) not in reading:
                b.views.layers[index].attn_sinks[head] = 8.0
    return truth_of(planted(b, site))


@_kind("qwen2", "llama", count=1)
def _half_embedded(b: Build) -> HardTruth:
    """The embedding of BOS has a spike, and a neuron that reads it writes as much once more along it."""
    size = b.plan.spike * NORM / 2
    b.views.embed[BOS] += size * b.way / b.plan.embed_scale
    b.fire(b.way, b.way, size)
    needs, writers = (frozenset({"embedding"}),), ("embedding", f"mlp {b.at}")
    b.read(b.behind, b.way)
    return truth_of(planted(b, needs=needs, first=0, writers=writers, marks=("embedding",)))
