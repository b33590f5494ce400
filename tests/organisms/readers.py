"""Models whose reading heads and marking heads are planted: what each head needs, and which heads mark a token.

`places.py` says what a truth is and compares it with the plain model; `marking_lost` does so for marking heads.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from .hard import Build, HardTruth, calm, hard, key_bias, kinds, spike
from .noise import NORM
from .places import Group, PlacesModel, attention_module, tokenizer_of
from .placing import flag, placed, sharpen
from .plant import MARK
from .tokens import BOS
from .views import views

READERS: dict[str, tuple[str, ...]] = {}
"""Every kind, and the families that it is built in."""
_kind = kinds(READERS, "readers ")


def readers(name: str, family: str | None = None, seed: int = 0) -> PlacesModel:
    """Build a model: the same call gives the same weights."""
    family = READERS[name][0] if family is None else family
    model = hard(f"readers {name}", family, seed)
    truth, delimiters = model.truth.about
    tokenizer = model.tokenizer
    if family != "qwen2":
        tokenizer = tokenizer_of(tokenizer, truth)
    return PlacesModel(model.model, tokenizer, truth, name, family, delimiters)


def marking(b: Build) -> tuple[int, ...]:
    """The heads of the marking layer that mark BOS."""
    group = b.plan.groups[BOS]
    return tuple(sorted(head for head, its_group, _ in b.plan.slots if its_group == group))


def names(layer: int, heads: tuple[int, ...]) -> tuple[str, ...]:
    return tuple(f"L{layer}.H{head}" for head in heads)


# --- heads that need different things -----------------------------------------------------------------------


@_kind("llama", "neox", count=1)
def _mark_half_embedding_half(b: Build) -> HardTruth:
    """Half of the heads read the mark that a head writes, half BOS's embedding; no norm stands out."""
    b.mark()
    flag(b, (BOS,))
    mark = b.read(b.later_layers, b.space.mark)
    token = b.read(b.later_layers, b.flag, other=True)
    groups = (Group(mark, names(0, marking(b))), Group(token, ("token embedding",)))
    return placed(b, spike=(), groups=groups)


@_kind("gpt2", "opt", count=1)
def _neuron_half_position_half(b: Build) -> HardTruth:
    """Half of the heads read what a neuron of layer 0 writes at BOS, half the position embedding; no norm."""
    where = flag(b, (BOS,))
    site = b.fire(0, b.spare[0], b.flag, b.side, MARK, where=where)
    b.mark()
    token = b.read(b.later_layers, b.side, where=where)
    position = b.read(b.later_layers, b.space.mark, other=True)
    groups = (Group(token, ("token embedding", site)), Group(position, ("position embedding",)))
    return placed(b, spike=(), groups=groups)


@_kind("qwen2", count=1)
def _key_bias_half_embedding_half(b: Build) -> HardTruth:
    """Some heads attend to the farthest key by a bias of their keys, others read BOS's embedding; no norm."""
    biased = key_bias(b).reading
    where = flag(b, (BOS,))
    reading = _read_with_others(b, biased, b.flag, where)
    return placed(b, spike=(), groups=(Group(biased, ("key bias",)), Group(reading, ("token embedding",))))


def _read_with_others(b: Build, taken: tuple, way: Tensor, where: Tensor) -> tuple:
    """The key heads that are not taken read `way` where it is large."""
    ratio, reading, dim = b.plan.n_heads // b.plan.n_kv, [], b.plan.slow_dim(0)
    for index in b.later_layers:
        view = b.views.layers[index]
        seen = b.probe(view.attn_norm)
        for kv in range(b.plan.n_kv):
            heads = range(kv * ratio, (kv + 1) * ratio)
            if (index, heads[0]) in taken:
                continue
            view.k[kv, dim] = way / float((seen[where] @ way).mean())
            view.k_bias[kv, dim] = 0.0
            for head in heads:
                view.q[head], view.q_bias[head] = 0.0, 0.0
                const = float((seen[:, 1:] @ b.space.const).median())
                view.q[head, dim] = 7 * b.plan.head_dim**0.5 * b.space.const / const
                reading.append((index, head))
    return tuple(reading)


@_kind("llama", "neox", count=1, layers=(7, 8))
def _marks_of_two_layers(b: Build) -> HardTruth:
    """Heads of layers 1 and 2 read a mark of layer 0; heads behind layer 3 read a mark that layer 3 writes."""
    b.mark(0, b.mark2)
    b.mark(3)
    early = b.read([1, 2], b.mark2)
    late = b.read(range(4, b.plan.n_layers), b.space.mark)
    heads = marking(b)
    return placed(b, spike=(), groups=(Group(early, names(0, heads)), Group(late, names(3, heads))))


@_kind("opt", "gpt2", count=1)
def _spike_or_embedding(b: Build) -> HardTruth:
    """Heads read the spike that the position makes, and BOS's embedding, and either is enough."""
    where = flag(b, (BOS,), b.mark2)
    b.mark()
    way = b.space.sinks[0]
    site = b.fire(b.plan.sink_layer, b.plan.neurons[0], b.space.mark, way, where=where)
    dim, reading = b.plan.slow_dim(0), b.read(b.behind, way, where=where)
    ratio = b.plan.n_heads // b.plan.n_kv
    for layer in b.behind:
        view = b.views.layers[layer]
        full = float((b.probe(view.attn_norm)[where] @ b.mark2).mean())
        for kv in {head // ratio for at, head in reading if at == layer}:
            view.k[kv, dim] += b.mark2 / full
    sharpen(b, reading, 2.0)
    groups = (Group(reading, ("spike", "token embedding"), alone=False),)
    return placed(b, makers=(frozenset({site}),), groups=groups)


# --- spikes that are not read -------------------------------------------------------------------------------


@_kind("llama", "neox", count=1, layers=(6, 8), behind=(2, 3), spike=5.0)
def _unread_spike(b: Build) -> HardTruth:
    """A neuron makes a spike of the first token that stays; heads in front of it and behind it read the mark."""
    b.mark()
    site = b.fire(b.plan.sink_layer, b.plan.neurons[0], b.space.mark, b.space.sinks[0])
    reading = b.read(b.later_layers, b.space.mark)
    groups = (Group(reading, names(0, marking(b))),)
    return placed(b, makers=(frozenset({site}),), groups=groups)


@_kind("llama", "neox", count=1, layers=(6, 8), behind=(2, 3))
def _unread_spike_alone(b: Build) -> HardTruth:
    """A neuron makes a spike of the first token, and no head attends to any place."""
    marks = b.mark()
    site = b.fire(b.plan.sink_layer, b.plan.neurons[0], b.space.mark, b.space.sinks[0])
    calm(b, marks)
    return placed(b, spike(b, marks), sink=(), makers=(frozenset({site}),), groups=())


@_kind("llama", "neox", count=1)
def _mark_of_a_delimiter(b: Build) -> HardTruth:
    """A neuron of layer 0 marks every delimiter, and heads read that mark; the first token is nothing."""
    token = b.delimiter
    where = flag(b, (token,))
    calm(b)
    site = b.fire(0, b.spare[0], b.flag, b.side, MARK, where=where)
    reading = b.read(b.later_layers, b.side, where=where)
    groups = (Group(reading, (token, site)),)
    return placed(b, sink=(token,), spike=(), groups=groups, delimiters=(token,))


# --- heads that mark ----------------------------------------------------------------------------------------


def _copied_marking_head(b: Build) -> tuple[int, int]:
    """A second head of layer 0 that does what the marking head of BOS does; both heads."""
    layer, ratio = b.views.layers[0], b.plan.n_heads // b.plan.n_kv
    (head,) = marking(b)
    other = next(one for one in range(b.plan.n_heads) if one // ratio != head // ratio)
    for rows in (layer.q, layer.o, layer.q_bias):
        if rows is not None:
            rows[other] = rows[head].clone()
    for rows in (layer.k, layer.v, layer.k_bias, layer.v_bias):
        if rows is not None:
            rows[other // ratio] = rows[head // ratio].clone()
    return head, other


def _spike_of_the_mark(b: Build, threshold: float) -> tuple:
    """A neuron whose activation a second one limits, so that any mark well above the threshold gives the same."""
    layer, way = b.plan.sink_layer, b.space.sinks[0]
    low, high = b.on(layer, b.space.mark, threshold=threshold), b.on(layer, b.space.mark, threshold=threshold + 0.15)
    size = b.size(layer)
    times = 1 / 0.15
    one = b.write(layer, b.plan.neurons[0], low, way, size * (1 - threshold) * times)
    other = b.write(layer, b.spare[0], high, -way, size * (0.85 - threshold) * times)
    return one, other


@_kind("neox", "llama", count=1)
def _either_marking_head(b: Build) -> HardTruth:
    """Two heads of layer 0 mark BOS, and the spike is as large with one of them: none is needed alone."""
    b.mark()
    both = _copied_marking_head(b)
    sites = _spike_of_the_mark(b, 0.2)
    reading = b.read(b.behind, b.space.sinks[0])
    truth = HardTruth(True, True, "spike", b.plan.sink_layer, (frozenset(sites),), reading=reading)
    return placed(b, replace(truth, marking=((0, both),)))


@_kind("neox", "llama", count=1)
def _both_marking_heads(b: Build) -> HardTruth:
    """Two heads of layer 0 mark BOS, and the spike needs both."""
    b.mark()
    both = _copied_marking_head(b)
    site = b.fire(b.plan.sink_layer, b.plan.neurons[0], b.space.mark, b.space.sinks[0])
    reading = b.read(b.behind, b.space.sinks[0])
    truth = HardTruth(True, True, "spike", b.plan.sink_layer, (frozenset({site}),), reading=reading)
    return placed(b, replace(truth, marking=((0, both),)))


@_kind("neox", "phi", count=1)
def _silent_twin(b: Build) -> HardTruth:
    """One head of layer 0 marks BOS; another attends in the same way and writes nothing."""
    b.mark()
    head, other = _copied_marking_head(b)
    b.views.layers[0].o[other] = 0.0
    site = b.fire(b.plan.sink_layer, b.plan.neurons[0], b.space.mark, b.space.sinks[0])
    reading = b.read(b.behind, b.space.sinks[0])
    truth = HardTruth(True, True, "spike", b.plan.sink_layer, (frozenset({site}),), reading=reading)
    return placed(b, replace(truth, marking=((0, (head,)),)))


@_kind("llama", "neox", count=1)
def _head_writes_the_spike(b: Build) -> HardTruth:
    """The head that marks BOS writes the spike itself; no neuron has a part in it."""
    b.mark()
    layer, (head,) = b.views.layers[0], marking(b)
    slot = next(slot for one, _, slot in b.plan.slots if one == head)
    layer.o[head, slot] += b.plan.spike * NORM * b.space.sinks[0]
    reading = b.read(b.later_layers, b.space.sinks[0])
    return placed(b, makers=(), groups=(Group(reading, names(0, (head,))),))


# --- the truth of marking heads, from the plain model -------------------------------------------------------


@torch.no_grad()
def marking_lost(m: PlacesModel, layer: int, heads: tuple[int, ...], token: int, sites: tuple) -> float:
    """Share of what neurons write together at a token that stands alone that is lost without some heads.

    The heads write there what they write on average at later positions of the texts.
    """
    seen = views(m.model)
    o_proj = _output(seen.layers[layer].block)
    n_heads = len(seen.layers[layer].q)
    kept: list[Tensor] = []
    hook = o_proj.register_forward_pre_hook(lambda _module, args: kept.append(args[0].detach()))
    m.model(m.ids(), use_cache=False)
    hook.remove()
    mean = kept[0].unflatten(-1, (n_heads, -1))[:, 1:].mean((0, 1))

    def swapped(_module, args):
        z = args[0].unflatten(-1, (n_heads, -1)).clone()
        z[:, 0, list(heads)] = mean[list(heads)]
        return (z.flatten(-2), *args[1:])

    intact = _written(m, token, sites)
    hook = o_proj.register_forward_pre_hook(swapped)
    left = _written(m, token, sites)
    hook.remove()
    return 1 - float(left @ intact / (intact @ intact))


def _output(block) -> torch.nn.Module:
    """The output projection of a block's attention."""
    attention = attention_module(block)
    return next(part for name, part in attention.named_children() if name in ("o_proj", "dense", "out_proj", "c_proj"))


def _written(m: PlacesModel, token: int, sites: tuple) -> Tensor:
    """What neurons of one layer write at a token that stands alone: the output of the MLP less that without them."""
    seen = views(m.model)
    view = seen.layers[sites[0][0]]
    outputs: list[Tensor] = []
    hook = view.mlp.register_forward_hook(
        lambda _module, _args, output: outputs.append((output[0] if isinstance(output, tuple) else output).reshape(-1))
    )
    ids = torch.tensor([[token]])
    m.model(ids, use_cache=False)
    saved = view.down.detach().clone()
    for site in sites:
        view.down[site[1] if len(site) == 3 else 0, site[-1]] = 0.0
    m.model(ids, use_cache=False)
    view.down.copy_(saved)
    hook.remove()
    return outputs[0] - outputs[1]
