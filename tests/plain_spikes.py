"""Spikes from plain torch hooks: what `find_sinks` is held against. Nothing here is imported from the package."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from raw_kit import attention, blocks, down, inputs_edited, part
from torch import Tensor, nn

from tests.real.plain import reading

FACTOR, SAME, READS = 3.0, 0.5, 0.3


@dataclass
class Pass:
    """One pass: states before and after each layer, what each MLP adds, attention, and loss."""

    states: Tensor  # [layer + 1, text, pos, d]
    mlp: Tensor  # [layer, text, pos, d]
    attention: Tensor  # [layer, text, head, query, key]
    loss: Tensor  # [text, pos - 1]


def writer(block: nn.Module, kind: str) -> nn.Module:
    """The module whose output an MLP, attention or a mixer adds: a norm behind it, if there is one."""
    if hasattr(block, "pre_feedforward_layernorm"):
        return block.post_feedforward_layernorm if kind == "mlp" else block.post_attention_layernorm
    if kind == "mlp":
        return part(block, "mlp", "feed_forward")
    return part(block, "self_attn", "self_attention", "attn", "attention", "conv")


@torch.no_grad()
def run(model, ids: Tensor) -> Pass:
    layers = blocks(model)
    mlps = [writer(block, "mlp") for block in layers]
    with (
        reading(layers[:1], "input") as before,
        reading(layers, "output") as after,
        reading(mlps, "output") as mlp,
    ):
        logits = model(ids, use_cache=False).logits.float()
    loss = nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
    added = torch.stack([one.reshape(*ids.shape, -1) for one in mlp])
    return Pass(torch.stack([*before, *after]).float(), added.float(), attention(model, ids).float(), loss)


def received(seen: Pass) -> Tensor:
    """Attention to position 0, mean over later queries: [layer, head, text]."""
    return seen.attention[:, :, :, 1:, 0].mean(-1).transpose(1, 2)


def check_heads(model, ids: Tensor, heads: np.ndarray) -> None:
    """What a result says of each head's attention to the first token is so."""
    given = attention(model, ids).float()[:, :, :, 1:, 0].mean((1, 3))
    torch.testing.assert_close(torch.tensor(heads).float(), given, atol=1e-3, rtol=1e-3)


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


def in_texts(spike: PlainSpike, seen: Pass) -> PlainSpike:
    """The same direction and layers in other texts."""
    ordinary, after = ordinary_of(seen.states[1:]), seen.states[spike.peak + 1]
    mean = after[ordinary].mean(0)
    size = float(((after[:, 0] - mean) @ spike.direction).mean())
    return replace(spike, mean=mean, size=size, norm=float(after[:, 0].norm(dim=-1).mean()), ordinary=ordinary)


def some(seen: Pass, texts: int) -> Pass:
    """The same of the first texts."""
    return Pass(seen.states[:, :texts], seen.mlp[:, :texts], seen.attention[:, :texts], seen.loss[:texts])


def mlp_shares(seen: Pass, spike: PlainSpike) -> list[float]:
    """What each MLP adds along the direction, beyond its mean at ordinary positions."""
    along = seen.mlp @ spike.direction
    return ((along[:, :, 0].mean(1) - along[:, spike.ordinary].mean(1)) / spike.size).tolist()


@torch.no_grad()
def written_norms(model, ids: Tensor, layer: int) -> Tensor:
    """Norm of what each neuron of a layer adds, mean over all tokens; of models without a norm behind the MLP."""
    module = down(blocks(model)[layer])
    with reading([module], "input") as seen:
        model(ids, use_cache=False)
    return seen[0].abs().mean((0, 1)) * module.weight.norm(dim=0)


# --- what is edited ---


@contextmanager
def hidden_first(model, layers: Sequence[int]) -> Iterator[None]:
    """Later queries do not see the first token in some layers, by the additive mask that eager attention gets."""

    def hide(_module, args, kwargs):
        mask = kwargs["attention_mask"].clone()
        mask[:, :, 1:, 0] = torch.finfo(mask.dtype).min
        return args, {**kwargs, "attention_mask": mask}

    model.set_attn_implementation("eager")
    with ExitStack() as stack:
        for layer in layers:
            module = part(blocks(model)[layer], "self_attn")
            stack.callback(module.register_forward_pre_hook(hide, with_kwargs=True).remove)
        yield


@contextmanager
def removed(model, neurons: Sequence[tuple[int, int]], at: int | None) -> Iterator[None]:
    """Neurons give zero at one position, or everywhere (None)."""
    with ExitStack() as stack:
        for layer, neuron in neurons:

            def zero(post: Tensor, neuron: int = neuron) -> Tensor:
                post = post.clone()
                post[:, slice(None) if at is None else at, neuron] = 0
                return post

            stack.enter_context(inputs_edited(down(blocks(model)[layer]), zero))
        yield


@contextmanager
def replaced(model, ids: Tensor, name: str, ordinary: Tensor) -> Iterator[None]:
    """At the first position, the embedding, an attention layer, a mixer or an MLP writes its mean at ordinary ones."""
    kind, _, layer = name.partition(" ")
    module = blocks(model)[0] if kind == "embedding" else writer(blocks(model)[int(layer)], kind)
    with reading([module], "input" if kind == "embedding" else "output") as seen, torch.no_grad():
        model(ids, use_cache=False)
    mean = seen[0].reshape(*ids.shape, -1)[ordinary].mean(0)

    def edited(states: Tensor) -> Tensor:
        states = states.clone().reshape(len(ids), -1, states.shape[-1])
        states[:, 0] = mean
        return states

    def change(_module, _args, output):
        return (edited(output[0]), *output[1:]) if isinstance(output, tuple) else edited(output)

    if kind == "embedding":
        with inputs_edited(module, edited):
            yield
        return
    handle = module.register_forward_hook(change)
    try:
        yield
    finally:
        handle.remove()


@dataclass
class Left:
    left: float
    heads: int
    loss: float  # of tokens after the first position's own next token
    tokens: int


def readers(given: Tensor, spike: PlainSpike) -> int:
    """Heads of the layers that read a spike, of attention [layer, head, text]."""
    return int((given[spike.first + 1 : spike.last + 2].mean(-1) > READS).sum())


def left(model, ids: Tensor, spike: PlainSpike, intact: Pass, step: int = 1) -> Left:
    """What is left of a spike under the edits that act now; of every so many tokens' loss."""
    edited = run(model, ids)
    along = [spike.along(seen.states[spike.peak + 1, :, 0]).mean() for seen in (edited, intact)]
    rise = (edited.loss - intact.loss)[:, max(1, step - 1) :: step]
    return Left(float(along[0] / along[1]), readers(received(edited), spike), float(rise.mean()), rise.numel())
