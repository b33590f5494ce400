"""A small random model of a configuration, from which an adapter is inferred in place of a large one."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from sinkscope.models.config import cut_depth, new_model

_TOKENS = 64  # in its vocabulary
_WIDE = 20_000_000  # numbers in a layer, from which on a narrow model takes its place
_NARROW_STREAM = 128  # smallest width of the residual stream of a narrow model
_NARROW_MLP = 96  # fewest neurons of its MLPs and experts
_EXPERTS = 16  # most experts of its mixtures
_MLP_WIDTHS = ("intermediate", "ffn_dim", "n_inner", "ffn_hidden")  # parts of the names of settings
_KV_HEADS = ("num_key_value_heads", "num_kv_heads")
_COUNTS_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def is_wide(hf: Any, layers: list[nn.Module]) -> bool:
    """Whether passes through a layer of a model take long."""
    return max(sum(parameter.numel() for parameter in layer.parameters()) for layer in layers) > _WIDE


def sample_of(hf: Any, depth: int, *, is_narrow: bool = False) -> Any:
    """A random model of a model's configuration, in float32.

    Args:
        hf: The model.
        depth: Number of its layers; at least two are made.
        is_narrow: Whether widths and experts are fewer, too. Ratios of heads to kv heads and the width of a head stay.
    """
    config = copy.deepcopy(hf.config)
    text = config.get_text_config()
    cut_depth(text, max(depth, 2))
    text.vocab_size, text.pad_token_id = _TOKENS, 0
    if is_narrow:
        _narrow(text)
    with torch.random.fork_rng(devices=[]):
        return new_model(config).float().eval().requires_grad_(False)


def has_same_parts(layers: Iterable[nn.Module], others: Iterable[nn.Module]) -> bool:
    """Whether layers have modules and parameters of the same names and classes, whatever their sizes."""
    pairs = zip(layers, others, strict=False)
    return all(_parts(one) == _parts(other) for one, other in pairs)


def _parts(layer: nn.Module) -> list[Any]:
    modules = [(path, type(module)) for path, module in layer.named_modules()]
    return [modules, [name for name, _ in layer.named_parameters()]]


def _narrow(text: Any) -> None:
    """Make a text configuration narrow."""
    heads, d_model = text.num_attention_heads, text.hidden_size
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    d_head = getattr(text, "head_dim", None)
    step = 1
    while _can_halve(heads, kv_heads, d_model, 2 * step):
        step *= 2
    text.hidden_size, text.num_attention_heads = d_model // step, heads // step
    for name in _KV_HEADS:
        if getattr(text, name, None):
            setattr(text, name, max(1, getattr(text, name) // step))
    if d_head is not None:
        text.head_dim = d_head
    for name, value in text.to_dict().items():
        if not isinstance(value, int) or isinstance(value, bool):
            continue
        if any(part in name for part in _MLP_WIDTHS):
            while value % 2 == 0 and value // 2 >= _NARROW_MLP:
                value //= 2
            setattr(text, name, value)
        elif name in _COUNTS_OF_EXPERTS and (getattr(text, "n_group", None) or 1) == 1:
            setattr(text, name, min(value, _EXPERTS))


def _can_halve(heads: int, kv_heads: int, d_model: int, step: int) -> bool:
    """Whether sizes can be divided, so that two heads are left."""
    divides = heads % step == 0 and d_model % (2 * step) == 0 and (kv_heads == 1 or kv_heads % step == 0)
    return divides and heads // step >= 2 and d_model // step >= _NARROW_STREAM
