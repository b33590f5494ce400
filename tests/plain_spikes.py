"""Spikes from plain torch hooks: what `find_sinks` is held against. Nothing here is imported from the package."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from organisms.hard import attentions
from raw_kit import blocks, part, zeroed
from torch import Tensor, nn

from tests.real.plain import first, reading  # noqa: F401  (beside the other views of a model)

FACTOR, SAME, READS = 3.0, 0.5, 0.3


@dataclass
class Pass:
    """One pass: states before and after each layer, what each MLP adds, attention, and loss."""

    states: Tensor  # [layer + 1, text, pos, d]
    mlp: Tensor  # [layer, text, pos, d]
    attention: list[Tensor]  # [text, head, query, key] of each layer
    loss: Tensor  # [text, pos - 1]


def adds(block) -> nn.Module:
    """The module whose output is what the MLP adds: a norm behind it, if there is one."""
    return getattr(block, "post_feedforward_layernorm", None) or part(block, "mlp")


@torch.no_grad()
def run(model, ids: Tensor) -> Pass:
    layers, kept = blocks(model), model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with (
            reading(layers[:1], "input") as before,
            reading(layers, "output") as after,
            reading(map(adds, layers), "output") as mlp,
        ):
            output = model(ids, output_attentions=True, use_cache=False)
    finally:
        model.set_attn_implementation(kept)
    mlps = [one.reshape(*ids.shape, -1) for one in mlp]
    loss = nn.functional.cross_entropy(output.logits[:, :-1].float().transpose(1, 2), ids[:, 1:], reduction="none")
    return Pass(torch.stack([*before, *after]).float(), torch.stack(mlps).float(), list(output.attentions), loss)


def received(attention: list[Tensor]) -> Tensor:
    """Attention to position 0, mean over later queries: [layer, head, text]."""
    return torch.stack([rows[:, :, 1:, 0].float().mean(-1).T for rows in attention])


@torch.no_grad()
def check_heads(model, ids: Tensor, heads: np.ndarray) -> None:
    """What a result says of each head's attention to the first token is so, where no window hides that."""
    own = attentions(model, ids).float()  # layer text head query key
    given = torch.tensor(heads).float()
    given = given[given.isfinite().any(1)]  # layers without attention are not in the model's own list
    full = own[:, :, :, -1, 0].flatten(1).min(1).values > 0
    torch.testing.assert_close(given[full], own[:, :, :, 1:, 0].mean((1, 3))[full], atol=1e-3, rtol=1e-3)


@dataclass
class PlainSpike:
    """A spike of the first token."""

    first: int
    last: int
    peak: int
    mean: Tensor
    direction: Tensor
    size: float
    norm: float
    ordinary: Tensor

    def along(self, states: Tensor) -> Tensor:
        return (states - self.mean) @ self.direction / self.size


def ratios(states: Tensor) -> Tensor:
    """Norms over the typical one of each layer, without what massive dimensions hold everywhere."""
    later = states[:, :, 1:].flatten(1, 2)
    size = later.abs().median(1).values
    massive = size > 30 * size.median(1, keepdim=True).values
    away = (states - (later.median(1).values * massive)[:, None, None]).norm(dim=-1)
    return away / away[:, :, 1:].flatten(1).median(1).values[:, None, None]


def ordinary_of(states: Tensor) -> Tensor:
    """Positions after the first at which nothing stands out."""
    ordinary = ~(ratios(states) > FACTOR).any(0)
    ordinary[:, 0] = False
    return ordinary


def spikes(seen: Pass) -> list[PlainSpike]:
    """The spikes of the first token, those of the lowest layers first."""
    states = seen.states[1:]
    ratio, ordinary = ratios(states), ordinary_of(states)
    mean = states[:, ordinary].mean(1)
    there = states[:, :, 0].mean(1) - mean
    size, unit = there.norm(dim=-1), there / there.norm(dim=-1, keepdim=True)
    free = [layer for layer in range(len(states)) if ratio[layer, :, 0].mean() > FACTOR]
    found = []
    while free:
        peak = max(free, key=lambda layer: float(size[layer]))
        run_of = {peak}
        for step in (1, -1):
            layer = peak + step
            while layer in free and unit[layer] @ unit[peak] >= SAME:
                run_of.add(layer)
                layer += step
        norm = float(states[peak, :, 0].norm(dim=-1).mean())
        found.append(
            PlainSpike(min(run_of), max(run_of), peak, mean[peak], unit[peak], float(size[peak]), norm, ordinary)
        )
        free = [layer for layer in free if layer not in run_of]
    return sorted(found, key=lambda one: one.first)


def mlp_shares(seen: Pass, spike: PlainSpike) -> list[float]:
    """What each MLP adds along the direction, beyond its mean at ordinary positions."""
    along = seen.mlp @ spike.direction
    return ((along[:, :, 0].mean(1) - along[:, spike.ordinary].mean(1)) / spike.size).tolist()


def in_texts(spike: PlainSpike, seen: Pass) -> PlainSpike:
    """The same direction and layers in other texts."""
    ordinary = ordinary_of(seen.states[1:])
    mean = seen.states[spike.peak + 1][ordinary].mean(0)
    size = float(((seen.states[spike.peak + 1][:, 0] - mean) @ spike.direction).mean())
    norm = float(seen.states[spike.peak + 1][:, 0].norm(dim=-1).mean())
    return replace(spike, mean=mean, size=size, norm=norm, ordinary=ordinary)


def some(seen: Pass, texts: int) -> Pass:
    """The same of the first texts."""
    attention = [rows[:texts] for rows in seen.attention]
    return Pass(seen.states[:, :texts], seen.mlp[:, :texts], attention, seen.loss[:texts])


@torch.no_grad()
def written_norms(model, ids: Tensor, layer: int) -> Tensor:
    """Norm of what each neuron of a layer adds, mean over all tokens; of models without a norm behind the MLP."""
    down = part(part(blocks(model)[layer], "mlp"), "down_proj")
    with reading([down], "input") as seen:
        model(ids, use_cache=False)
    return seen[0].abs().mean((0, 1)) * down.weight.norm(dim=0)


@dataclass
class Left:
    left: float
    heads: int
    loss: float  # of tokens after the first position's own next token
    tokens: int


def readers(given: Tensor, spike: PlainSpike) -> int:
    """Heads of the layers that read a spike, of attention [layer, head, text]."""
    layers = [layer for layer in range(spike.first + 1, spike.last + 2) if layer < len(given)]
    return int((given[layers].mean(-1) > READS).sum())


@contextmanager
def hidden_first(model, layers: Sequence[int]) -> Iterator[None]:
    """Later queries do not see the first token in some layers, by the additive mask that eager attention gets."""

    def hide(_module, args, kwargs):
        mask = kwargs["attention_mask"].clone()
        mask[:, :, 1:, 0] = torch.finfo(mask.dtype).min
        return args, {**kwargs, "attention_mask": mask}

    handles = []
    for layer in layers:
        module = part(blocks(model)[layer], "self_attn")
        handles.append(module.register_forward_pre_hook(hide, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def removed(model, neurons: Sequence[tuple[int, int]], at: int | None) -> Iterator[None]:
    """Neurons give zero at one position, or everywhere."""
    if at is None:
        with zeroed(model, tuple(neurons)):
            yield
        return

    def edit(numbers: list[int]):
        def zero(_module, args):
            post = args[0].clone()
            post[:, at, numbers] = 0
            return (post, *args[1:])

        return zero

    handles = []
    for layer in {layer for layer, _ in neurons}:
        down = part(part(blocks(model)[layer], "mlp"), "down_proj", "c_proj", "dense_4h_to_h")
        handles.append(down.register_forward_pre_hook(edit([neuron for own, neuron in neurons if own == layer])))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def without(
    model,
    ids: Tensor,
    spike: PlainSpike,
    neurons: Sequence[tuple[int, int]],
    at: int | None,
    step: int = 1,
    seen: Pass | None = None,
) -> Left:
    """What is left without some neurons at one position, or everywhere (None); of every so many tokens' loss.

    `seen` is the intact pass over these texts, if it is known.
    """
    intact = seen or run(model, ids)
    with removed(model, neurons, at):
        edited = run(model, ids)
    along = [spike.along(seen.states[spike.peak + 1, :, 0]).mean() for seen in (edited, intact)]
    rise = (edited.loss - intact.loss)[:, max(1, step - 1) :: step]
    heads = readers(received(edited.attention), spike)
    return Left(float(along[0] / along[1]), heads, float(rise.mean()), rise.numel())


@contextmanager
def replaced(model, name: str, place: Tensor, mean: Tensor) -> Iterator[None]:
    """At a place, the embedding, an attention layer or an MLP writes this instead."""

    def edited(states: Tensor) -> Tensor:
        return torch.where(place[..., None], mean, states)

    kind, _, layer = name.partition(" ")
    if kind == "embedding":
        handle = blocks(model)[0].register_forward_pre_hook(lambda _m, args: (edited(args[0]), *args[1:]))
    elif kind == "mlp":
        handle = adds(blocks(model)[int(layer)]).register_forward_hook(lambda _m, _a, out: edited(out))
    else:
        module = part(blocks(model)[int(layer)], "self_attn", "attn")
        handle = module.register_forward_hook(lambda _m, _a, out: (edited(out[0]), *out[1:]))
    try:
        yield
    finally:
        handle.remove()


def without_part(
    model, ids: Tensor, seen: Pass, spike: PlainSpike, name: str, at: int = 0
) -> tuple[float, tuple[int, int]]:
    """What is left where a component writes its mean over ordinary positions; heads that attend, before and after."""
    kind, _, layer = name.partition(" ")
    added = seen.states[0]
    if kind != "embedding":
        added = seen.mlp[int(layer)]
    if kind == "attention":
        added = seen.states[int(layer) + 1] - seen.states[int(layer)] - added
    place = torch.zeros_like(ids, dtype=torch.bool)
    place[:, at] = True
    with replaced(model, name, place, added[spike.ordinary].mean(0)):
        edited = run(model, ids)
    along = [spike.along(states[spike.peak + 1, :, at]).mean() for states in (edited.states, seen.states)]
    heads: list[int] = []
    for attention in (seen.attention, edited.attention):
        some = [rows[:, :, at + 1 :, at].float().mean((0, 2)) for rows in attention]
        heads.append(int((torch.stack(some[spike.first + 1 : spike.last + 2]) > READS).sum()))
    return float(along[0] / along[1]), (heads[0], heads[1])
