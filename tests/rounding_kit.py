"""Rounding by hand, with plain torch hooks, and organisms whose planted neuron is what rounding harms."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from raw_kit import blocks
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

TIMES = 100.0


@dataclass(frozen=True, kw_only=True)
class ByHand:
    """What is rounded, and what stays exact: `tokens` by text and position."""

    activations: int | None = None
    kv: int | None = None
    scale: str = "token"
    tokens: Tensor
    neurons: Sequence[tuple[int, ...]] = ()
    layers: Sequence[int] = ()
    down: str = "mlp.down_proj"


def rounded(x: Tensor, bits: int, scale: str, tokens: Tensor, channels: Sequence[int] = ()) -> Tensor:
    """`[text pos width]` as multiples of the largest value of a token, or of all tokens of the text."""
    counted = x.abs().clone()
    counted[tokens] = 0.0
    counted[..., list(channels)] = 0.0
    largest = counted.amax(-1, keepdim=True) if scale == "token" else counted.amax((1, 2), keepdim=True)
    step = largest.clamp(min=1e-30) / (2 ** (bits - 1) - 1)
    out = (x / step).round() * step
    out[tokens] = x[tokens]
    out[..., list(channels)] = x[..., list(channels)]
    return out


@torch.no_grad()
def logs_by_hand(model: Any, ids: Tensor, how: ByHand) -> Tensor:
    """Logarithms of the next token's probabilities `[text pos vocab]`."""
    with ExitStack() as stack:
        for layer, block in enumerate(blocks(model)):
            for name, module in block.named_modules():
                if isinstance(module, nn.Linear | Conv1D) and how.activations and layer not in how.layers:
                    channels = [site[-1] for site in how.neurons if site[0] == layer and name == how.down]

                    def before(_module, args, channels=channels):
                        return (rounded(args[0], how.activations or 0, how.scale, how.tokens, channels),)

                    stack.callback(module.register_forward_pre_hook(before).remove)
                if name.endswith(("k_proj", "v_proj")) and how.kv and layer not in how.layers:

                    def after(_module, _args, out):
                        heads = out.chunk(model.config.num_key_value_heads, -1)
                        return torch.cat([rounded(one, how.kv or 0, how.scale, how.tokens) for one in heads], -1)

                    stack.callback(module.register_forward_hook(after).remove)
        return model(ids, use_cache=False).logits.log_softmax(-1)


def divergence(exact: Tensor, other: Tensor) -> Tensor:
    """Of each text, in nats, without what follows the first token."""
    return (exact.exp() * (exact - other)).sum(-1)[:, 1:].mean(1)


@torch.no_grad()
def enlarge(model: Any, sites: Sequence[tuple[int, ...]]) -> None:
    """Make the values of neurons larger and what they write with them smaller: the model computes the same.

    Rounding with a scale for all tokens then takes the rest of the layer's MLP away wherever such a neuron fires.
    """
    for layer, neuron in sites:
        mlp = blocks(model)[layer].mlp
        mlp.up_proj.weight[neuron] *= TIMES
        mlp.down_proj.weight[:, neuron] /= TIMES
