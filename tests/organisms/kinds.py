"""Planted sinks: the textbook case, and models in which spike and attention come apart or layers share the work.

A **spike** is a token whose residual stream has a norm far above the typical one, a **sink** one that heads attend to.
What is expected of a kind stood here before `find_sinks` saw it. Parts have the names of the JSON.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from ways.model_copies import Original

from sinkscope.results.notation import Neuron

from .planted import (
    FIRST,
    MARK,
    NORM,
    SHARPNESS,
    Body,
    Organism,
    Parts,
    Place,
    PlantedSpike,
    Site,
    Truth,
    make_plan,
    unit,
)
from .tokens import BOS, N_SPECIAL, word_tokenizer

Make = Callable[[Body], Truth]
KINDS: dict[str, tuple[Make, dict[str, Any]]] = {}
"""What plants each kind, and what its plan is not free to draw."""


def kind(**settings: Any) -> Callable[[Make], Make]:
    """Enter a kind under the name of the function that plants it."""

    def register(make: Make) -> Make:
        KINDS[make.__name__.strip("_")] = make, settings
        return make

    return register


def organism(
    family: str = "llama", seed: int = 0, *, kind: str = "sink", n_layers: int | None = None, bos: bool = True
) -> Organism:
    """Build a Llama or a Mixtral of a kind: the same call gives the same weights."""
    built, original = _built(family, seed, kind, n_layers, bos)
    return replace(built, model=original.copy(), tokenizer=word_tokenizer(built.model.config.vocab_size, bos=built.bos))


@cache
def _built(family: str, seed: int, kind: str, n_layers: int | None, bos: bool) -> tuple[Organism, Original]:
    """An organism that nobody changes, and what copies its model."""
    make, settings = KINDS[kind]
    words = f"{family} {kind} {seed} {bos}"
    settings = {"mixture": family == "mixtral", "bos": bos, "n_layers": n_layers} | settings
    b = Body(plan := make_plan(random.Random(words), **settings), words)
    with torch.no_grad():
        truth = make(b)
    truth = replace(
        truth,
        marking_layer=plan.marking_layer,
        group_heads={group: (head,) for head, group, _ in plan.slots},
        groups=plan.groups,
        repeats_expected=round(6 * plan.odds),  # a neuron is half on at .86 of the mark
    )
    tokenizer = word_tokenizer(plan.vocab, bos=plan.bos)
    return Organism(b.model, tokenizer, truth, plan.bos), Original(b.model)


def mask_of(places: tuple[Place, ...], ids: Tensor) -> Tensor:
    """The places that are described, [text, position]."""
    mask = torch.isin(ids, torch.tensor([place for place in places if place != FIRST], dtype=torch.long))
    mask[:, 0] |= FIRST in places
    return mask


# --- the tools -------------------------------------------------------------------------------------------------------


def names(*sites: Site) -> Parts:
    """The names of neurons in the JSON."""
    return frozenset(str(Neuron.of(site)) for site in sites)


def planted(b: Body, *sites: Site, **more: Any) -> PlantedSpike:
    """A spike that neurons of the sink layer write at the first token, if nothing else is said."""
    usual = {
        "first": b.at,
        "last": b.plan.n_layers - 1,
        "needs": (names(*sites),),
        "writers": (f"mlp {b.at}",),
        "marks": ("attention 0", "embedding"),
    }
    return PlantedSpike(**usual | more)


def truth_of(*spikes: PlantedSpike, **more: Any) -> Truth:
    """What is so where heads attend to all spikes and to nothing else, if nothing else is said."""
    return Truth(**{"places": tuple(spike.place for spike in spikes), "spikes": spikes} | more)


def delimiter_of(b: Body) -> int:
    return N_SPECIAL + b.rng.randrange(20)


# --- the textbook case, and what varies in it ------------------------------------------------------------------------


def textbook(b: Body) -> Truth:
    """Heads mark the first token, up to three neurons write a dimension each, and later heads read it."""
    b.mark_first()
    sizes = torch.tensor([b.rng.uniform(0.55, 0.6) for _ in b.plan.neurons])
    sizes = sizes / sizes.norm()
    axes = torch.stack([b.way, b.side, b.feature])[: len(sizes)]
    rows = b.on(b.at, b.mark)
    size = b.size(b.at)
    sites = list[Site]()
    for neuron, axis, share in zip(b.plan.neurons, axes, sizes.tolist(), strict=True):
        sites += b.write(b.at, [neuron], rows, axis, share * size)
    b.read(b.behind, sizes @ axes)
    marks = (f"attention {b.plan.marking_layer}", "embedding")
    dims = tuple(axes.argmax(1).tolist())
    spike = planted(b, *sites, marks=marks)
    return truth_of(spike, sink_layer=b.at, neurons=tuple(sites), dims=dims)


@kind()
def _sink(b: Body) -> Truth:
    return textbook(b)


@kind(late=True)
def _late_mark(b: Body) -> Truth:
    """Heads mark that are not in layer 0."""
    return textbook(b)


@kind()
def _none(b: Body) -> Truth:
    return Truth()


@kind(bos=False, share=0.4)
def _some_first_tokens(b: Body) -> Truth:
    """Two of five tokens are marked where they stand first; the others are no sinks."""
    return replace(textbook(b), share=0.4)


# --- spike and attention come apart ----------------------------------------------------------------------------------


@kind()
def _no_norm(b: Body) -> Truth:
    """Later heads read the mark of the first token itself; no norm stands out."""
    b.mark_first()
    b.read(range(1, b.plan.n_layers), b.mark)
    return Truth(places=(FIRST,))


@kind()
def _embedding_spike(b: Body) -> Truth:
    """BOS's embedding itself is the spike: no MLP makes it."""
    b.model.model.embed_tokens.weight[BOS] += b.plan.spike * NORM * b.way
    b.read(range(1, b.plan.n_layers), b.way)
    return truth_of(planted(b, needs=(frozenset({"embedding"}),), first=0, writers=("embedding",), marks=()))


@kind()
def _attention_spike(b: Body) -> Truth:
    """Heads of layer 0 write the spike of BOS themselves."""
    b.mark_first()
    own = [(head, pair) for head, group, pair in b.plan.slots if group == b.plan.groups[BOS]]
    for head, pair in own:
        b.layers[0].o[head, pair] = b.plan.spike * NORM / len(own) * b.way
    b.read(range(1, b.plan.n_layers), b.way)
    needs = (frozenset({"attention 0"}), frozenset({"embedding"}))
    return truth_of(planted(b, needs=needs, first=0, writers=("attention 0",), marks=("embedding",)))


# --- neurons share the work ------------------------------------------------------------------------------------------


@kind(count=2)
def _redundant_pair(b: Body) -> Truth:
    """Two neurons are equal."""
    b.mark_first()
    sites = b.write(b.at, b.plan.neurons, b.on(b.at, b.mark), b.way, b.size(b.at))
    b.read(b.behind, b.way)
    return truth_of(planted(b, *sites), sink_layer=b.at, neurons=tuple(sites))


@kind(count=2, layers=(7, 8), at=2)
def _backup_of_two(b: Body) -> Truth:
    """A neuron of the next layer reads the mark, which the norm hides from it unless two writers are gone."""
    b.mark_first()
    third = b.fire(b.mark, b.way, layer=3, neuron=b.plan.spare[1])
    sites = b.write(2, b.plan.neurons, b.on(2, b.mark), b.way, b.size(2))
    b.read(range(4, b.plan.n_layers), b.way)
    return truth_of(planted(b, *sites, third, backups=names(third)))


@kind(count=2, at=1, share=1.0)
def _saturated(b: Body) -> Truth:
    """The embedding and heads both mark the first token, and one suffices: of two neurons the second writes against
    the first what is more than one mark."""
    b.mark_first()
    one, two = b.plan.neurons
    b.fire(b.mark, b.way)
    layer = b.layers[b.at]
    gate, const = b.on(b.at, b.mark)
    layer.gate[0, two], layer.up[0, two] = gate - 0.3 * SHARPNESS * const, const
    layer.down[0, two] = -layer.down[0, one] + 0.1 * layer.down[0, one].norm() * b.side
    b.model.model.embed_tokens.weight[BOS] += MARK * b.mark
    b.read(b.behind, b.way)
    return truth_of(planted(b, (b.at, one), (b.at, two), marks=()))


# --- several spikes --------------------------------------------------------------------------------------------------


@kind(count=1, layers=(9, 9), at=1)
def _restart(b: Body) -> Truth:
    """A spike that an eraser ends, and that another MLP starts again."""
    b.mark_first()
    one = b.fire(b.mark, b.way)
    end = float(b.seen(b.layers[3].module) @ b.way)
    gate, _ = b.on(3, b.way)
    b.write(3, b.plan.spare[:1], (gate, unit(b.way, b.mlp_input(3))), -b.way, end, route=b.way)
    two = b.fire(b.mark, b.way, layer=5, neuron=b.plan.spare[1])
    b.read(range(2, 4), b.way)
    b.read(range(6, 9), b.way)
    early = planted(b, one, last=2, erasers=("mlp 3",))
    return truth_of(early, planted(b, two, first=5, writers=("mlp 5",)))


@kind(count=1, layers=(8, 8), at=1)
def _relay(b: Body) -> Truth:
    """A neuron writes a spike, and one of a later layer reads it and writes one four times as large in another way."""
    b.mark_first()
    one = b.fire(b.mark, b.way)
    two = b.fire(b.way, b.side, times=4, layer=4, neuron=b.plan.spare[0])
    b.read(range(2, 5), b.way)
    b.read(range(5, 8), b.side)
    marks = ("mlp 1", "attention 0", "embedding")
    late = planted(b, needs=(names(two), names(one)), first=4, writers=("mlp 4",), marks=marks)
    return truth_of(planted(b, one, last=3), late)


@kind(count=1)
def _two_delimiters(b: Body) -> Truth:
    """Two delimiters whose embeddings trip one neuron; the first token is no sink."""
    b.calm()
    two = (delimiter_of(b), delimiter_of(b) + 30)
    where = b.flag(two[0]) | b.flag(two[1], 7)
    site = b.fire(b.feature, b.side, where=where)
    b.read(b.behind, b.side, where=where)
    spikes = [planted(b, site, place=place, marks=("embedding",)) for place in two]
    return truth_of(*spikes, delimiters=two)
