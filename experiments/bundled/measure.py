"""Measurements of a trained model: loss, norms, sink heads, repetitions, loops. Everything in float32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from experiments.bundled.training import loss_on
from experiments.record import Row


@torch.no_grad()
def validation_loss(model: LlamaForCausalLM, windows: np.ndarray, rows: int = 8) -> float:
    total = 0
    for part in _chunks(windows, rows):
        total += float(loss_on(model, torch.from_numpy(part))) * len(part)
    return total / len(windows)


def _chunks(array: np.ndarray, size: int) -> Iterator[np.ndarray]:
    return (array[i : i + size] for i in range(0, len(array), size))


@contextmanager
def residual_norms(model: LlamaForCausalLM) -> Iterator[list[Tensor]]:
    """Collect the norm at every position after each layer (a layer's own output: not after the final norm)."""
    norms: list[Tensor] = []

    def keep(_module: object, _args: object, output: Tensor | tuple[Tensor, ...]) -> None:
        hidden = output
        if isinstance(output, tuple):
            hidden = output[0]
        norms.append(hidden.float().norm(dim=-1))

    handles = []
    for layer in model.model.layers:
        handles.append(layer.register_forward_hook(keep))
    try:
        yield norms
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def norms_by_layer(model: LlamaForCausalLM, ids: np.ndarray) -> dict[str, list[float]]:
    """First-token norm (mean over texts) and the median and 5 to 95 % of all others, per layer."""
    with residual_norms(model) as norms:
        model.model(torch.from_numpy(ids), use_cache=False)
    first = []
    for n in norms:
        first.append(float(n[:, 0].mean()))
    typical = []
    for n in norms:
        typical.append(float(n[:, 1:].median()))
    ratio = []
    for a, b in zip(first, typical, strict=True):
        ratio.append(a / b)
    typical_5_percent = []
    for each in norms:
        typical_5_percent.append(float(each[:, 1:].quantile(0.05)))
    typical_95_percent = []
    for each in norms:
        typical_95_percent.append(float(each[:, 1:].quantile(0.95)))
    return {
        "first_token_norm": first,
        "typical_norm": typical,
        "typical_5_percent": typical_5_percent,
        "typical_95_percent": typical_95_percent,
        "ratio": ratio,
    }


@contextmanager
def eager(model: LlamaForCausalLM) -> Iterator[None]:
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@torch.no_grad()
def first_token_attention(model: LlamaForCausalLM, ids: np.ndarray, *, skip_first: bool) -> np.ndarray:
    """Mean attention paid to position 0, as [text, layer, head]; `skip_first`: without position 0's own."""
    rows = []
    with eager(model):
        for part in _chunks(ids, 4):
            out = model.model(torch.from_numpy(part), use_cache=False, output_attentions=True)
            start = 0
            if skip_first:
                start = 1
            rows.append(torch.stack([a[:, :, start:, 0].float().mean(-1) for a in out.attentions], dim=1).numpy())
    return np.concatenate(rows)


def head_share(model: LlamaForCausalLM, ids: np.ndarray, *, after: int, above: float = 0.3) -> float:
    """Share of the heads after a layer whose mean first-token attention is above 0.3."""
    mean = first_token_attention(model, ids, skip_first=True).mean(0)
    return float((mean[after + 1 :] > above).mean())


def sink_rate(model: LlamaForCausalLM, ids: np.ndarray, eps: float = 0.3) -> float:
    """Gu et al.: share of (layer, head) whose first-token attention, position 0 included, exceeds eps; text mean."""
    return float((first_token_attention(model, ids, skip_first=False) > eps).mean())


@torch.no_grad()
def repeats(model: LlamaForCausalLM, token: int, *, bos_id: int, layer: int, most: int) -> int | None:
    """Repetitions of a token after BOS until its norm after a layer reaches half of BOS's; None if it never does."""
    count = min(512, most)
    while True:
        # The model is causal: the first n repetitions of a longer pass are those of a shorter one.
        with residual_norms(model) as norms, _first_layers(model, layer + 1):
            model.model(torch.tensor([[bos_id] + [token] * count]), use_cache=False)
        reached = (norms[layer][0, 1:] >= 0.5 * norms[layer][0, 0]).nonzero()
        if len(reached):
            return int(reached[0]) + 1
        if count == most:
            return None
        count = min(2 * count, most)


@contextmanager
def _first_layers(model: LlamaForCausalLM, count: int) -> Iterator[None]:
    """Run only so many layers: what comes later does not change the norms asked for."""
    before = model.config.num_hidden_layers
    model.config.num_hidden_layers = count
    try:
        yield
    finally:
        model.config.num_hidden_layers = before


def repeats_of_many(model: LlamaForCausalLM, tokens: list[int], *, bos_id: int, layer: int, most: int) -> Row:
    found = {}
    for token in tokens:
        found[token] = repeats(model, token, bos_id=bos_id, layer=layer, most=most)
    reached = []
    for n in found.values():
        if n is not None:
            reached.append(n)
    values = []
    for each in found.values():
        values.append(np.inf if each is None else each)
    median = float(np.median(values))
    median_of_reached = None
    if reached:
        median_of_reached = float(np.median(reached))
    by_token = {}
    for k, v in found.items():
        by_token[str(k)] = v
    return {
        "tokens": len(tokens),
        "median": median if np.isfinite(median) else None,
        "median_of_reached": median_of_reached,
        "smallest": min(reached, default=None),
        "largest": max(reached, default=None),
        "unreached": len(tokens) - len(reached),
        "max_repeats": most,
        "by_token": by_token,
    }


@torch.no_grad()
def generate(
    model: LlamaForCausalLM, prompts: np.ndarray, count: int, eos_id: int, *, temperature: float = 0.0, seed: int = 0
) -> list[list[int]]:
    """Continue prompts of one length, with the cache; a row ends at its EOS. Greedy unless there is a temperature."""
    ids = torch.from_numpy(prompts)
    generator = torch.Generator().manual_seed(seed)
    produced: list[list[int]] = [[] for _ in prompts]
    alive = np.ones(len(prompts), dtype=bool)
    cache = None
    for _ in range(count):
        out = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = out.past_key_values
        logits = out.logits[:, -1].float()
        if temperature:
            ids = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        else:
            ids = logits.argmax(-1, keepdim=True)
        for row, token in enumerate(ids[:, 0].tolist()):
            alive[row] &= token != eos_id
            if alive[row]:
                produced[row].append(token)
        if not alive.any():
            break
    return produced


@contextmanager
def zeroed(model: LlamaForCausalLM, layer: int, neuron: int) -> Iterator[None]:
    """Take one neuron out: its entry in the input of the down projection becomes zero."""

    def cut(_module: object, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden = args[0].clone()
        hidden[..., neuron] = 0.0
        return (hidden,)

    handle = model.model.layers[layer].mlp.down_proj.register_forward_pre_hook(cut)
    try:
        yield
    finally:
        handle.remove()


@torch.no_grad()
def ablation(model: LlamaForCausalLM, ids: np.ndarray, layer: int, neuron: int, *, draws: int = 20) -> dict[str, float]:
    """How much of the first token's norm goes with the neuron, and at most with any of 20 drawn at random."""
    ids = ids[:, :2]  # the first token sees nothing else; one more for the typical norm
    intact = norms_by_layer(model, ids)["first_token_norm"][layer]

    def drop(which: int) -> float:
        with zeroed(model, layer, which):
            return 1 - norms_by_layer(model, ids)["first_token_norm"][layer] / intact

    others = np.setdiff1d(np.arange(model.config.intermediate_size), [neuron])
    control = np.random.default_rng(0).choice(others, size=draws, replace=False)
    values = []
    for n in control:
        values.append(drop(int(n)))
    return {"ablation_drop": drop(neuron), "control_drop": max(values)}


@torch.no_grad()
def loss_by_position(model: LlamaForCausalLM, windows: np.ndarray, edges: tuple[int, ...]) -> dict[str, float]:
    """Mean loss of the predictions made at positions between the edges."""
    sums = np.zeros(windows.shape[1] - 1)
    for part in _chunks(windows, 1):
        ids = torch.from_numpy(part)
        logits = model(ids, use_cache=False).logits[0, :-1]
        sums += torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none").numpy()
    mean = sums / len(windows)
    values = {}
    for a, b in zip((1, *edges[:-1]), edges, strict=True):
        values[f"{a}-{b}"] = float(mean[a:b].mean())
    return values
