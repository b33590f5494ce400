"""Models whose sinks come about in ways that a report of the circuit gets wrong easily, with the truth beside them.

Each is built on `hard`: a body of noise in which something is planted. `lost` says what is really lost without a part,
by writing into the weights (or ids) of the plain model, with nothing of the package under test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .hard import HardModel, HardTruth, Marking, Site, _Build, read_bias, write_by_heads
from .tokens import BOS, tokenizer_for
from .views import views


@dataclass(frozen=True)
class PlantedCircuit:
    """A model, and what its circuit is.

    Attributes:
        hard: the model.
        marks: parts without which the first token's spike (or its attention, where there is no spike) is lost.
        neurons: the neurons that make the spike.
        decoys: parts that look like marks and are not.
        early: what makes a norm that stands out before the neurons.
        later: token -> the marks of its own sink.
    """

    hard: HardModel
    marks: tuple[str, ...]
    neurons: tuple[Site, ...] = ()
    decoys: tuple[str, ...] = ()
    early: tuple[str, ...] = ()
    later: dict[int, tuple[str, ...]] = field(default_factory=dict)


_MAKERS = {}
_SETTINGS = {}
CIRCUITS = {}
"""Every kind, and the families that it is built in."""


def _kind(*families: str, **settings) -> Callable[[Any], Any]:
    def register(make: Callable[[_Build], dict[str, Any]]) -> Callable[[_Build], dict[str, Any]]:
        name = make.__name__.strip("_")
        CIRCUITS[name], _MAKERS[name], _SETTINGS[name] = families, make, settings
        return make

    return register


def planted(name: str, family: str, seed: int = 0) -> PlantedCircuit:
    """Build a model: the same call gives the same weights."""
    b = _Build(f"circuit {name}", family, seed, **_SETTINGS[name])
    with torch.no_grad():
        truth = _MAKERS[name](b)
    reading = truth.pop("reading", ())
    later = {token: () for token in truth.get("later", {})}
    about = HardTruth(spike="neurons" in truth, sink=True, carried_by=None, reading=reading, later=later)
    tokenizer = tokenizer_for(b.plan.family.model_type, b.plan.vocab_size)
    return PlantedCircuit(HardModel(b.model, tokenizer, about, name, family, seed, b.plan.groups), **truth)


def _names(marking: Marking, b: _Build) -> tuple[str, ...]:
    """The heads that mark BOS."""
    group = b.plan.groups[BOS]
    own = [head for head, of_group, _ in b.plan.slots if of_group == group]
    return tuple(f"L{layer}.H{head}" for layer, heads in marking for head in sorted(own) if head in heads)


def _neuron(b: _Build, rows, way: Tensor, route: Tensor, layer: int | None = None) -> tuple[Site, ...]:
    layer = b.plan.sink_layer if layer is None else layer
    return (b.write(layer, b.plan.neurons[0], rows, way, b.size(layer), route=route),)


@_kind("neox", "qwen2")
def _key_bias(b: _Build) -> dict[str, Any]:
    return {"marks": ("key bias",), "reading": read_bias(b)}


@_kind("llama", "gemma2", "neox", "mixtral", count=1)
def _decorative_head(b: _Build) -> dict[str, Any]:
    """A head marks the first token, and nothing reads it: the neuron reads BOS's embedding."""
    marking = b.mark()
    b.flag_delimiter(BOS)
    way = b.space.sinks[0]
    neurons = _neuron(b, b.on(b.plan.sink_layer, b.flag), way, b.flag)
    reading = b.read(b.behind, way)
    return {"marks": ("token embedding",), "neurons": neurons, "decoys": _names(marking, b), "reading": reading}


@_kind("llama", "neox", "mixtral", "qwen3", odds=1e4, count=1, layers=(5, 6))
def _two_stages(b: _Build) -> dict[str, Any]:
    """Heads of layer 0 write a norm that stands out, and a neuron reads it and writes five times as much."""
    marking, way = write_by_heads(b, b.side / 4), b.space.sinks[0]
    rows = b.on(b.plan.sink_layer, b.side)
    neurons = _neuron(b, rows, way, b.side)
    heads = _names(marking, b)
    return {"marks": heads, "early": heads, "neurons": neurons, "reading": b.read(b.behind, way)}


@_kind("llama", "neox", "mixtral", odds=1e4, layers=(4, 5))
def _written_by_a_head(b: _Build) -> dict[str, Any]:
    """Heads of layer 0 write the whole spike; no MLP has a part in it."""
    marking = write_by_heads(b, b.space.sinks[0])
    return {"marks": _names(marking, b), "reading": b.read(b.later_layers, b.space.sinks[0])}


@_kind("llama", "gemma2", "neox", "gpt2", count=1)
def _two_sinks(b: _Build) -> dict[str, Any]:
    """The first token by a head (in GPT-2 by its position), a delimiter by its embedding, each with its own neuron."""
    where, layer = b.flag_delimiter(), b.plan.sink_layer
    marking, way = b.mark(), b.space.sinks[0]
    neurons = _neuron(b, b.on(layer, b.space.mark), way, b.space.mark)
    b.write(layer, b.spare[0], b.on(layer, b.flag, where), b.side, b.size(layer), where=where, route=b.flag)
    reading = b.read(b.behind, way)
    b.read(b.behind, b.side, where=where, other=True)
    marks = _names(marking, b) or ("position embedding",)
    return {"marks": marks, "neurons": neurons, "reading": reading, "later": {b.delimiter: ("token embedding",)}}


@_kind("gpt_oss", count=1)
def _logits_beside_a_neuron(b: _Build) -> dict[str, Any]:
    """Half of the later heads read the spike, the others give their attention to a learned logit."""
    marking, way = b.mark(), b.space.sinks[0]
    neurons = _neuron(b, b.on(b.plan.sink_layer, b.space.mark), way, b.space.mark)
    reading = b.read(b.behind, way)
    for index in b.behind:
        sinks = b.views.layers[index].attn_sinks
        sinks[[head for head in range(b.plan.n_heads) if (index, head) not in reading]] = 8.0
    return {"marks": _names(marking, b), "neurons": neurons, "reading": reading}


@_kind("mistral", count=1)
def _window(b: _Build) -> dict[str, Any]:
    """Queries see 24 positions, so most of a text of 64 tokens does not see the first one."""
    marking, way = b.mark(), b.space.sinks[0]
    neurons = _neuron(b, b.on(b.plan.sink_layer, b.space.mark), way, b.space.mark)
    reading = b.read(b.behind, way)
    b.model.config.sliding_window = 24
    return {"marks": _names(marking, b), "neurons": neurons, "reading": reading}


@_kind("gpt2")
def _idle_key_bias(b: _Build) -> dict[str, Any]:
    """Large biases of keys in a fused projection; without rotary they shift all scores alike and carry nothing."""
    b.mark()
    for layer in b.views.layers:
        layer.k_bias += 2.0
    reading = b.read(b.later_layers, b.space.mark)
    return {"marks": ("position embedding",), "decoys": ("key bias",), "reading": reading}


@_kind("llama", "neox", count=2)
def _half_each(b: _Build) -> dict[str, Any]:
    """Two neurons of one layer write half of the spike each."""
    marking, way = b.mark(), b.space.sinks[0]
    source, other = b.plan.neurons
    rows, size = b.on(b.plan.sink_layer, b.space.mark), b.size(b.plan.sink_layer)
    one = b.write(b.plan.sink_layer, source, rows, way, size / 2)
    two = b.copy(b.plan.sink_layer, source, other)
    return {"marks": _names(marking, b), "neurons": (one, two), "reading": b.read(b.behind, way)}


# --- the truth, from the weights -----------------------------------------------------------------------------------


def lost(circuit: PlantedCircuit, parts: tuple[str | Site, ...], at: int = 0, ids: Tensor | None = None) -> float:
    """Share of the effect that is really lost without some parts, from the plain model with other weights or ids.

    The effect is the largest norm at the position over the layers, or the attention of the planted reading heads to it
    if there is no spike. A head writes nothing; a token or position embedding is that of a typical position.
    """
    h = circuit.hard
    ids = h.natural(2, 20) if ids is None else ids
    before = _effect(circuit, ids, at)
    changed = ids.clone()
    if "token embedding" in parts:
        changed[:, at] = ids[:, 11]
    with _without(h, tuple(part for part in parts if part != "token embedding"), at):
        return 1 - _effect(circuit, changed, at) / before


@torch.no_grad()
def _effect(circuit: PlantedCircuit, ids: Tensor, at: int) -> float:
    h = circuit.hard
    usual = h.model.config._attn_implementation
    h.model.set_attn_implementation("eager")
    out = h.model(ids, output_attentions=True, output_hidden_states=True, use_cache=False)
    h.model.set_attn_implementation(usual)
    if h.truth.spike or h.name == "written_by_a_head":
        norms = torch.stack([hidden.norm(dim=-1) for hidden in out.hidden_states[1:-1]])  # the last one is normed
        return float(norms[:, :, at].amax(0).mean() - norms[:, :, 11].amax(0).mean())
    rows = [out.attentions[layer][:, head, at + 1 :, at].mean() for layer, head in h.truth.reading]
    return float(torch.stack(rows).mean())


@contextmanager
def _without(h: HardModel, parts: tuple[str | Site, ...], at: int) -> Iterator[None]:
    seen = views(h.model)
    tensors = []
    for part in parts:
        if part == "position embedding":
            tensors.append(seen.positions[at])
        elif part == "key bias":
            tensors += [layer.k_bias for layer in seen.layers if layer.k_bias is not None]
        elif isinstance(part, str):
            layer, head = part[1:].split(".H")
            tensors.append(seen.layers[int(layer)].o[int(head)])
        else:
            tensors.append(seen.layers[part[0]].down[part[1] if len(part) == 3 else 0, part[-1]])
    saved = [tensor.detach().clone() for tensor in tensors]
    with torch.no_grad():
        for tensor in tensors:
            tensor.zero_()
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, values in zip(tensors, saved, strict=True):
                tensor.copy_(values)
