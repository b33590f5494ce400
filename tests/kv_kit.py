"""What the tests of the cache share: prompts, runs step by step, and attention under a given mask.

The reference never sees a cache: one pass over the whole sequence with stock modules, in which every layer, row and kv
head has its own bool mask query x key (`conformance.masked`).
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from organisms.tiny import tiny_model
from torch import Tensor
from transformers import AttentionInterface, DynamicCache

from sinkscope.conformance.masked import attending, plain_logits, positions_of, window_of
from sinkscope.engine.step import TokenPositions
from sinkscope.hooks.edit.base import Intervention
from sinkscope.kv.cache import CacheLayer
from sinkscope.opening.load import target_of


def model_of(family: str, **overrides):
    model = tiny_model(family, **overrides)[0]
    model.generation_config.pad_token_id = model.config.pad_token_id
    model.generation_config.eos_token_id = None  # random models: let every row go on to the end
    return model


def shallow_of(family: str, **overrides):
    """`model_of` with two layers: each kind of attention once, and a cache that depends on what another one lacks."""
    if family == "gemma3_text":
        overrides = {"layer_types": ["sliding_attention", "full_attention"], **overrides}
    return model_of(family, **{"num_hidden_layers": 2, **overrides})


def prompts(lengths: list[int], total: int | None = None, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random ids, left-padded to the longest, and their mask; with `total`, so many more columns of real tokens."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    columns = torch.arange(width + (total or 0))
    ids = torch.randint(5, 96, (len(lengths), len(columns)), generator=generator)
    mask = (columns >= width - torch.tensor(lengths)[:, None]).long()
    return ids * mask, mask


@torch.no_grad()
def attended(model, ids: Tensor, mask: Tensor, sees: dict[int, Tensor]) -> list[tuple[Tensor, Tensor, Tensor, float]]:
    """Queries, keys and values `[row head pos d_head]` of every layer, and its scaling, in a pass under masks."""
    found = []
    with attending(model, sees):
        name = model.config._attn_implementation
        attend = AttentionInterface()[name]

        def keep(module, query: Tensor, key: Tensor, value: Tensor, *rest, **kwargs):
            found.append((query, key, value, kwargs["scaling"]))
            return attend(module, query, key, value, *rest, **kwargs)

        AttentionInterface.register(name, keep)
        model(input_ids=ids, attention_mask=mask, position_ids=positions_of(mask), use_cache=False)
    return found


def beside_ids(model, mask: Tensor, part: slice) -> dict[str, Any]:
    """What a model is called with beside its ids; some take no positions."""
    given = {"attention_mask": mask[:, : part.stop]}
    if "position_ids" in signature(model.base_model.forward).parameters:
        given["position_ids"] = positions_of(mask)[:, part]
    return given


@torch.no_grad()
def decode(
    model,
    ids: Tensor,
    mask: Tensor,
    prompt: int,
    cache=None,
    chunks: list[int] | None = None,
    after: Callable[[int], None] | None = None,
) -> Tensor:
    """Logits from the last prompt token on: the prompt (in chunks of these lengths), then token by token.

    After each call, `after` is told how many columns were read.
    """
    cache = DynamicCache(config=model.config) if cache is None else cache
    at, total = cache.get_seq_length(), ids.shape[1]
    logits = []
    for step in [*([prompt - at] if chunks is None else chunks), *[1] * (total - prompt)]:
        part = slice(at, at + step)
        at += step
        given = beside_ids(model, mask, part)
        out = model(input_ids=ids[:, part], past_key_values=cache, use_cache=True, **given)
        if at >= prompt:
            logits.append(out.logits[:, -1])
        if after is not None:
            after(at)
    return torch.stack(logits, 1)


def logits_of(model, row: Tensor, sees: Tensor) -> Tensor:
    """Logits of a stock pass over an unpadded row, in which query i of all layers and heads sees the keys `sees[i]`."""
    target = target_of(model)
    shown = dict.fromkeys(range(target.n_layers), sees.expand(1, target.n_kv_heads, -1, -1))
    return plain_logits(target.hf, row[None], torch.ones_like(row)[None], shown)[0]


def close(a: Tensor, b: Tensor, atol: float = 1e-5):
    """Equal up to rounding, on the scale of the numbers themselves (random models reach logits of tens)."""
    torch.testing.assert_close(a, b, atol=atol * max(1.0, float(b.abs().max())), rtol=0)


def read_columns(layer, mask: Tensor) -> Tensor:
    rows, columns = mask.shape
    pad = (mask == 0).sum(1)[:, None, None]
    at = torch.where(layer.pos >= 0, layer.pos + pad, columns)
    found = torch.zeros(rows, at.shape[1], columns + 1, dtype=torch.bool)
    return found.scatter(2, at, True)[..., :columns]


def run_policy(
    policy: Intervention, model, ids: Tensor, mask: Tensor, prompt: int, chunks: list[int] | None = None
) -> tuple[Tensor, list[list[Tensor]]]:
    """Logits from the last prompt token on, and what each step read: bool `[step][layer][batch kv_head column]`."""
    kept, cache = [], DynamicCache(config=model.config)

    def keep(end: int):
        if end > prompt:
            kept.append([read_columns(layer, mask) for layer in cache.layers if isinstance(layer, CacheLayer)])

    with policy.on(model):
        logits = decode(model, ids, mask, prompt, cache, chunks, after=keep)
    return logits, kept


def masks_of_run(model, kept: list[list[Tensor]], mask: Tensor, prompt: int) -> dict[int, Tensor]:
    """What each query may see if those after the prompt see what `run_policy` says, by the layers that attend."""
    target, total = target_of(model), mask.shape[1]
    causal = torch.ones(total, total, dtype=torch.bool).tril()
    layers = {}
    for layer, steps in zip(target.attending, zip(*kept, strict=True), strict=True):
        sees = (causal & mask.bool()[:, None, None]).repeat(1, steps[0].shape[1], 1, 1)
        sees[:, :, prompt:] = torch.stack(steps, 2)
        if (window := window_of(target.hf.config, layer)) is not None:
            sees &= ~causal.tril(-window)
        layers[layer] = sees
    return layers


def allocated_slots(layer: Any) -> int:
    """Slots in memory: those in use, and room for new tokens."""
    return layer.keys.shape[-2] if layer.room is None else layer.room.keys.shape[-2]


def append(layer: Any, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Append tokens to a layer, all of which are real, as a call does inside a block."""
    columns = torch.arange(layer.seen + keys.shape[-2])
    layer.upcoming = TokenPositions.of(columns.expand(len(keys), -1))
    return layer.update(keys, values)
