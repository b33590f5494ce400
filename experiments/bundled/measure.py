"""Measurements of a trained model: loss, norms, sink heads. Everything in float32."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from transformers import LlamaForCausalLM

from experiments.bundled.training import loss_on
from sinkscope.hooks.trace import attention_rows, trace
from sinkscope.opening.live import target_of

EPS = 0.3


@torch.no_grad()
def validation_loss(model: LlamaForCausalLM, windows: np.ndarray) -> float:
    total = 0
    for part in _chunks(windows, 8):
        total += float(loss_on(model, torch.from_numpy(part))) * len(part)
    return total / len(windows)


def _chunks(array: np.ndarray, size: int) -> Iterator[np.ndarray]:
    return (array[i : i + size] for i in range(0, len(array), size))


def norms_by_layer(model: LlamaForCausalLM, ids: np.ndarray) -> dict[str, list[float]]:
    """First-token norm (mean over texts) and the median and 5 to 95 % of all others, per layer."""
    norms = torch.stack([*trace(model, ids.tolist(), "blocks.*.hook_resid_post", "norm").values()]).numpy()
    first = norms[:, :, 0].mean(1)
    low, middle, high = np.quantile(norms[:, :, 1:].reshape(len(norms), -1), (0.05, 0.5, 0.95), axis=1)
    return {
        "first_token_norm": first.tolist(),
        "typical_norm": middle.tolist(),
        "typical_5_percent": low.tolist(),
        "typical_95_percent": high.tolist(),
        "ratio": (first / middle).tolist(),
    }


def first_token_attention(
    model: LlamaForCausalLM, ids: np.ndarray, *, skip_first: bool
) -> Float[np.ndarray, "text layer head"]:
    """Mean attention paid to position 0; `skip_first`: without position 0's own."""
    target = target_of(model)
    rows: list[Tensor] = []
    for part in _chunks(ids, 4):
        found = torch.zeros(len(part), target.n_layers, target.n_heads)

        def see(layer: int, _first: int, probs: Tensor, found: Tensor = found) -> None:
            found[:, layer] = probs[:, :, int(skip_first) :, 0].float().mean(-1)

        with attention_rows(target, see, rows_per_chunk=ids.shape[1]):
            target.forward(torch.from_numpy(part))
        rows.append(found)
    return torch.cat(rows).numpy()


def sink_heads(model: LlamaForCausalLM, ids: np.ndarray) -> Bool[np.ndarray, "layer head"]:
    """The heads whose mean first-token attention is above 0.3."""
    return first_token_attention(model, ids, skip_first=True).mean(0) > EPS


def sink_rate(model: LlamaForCausalLM, ids: np.ndarray) -> float:
    """Gu et al.: share of (layer, head) whose first-token attention, position 0 included, exceeds 0.3; text mean."""
    return float((first_token_attention(model, ids, skip_first=False) > EPS).mean())


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
