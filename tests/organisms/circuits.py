"""Models whose sinks come about in ways that a report of the circuit gets wrong easily, with the truth beside them.

Each is built on `hard`: a body of noise in which something is planted. `lost` says what is really lost without a part,
by writing into the weights (or ids) of the plain model, with nothing of the package under test.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from .hard import (
    Build,
    HardModel,
    HardTruth,
    Marking,
    Site,
    attention_spike,
    attentions,
    hard,
    key_bias,
    kinds,
    read_by_later,
    sink,
    write_by_heads,
)
from .tokens import BOS
from .views import filled, weights_of

CIRCUITS = {}
"""Every kind, and the families that it is built in."""
_kind = kinds(CIRCUITS, "circuit ")


@dataclass(frozen=True)
class Marks:
    """What the circuit of a model is.

    Attributes:
        marks: parts without which the first token's spike (or its attention, where there is no spike) is lost.
        decoys: parts that look like marks and are not.
        later: token -> the marks of its own sink.
    """

    marks: tuple[str, ...]
    decoys: tuple[str, ...] = ()
    later: dict[int, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class PlantedCircuit(Marks):
    """A model, what its circuit is, and the neurons that make the spike."""

    hard: HardModel = field(kw_only=True)
    neurons: tuple[Site, ...] = field(kw_only=True)


def planted(name: str, family: str, seed: int = 0) -> PlantedCircuit:
    """Build a model: the same call gives the same weights."""
    model = hard(f"circuit {name}", family, seed)
    neurons = tuple(site for sites in model.truth.sets for site in sorted(sites))
    return PlantedCircuit(**vars(model.truth.about), hard=model, neurons=neurons)


def _heads(b: Build, marking: Marking) -> tuple[str, ...]:
    """The heads that mark BOS."""
    group = b.plan.groups[BOS]
    own = [head for head, of_group, _ in b.plan.slots if of_group == group]
    return tuple(f"L{layer}.H{head}" for layer, heads in marking for head in sorted(own) if head in heads)


def _marked(b: Build) -> HardTruth:
    """Heads mark the first token, in GPT-2 its position does; one neuron makes the spike."""
    marking, layer, way = b.begin()
    b.fire(layer, b.plan.neurons[0], b.space.mark, way)
    return sink(b, way, marking, about=Marks(_heads(b, marking) or ("position embedding",)))


@_kind("neox", "qwen2")
def _key_bias(b: Build) -> HardTruth:
    return replace(key_bias(b), about=Marks(("key bias",)))


@_kind("llama", "gemma2", "neox", "mixtral", count=1)
def _decorative_head(b: Build) -> HardTruth:
    """A head marks the first token, and nothing reads it: the neuron reads BOS's embedding."""
    marking, layer, way = b.begin()
    b.flag_delimiter(BOS)
    b.fire(layer, b.plan.neurons[0], b.flag, way)
    return sink(b, way, marking, about=Marks(("token embedding",), decoys=_heads(b, marking)))


@_kind("llama", "neox", "mixtral", "qwen3", odds=1e4, count=1, layers=(5, 6))
def _two_stages(b: Build) -> HardTruth:
    """Heads of layer 0 write a norm that stands out, and a neuron reads it and writes five times as much."""
    marking, way = write_by_heads(b, b.side / 4), b.space.sinks[0]
    b.fire(b.plan.sink_layer, b.plan.neurons[0], b.side, way)
    return sink(b, way, marking, about=Marks(_heads(b, marking)))


@_kind("llama", "neox", "mixtral", odds=1e4, layers=(4, 5))
def _written_by_a_head(b: Build) -> HardTruth:
    truth = attention_spike(b)
    return replace(truth, about=Marks(_heads(b, truth.marking)))


@_kind("llama", "gemma2", "neox", "gpt2", count=1)
def _two_sinks(b: Build) -> HardTruth:
    """The first token by a head (in GPT-2 by its position), a delimiter by its embedding, each with its own neuron."""
    where, (marking, layer, way) = b.flag_delimiter(), b.begin()
    b.fire(layer, b.plan.neurons[0], b.space.mark, way)
    site = b.fire(layer, b.spare[0], b.flag, b.side, where=where)
    about = Marks(_heads(b, marking) or ("position embedding",), later={b.delimiter: ("token embedding",)})
    truth = sink(b, way, marking, later={b.delimiter: (site,)}, about=about)
    b.read(b.behind, b.side, where=where, other=True)
    return truth


@_kind("gpt_oss", count=1)
def _logits_beside_a_neuron(b: Build) -> HardTruth:
    """Half of the later heads read the spike, the others give their attention to a learned logit."""
    truth = _marked(b)
    for index in b.behind:
        sinks = b.views.layers[index].attn_sinks
        sinks[[head for head in range(b.plan.n_heads) if (index, head) not in truth.reading]] = 8.0
    return truth


@_kind("mistral", count=1)
def _window(b: Build) -> HardTruth:
    """Queries see 24 positions, so most of a text of 64 tokens does not see the first one."""
    truth = _marked(b)
    b.model.config.sliding_window = 24
    return truth


@_kind("gpt2")
def _idle_key_bias(b: Build) -> HardTruth:
    """Large biases of keys in a fused projection; without rotary they shift all scores alike and carry nothing."""
    b.mark()
    for layer in b.views.layers:
        layer.k_bias += 2.0
    about = Marks(("position embedding",), decoys=("key bias",))
    return read_by_later(b, "position embedding", b.space.mark, about=about)


@_kind("llama", "neox", count=2)
def _half_each(b: Build) -> HardTruth:
    """Two neurons of one layer write half of the spike each."""
    marking, layer, way = b.begin()
    source, other = b.plan.neurons
    b.fire(layer, source, b.space.mark, way, b.size(layer) / 2)
    b.copy(source, other)
    return sink(b, way, marking, about=Marks(_heads(b, marking)))


# --- the truth, from the weights -----------------------------------------------------------------------------------


def lost(circuit: PlantedCircuit, parts: tuple[str | Site, ...], at: int = 0, ids: Tensor | None = None) -> float:
    """Share of the effect that is really lost without some parts, from the plain model with other weights or ids.

    The effect is the largest norm at the position over the layers, or the attention of the planted reading heads to it
    if there is no spike. A head writes nothing; a token or position embedding is that of a typical position.
    """
    h = circuit.hard
    ids = h.natural(2, 20) if ids is None else ids
    before = _effect(h, ids, at)
    changed = ids.clone()
    if "token embedding" in parts:
        changed[:, at] = ids[:, 11]
    tensors = [tensor for part in parts for tensor in weights_of(h.model, part, at)]
    with filled(tensors):
        return 1 - _effect(h, changed, at) / before


@torch.no_grad()
def _effect(h: HardModel, ids: Tensor, at: int) -> float:
    if h.truth.spike:
        hidden = h.model(ids, output_hidden_states=True, use_cache=False).hidden_states
        norms = torch.stack([states.norm(dim=-1) for states in hidden[1:-1]]).amax(0)  # the last one is normed
        return float((norms[:, at] - norms[:, 11]).mean())
    received = attentions(h.model, ids)[:, :, :, at + 1 :, at].mean((1, 3))
    return float(torch.stack([received[place] for place in h.truth.reading]).mean())
