"""Why heads read a place, from plain torch hooks: states and values. Nothing is imported from the package."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from raw_kit import blocks, part
from torch import Tensor


def plain(model, ids, mask) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """What enters each layer, and the values of each layer."""
    values, handles = [], []
    for block in blocks(model):
        module = part(block, "self_attn").get_submodule("v_proj")
        handles.append(module.register_forward_hook(lambda _m, _a, out: values.append(out)))
    added = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)[:, None]
    with torch.no_grad():
        out = model(ids, attention_mask=added, output_hidden_states=True, use_cache=False)
    for handle in handles:
        handle.remove()
    return torch.stack(out.hidden_states), values


def cosine_between(states: Tensor) -> Tensor:
    """Mean cosine between the states of all pairs of texts, by layer: `[layer text d_model]`."""
    unit = torch.nn.functional.normalize(states, dim=-1)
    pairs = torch.triu_indices(unit.shape[1], unit.shape[1], 1)
    return (unit[:, pairs[0]] * unit[:, pairs[1]]).sum(-1).mean(1)


def in_heads(model, values: list[Tensor], heads: Mapping[int, Tensor], at: Tensor) -> dict[int, list[Tensor]]:
    """Norm of a value over the typical one, by head; of keys 0 and `at`."""
    of_value, rows = {0: [], 1: []}, torch.arange(len(at))
    for layer, reading in heads.items():
        norms = values[layer].unflatten(-1, (-1, model.config.head_dim)).norm(dim=-1)
        norms = norms.repeat_interleave(len(reading) // norms.shape[2], 2)
        for head in reading.nonzero().flatten().tolist():
            for key, where in enumerate((torch.zeros_like(at), at)):
                own = norms[..., head]
                of_value[key].append(own[rows, where] / own[:, 1:].median(1).values)
    return of_value
