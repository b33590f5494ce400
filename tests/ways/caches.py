"""What a user does with a cache. Logits of all positions come back, each row where it was at the beginning."""

from __future__ import annotations

import copy
import threading
from typing import Any

import torch
import transformers as tf
from torch import Tensor

from .calls import Use
from .families import FAMILIES, LAYERS


def forward(use: Use) -> Tensor:
    with use.inside():
        return use.run(0, use.length)


def steps(use: Use, cache: Any = None) -> Tensor:
    cache = cache or use.cache()
    with use.inside():
        found = [use.run(0, use.prompt, cache)]
        for start in range(use.prompt, use.length):
            found.append(use.run(start, start + 1, cache))
    return torch.cat(found, 1)


def evicted(use: Use) -> Tensor:
    """Token by token; by plain means in one call, in which what was evicted is hidden."""
    return forward(use) if use.edits is None else steps(use)


def by_hand(use: Use) -> Tensor:
    """What the last layer gives if layers are called one by one, with what a call gives them beside."""
    layers = [FAMILIES[use.draw["family"]].block(use.model, number) for number in range(LAYERS)]
    told: list[tuple[Any, Any]] = []
    handles = []
    for layer in layers:
        keep = layer.register_forward_pre_hook(lambda _, args, kwargs: told.append((args, kwargs)), with_kwargs=True)
        handles.append(keep)
    use.run(0, use.length)
    for handle in handles:
        handle.remove()
    hidden = (*told[0][0], *told[0][1].values())[0]
    with use.inside():
        for layer, (args, kwargs) in zip(layers, told, strict=True):
            if args:
                output = layer(hidden, *args[1:], **kwargs)
            else:
                output = layer(**{**kwargs, "hidden_states": hidden})
            hidden = output[0] if isinstance(output, tuple) else output
    return hidden


def second_turn(use: Use) -> Tensor:
    """What follows the prompt is read in one call."""
    cache = use.cache()
    with use.inside():
        found = [use.run(0, use.prompt, cache)]
        if use.prompt < use.length:
            found.append(use.run(use.prompt, use.length, cache))
    return torch.cat(found, 1)


def chunks(use: Use) -> Tensor:
    cache, found = use.cache(), []
    with use.inside():
        for start in range(0, use.length, 7):
            found.append(use.run(start, min(use.length, start + 7), cache))
    return torch.cat(found, 1)


def _diverted(use: Use, cache: Any) -> None:
    """Another token than the next one comes to this cache."""
    other = copy.copy(use)
    other.ids = use.ids.flip(1).roll(1, 1)
    other.run(use.prompt, use.prompt + 1, cache)


def copied(use: Use, goes_on: int = 1) -> Tensor:
    """It goes on with a copy (or with the first one: 0), and the other with something else."""
    caches = [use.cache()]
    with use.inside():
        found = [use.run(0, use.prompt, caches[0])]
        caches.append(copy.deepcopy(caches[0]))
        _diverted(use, caches[1 - goes_on])
        for start in range(use.prompt, use.length):
            found.append(use.run(start, start + 1, caches[goes_on]))
    return torch.cat(found, 1)


def reordered(use: Use) -> Tensor:
    """After a token rows change places, as in a beam search."""
    cache, order = use.cache(), torch.arange(len(use.ids), device=use.ids.device).flip(0)
    with use.inside():
        found = [use.run(0, use.prompt, cache), use.run(use.prompt, use.prompt + 1, cache)]
        cache.reorder_cache(order)
        for start in range(use.prompt + 1, use.length):
            found.append(use.run(start, start + 1, cache, order).flip(0))
    return torch.cat(found, 1)


def repeated(use: Use) -> Tensor:
    """Each row goes on as two, which say the same."""
    cache, order = use.cache(), torch.arange(len(use.ids), device=use.ids.device).repeat_interleave(2)
    with use.inside():
        found = [use.run(0, use.prompt, cache)]
        cache.batch_repeat_interleave(2)
        for start in range(use.prompt, use.length):
            found.append(use.run(start, start + 1, cache, order)[1::2])
    return torch.cat(found, 1)


def cropped(use: Use) -> Tensor:
    """A token is taken back."""
    cache = use.cache()
    with use.inside():
        found = [use.run(0, use.prompt, cache), use.run(use.prompt, use.prompt + 1, cache)]
        other = copy.copy(use)
        other.ids = use.ids.flip(1)
        other.run(use.prompt + 1, use.prompt + 2, cache)
        cache.crop(-1)
        for start in range(use.prompt + 1, use.length):
            found.append(use.run(start, start + 1, cache))
    return torch.cat(found, 1)


def static(use: Use) -> Tensor:
    return steps(use, tf.StaticCache(config=use.model.config, max_cache_len=use.length + 8))


def gradients(use: Use) -> Tensor:
    """What the inputs do to the logits, beside these."""
    embedded: list[Tensor] = []
    me = threading.get_ident()

    def keep(_module: Any, _args: Any, output: Tensor) -> Tensor:
        if threading.get_ident() != me:
            return output
        embedded.append(output.detach().requires_grad_())
        return embedded[-1]

    hook = use.model.get_input_embeddings().register_forward_hook(keep)
    try:
        with torch.enable_grad(), use.inside():
            logits = use.run(0, use.length)
            (gradient,) = torch.autograd.grad((logits * use.mask[..., None]).tanh().sum(), embedded[-1:])
    finally:
        hook.remove()
    return torch.cat([logits.detach(), gradient], -1)
