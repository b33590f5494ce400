"""Cache policies done the slow way: stock models, the whole query x key matrix, no cache at all.

A token that a policy evicted is a column of the mask that later queries of that layer and kv head do not see. So a run
is one long sequence that is computed again for every token, with a mask per layer, row and kv head, and every policy
is a function of the attention matrix so far. Nothing here comes from the package.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from kv_kit import one_pass, window_of
from torch import Tensor

# (probs [batch kv_head group query key], held [batch kv_head key], real [batch key], budget per row) -> keep
Choose = Callable[[Tensor, Tensor, Tensor, list[int]], Tensor]


@dataclass
class Reference:
    """kept[step][layer]: bool `[batch kv_head column]` before decoded token `step`; logits `[batch step vocab]`."""

    kept: list[list[Tensor]]
    logits: Tensor


@torch.no_grad()
def dense_run(
    model,
    ids: Tensor,
    prompt: int,
    budgets: list[int],
    choose: Choose,
    real: Tensor | None = None,
    every: int | None = 1,
) -> Reference:
    """Feed `ids` `[batch token]`: `prompt` tokens at once, the others one by one, evicting before each of them.

    Args:
        model: stock.
        ids: prompt, padded on the left, and the tokens that follow.
        prompt: columns of the prompt.
        budgets: per row, in tokens.
        choose: the policy.
        real: `[batch prompt]`, 0 at padding.
        every: evict before the first decoded token and then before every n-th; None: only before the first.
    """
    batch, total = ids.shape
    real = torch.ones(batch, prompt) if real is None else real
    mask = torch.cat([real.bool(), torch.ones(batch, total - prompt, dtype=torch.bool)], 1)
    heads, kv_heads = model.config.num_attention_heads, getattr(model.config, "num_key_value_heads", None)
    kv_heads = kv_heads or heads
    sees, held = [], []
    for layer in range(model.config.num_hidden_layers):
        causal = torch.ones(total, total, dtype=torch.bool).tril()
        if (window := window_of(model, layer)) is not None:
            causal &= ~causal.tril(-window)
        sees.append((causal & mask[:, None, None, :]).expand(batch, kv_heads, total, total).clone())
        held.append(mask[:, None].expand(batch, kv_heads, total).clone())
    kept, logits = [], []
    for now in range(prompt, total):
        part = ids[:, :now], mask[:, :now].long(), [s[..., :now, :now] for s in sees]
        out = one_pass(model, *part, output_attentions=True)
        logits.append(out.logits[:, -1])
        due = now == prompt or (every is not None and (now - prompt) % every == 0)
        for i, probs in enumerate(out.attentions):
            if due:
                grouped = probs.float().unflatten(1, (kv_heads, heads // kv_heads))
                held[i][..., :now] &= choose(grouped, held[i][..., :now], mask[:, :now], budgets)
            later = sees[i][:, :, now:, :now]
            later &= held[i][:, :, None, :now]
        kept.append([h[..., :now].clone() for h in held])
    logits.append(one_pass(model, ids, mask.long(), sees).logits[:, -1])
    return Reference(kept, torch.stack(logits, 1))


def pick(scores: Tensor, held: Tensor, budgets: list[int], first: int = 0, last: list[int] | None = None) -> Tensor:
    """Per row and kv head: the first and last held tokens, then the best scores, together `budget` tokens.

    Loops over everything, in plain Python. Of equal scores the later token stays.
    """
    keep = torch.zeros_like(held)
    for row, budget in enumerate(budgets):
        for head in range(held.shape[1]):
            there = held[row, head].nonzero().flatten().tolist()
            recent = last[row] if last else 0
            sure = {*there[:first], *there[max(0, len(there) - recent) :]}
            rest = [i for i in there if i not in sure]
            rest.sort(key=lambda i: (-float(scores[row, head, i]), -i))
            keep[row, head, [*sure, *rest[: max(0, budget - len(sure))]]] = True
    return keep


def streaming_llm(sinks: int = 4) -> Choose:
    """Xiao et al. 2023, section 3.2: the first tokens and the most recent ones."""

    def choose(_probs: Tensor, held: Tensor, _real: Tensor, budgets: list[int]) -> Tensor:
        return pick(torch.zeros(held.shape), held, budgets, sinks)

    return choose


def h2o(reduce: str = "mean", recent: float = 0.5, first: int = 0) -> Choose:
    """Zhang et al. 2023, algorithm 1: summed attention, and recent tokens."""

    def choose(probs: Tensor, held: Tensor, real: Tensor, budgets: list[int]) -> Tensor:
        # Query by query: what a query could not see has zero in its row; padding queries do not count.
        scores = (per_group(probs, reduce) * real[:, None, :, None]).sum(-2)
        return pick(scores, held, budgets, first, [int(budget * recent) for budget in budgets])

    return choose


def tova(first: int = 0, last: int = 0) -> Choose:
    """Oren et al. 2024, section 4: the newest query, mean over all heads of the layer."""

    def choose(probs: Tensor, held: Tensor, _real: Tensor, budgets: list[int]) -> Tensor:
        scores = probs[..., -1, :].mean((1, 2))[:, None].expand(held.shape)
        return pick(scores, held, budgets, first, [last] * len(budgets))

    return choose


def snapkv(window: int = 64, kernel: int = 5, pooling: str = "avg", reduce: str = "mean") -> Choose:
    """Li et al. 2024, listing 1: attention of the last queries to what came before them, summed, then pooled.

    Both are over what a head still holds: weights sum to one over it, and neighbours are the nearest that are left.
    """

    def choose(probs: Tensor, held: Tensor, real: Tensor, budgets: list[int]) -> Tensor:
        scores = torch.zeros(held.shape)
        for row in range(held.shape[0]):
            for head in range(held.shape[1]):
                there = held[row, head].nonzero().flatten()
                earlier = there[there < held.shape[-1] - window]
                if not len(earlier):
                    continue
                rows = probs[row, head][:, -window:]  # group query key
                left = rows[..., there].sum(-1, keepdim=True).clamp(min=1e-30)
                rows = rows / left * rows.sum(-1, keepdim=True) * real[row, -window:, None]
                padded = torch.nn.functional.pad(rows[..., earlier].sum(1), (kernel // 2, kernel // 2))
                around = padded.unfold(-1, kernel, 1)
                pooled = around.mean(-1) if pooling == "avg" else around.amax(-1)
                scores[row, head, earlier] = per_group(pooled[None, None], reduce)[0, 0]
        return pick(scores, held, budgets, last=[window] * len(budgets))

    return choose


def per_group(scores: Tensor, reduce: str) -> Tensor:
    """Dimension 2, the query heads of a kv head, becomes one number."""
    return {"mean": lambda: scores.mean(2), "max": lambda: scores.amax(2), "sum": lambda: scores.sum(2)}[reduce]()
