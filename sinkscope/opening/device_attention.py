"""Eager attention where that of PyTorch is wrong on a device: at the last token of a row, which measurements read."""

from __future__ import annotations

import torch
from torch.nn import functional

from sinkscope.models.target import Target
from sinkscope.tap.internals import set_attention
from sinkscope.tap.stock import configs_of, stock_name

_LENGTH = 65  # the kernel takes 32 or 64 queries at a time, so that one is left


def misreads_last_query(device: torch.device) -> bool:
    """Return whether SDPA shows the last query only the first key, where query heads share one head of keys.

    PyTorch's memory-efficient attention takes the first row of the mask if a single query is left for a program
    (pytorch/pytorch#191937; seen with 2.11 on an H100). The device is asked, and not the version.
    """
    mask = torch.ones(1, 1, _LENGTH, _LENGTH, dtype=torch.bool, device=device).tril()
    for dtype in (torch.float32, torch.bfloat16):
        query = torch.zeros(1, 2, _LENGTH, 64, dtype=dtype, device=device)
        key = query[:, :1].expand_as(query)
        value = torch.linspace(0, 1, _LENGTH, dtype=dtype, device=device)[:, None].repeat(1, 64).expand_as(query)
        mean = functional.scaled_dot_product_attention(query, key, value, mask)[0, :, -1]
        if bool((mean - 0.5).abs().max() > 0.1):
            return True
    return False


def is_misread(target: Target) -> bool:
    """Return whether a model runs with an attention that is wrong at the last token of a row on its device."""
    shares_one = target.n_heads > 1 and target.n_kv_heads <= target.shards.size
    return shares_one and stock_name(target.config) == "sdpa" and misreads_last_query(target.device)


def avoid_misreading(target: Target) -> None:
    """Let a model that was just opened attend eagerly if its attention is wrong on its device."""
    if is_misread(target):
        for config in configs_of(target):
            set_attention(config, "eager")
