"""Why heads read a place, from plain torch hooks: states, values and scores. Nothing is imported from the package."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from raw_kit import blocks, part
from torch import Tensor


def rotated(x, width: int, base: float) -> torch.Tensor:
    """Queries or keys after rotary, `[text head pos width]`."""
    x = x.unflatten(-1, (-1, width)).transpose(1, 2)
    angle = torch.arange(x.shape[2])[:, None] * base ** (-torch.arange(0, width, 2) / width)
    cos, sin = torch.cat([angle, angle], -1).cos(), torch.cat([angle, angle], -1).sin()
    turned = torch.cat([-x[..., width // 2 :], x[..., : width // 2]], -1)
    return x * cos + turned * sin


def plain(model, ids, mask) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    """What enters each layer, scores before the softmax, and the values of each layer."""
    read, handles = {"q_proj": [], "k_proj": [], "v_proj": []}, []
    for block in blocks(model):
        for name, outputs in read.items():
            module = part(block, "self_attn").get_submodule(name)
            handles.append(module.register_forward_hook(lambda _m, _a, out, outputs=outputs: outputs.append(out)))
    added = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)[:, None]
    with torch.no_grad():
        out = model(ids, attention_mask=added, output_hidden_states=True, use_cache=False)
    for handle in handles:
        handle.remove()
    width, base = model.config.head_dim, model.config.rope_parameters["rope_theta"]
    scores = []
    for query, key in zip(read["q_proj"], read["k_proj"], strict=True):
        query, key = rotated(query, width, base), rotated(key, width, base)
        scores.append(query @ key.repeat_interleave(query.shape[1] // key.shape[1], 1).mT / width**0.5)
    return torch.stack(out.hidden_states), scores, read["v_proj"]


def cosine_between(states: Tensor) -> Tensor:
    """Mean cosine between the states of all pairs of texts, by layer: `[layer text d_model]`."""
    unit = torch.nn.functional.normalize(states, dim=-1)
    pairs = torch.triu_indices(unit.shape[1], unit.shape[1], 1)
    return (unit[:, pairs[0]] * unit[:, pairs[1]]).sum(-1).mean(1)


def in_heads(
    model, scores: list[Tensor], values: list[Tensor], heads: Mapping[int, Tensor], at: Tensor, begin: int
) -> tuple[dict[int, list[Tensor]], dict[int, list[Tensor]]]:
    """Norm of a value over the typical one, and what all queries share of a score, by head; of keys 0 and `at`."""
    of_value, of_score = {0: [], 1: []}, {0: [], 1: []}
    texts, length = values[0].shape[:2]
    rows = torch.arange(texts)
    for layer, reading in heads.items():
        norms = values[layer].unflatten(-1, (-1, model.config.head_dim)).norm(dim=-1)
        norms = norms.repeat_interleave(len(reading) // norms.shape[2], 2)
        for head in reading.nonzero().flatten().tolist():
            for key, where in enumerate((torch.zeros_like(at), at)):
                own = norms[..., head]
                of_value[key].append(own[rows, where] / own[:, 1:].median(1).values)
                above = torch.zeros(texts, length - begin)
                for query in range(begin, length):
                    seen = scores[layer][:, head, query, : query + 1]
                    others = seen[:, 1:].sum(1) - torch.where(where > 0, seen[rows, where], 0)
                    above[:, query - begin] = seen[rows, where] - others / (query - (where > 0).int())
                of_score[key].append(above.mean(1) ** 2 / (above**2).mean(1))
    return of_value, of_score
