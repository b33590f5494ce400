"""What cache policies keep, the slow way: each policy as a function of the attention matrix so far.

A token that a policy evicted is a column of the mask that later queries of that layer and kv head do not see. So a run
is one pass of the stock model, without a cache, under the masks that the run says; and at every step of it the policy
has to have kept what the function here keeps, of what it held before. The functions take nothing from the package.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from kv_kit import masks_of_run
from torch import Tensor
from torch.testing import assert_close

from sinkscope.conformance.masked import attending, positions_of

# (probs [batch kv_head group query key], held [batch kv_head key], real [batch key], budget per row) -> keep
Choose = Callable[[Tensor, Tensor, Tensor, list[int]], Tensor]


@torch.no_grad()
def check_run(
    found: tuple[Tensor, list[list[Tensor]]], choose: Choose, model, ids: Tensor, mask: Tensor, policy, steps: int
):
    """What `run_policy` found has the logits of a stock pass, and kept what the function says, step by step.

    Args:
        found: Logits and kept columns.
        choose: The policy.
        model: stock.
        ids: prompt, padded on the left, and the tokens that follow.
        mask: 0 at padding.
        policy: its `budget` is that of each row, in tokens or as a fraction of its prompt; its `every` says when it
            evicts: before the first decoded token, and then before every n-th or never.
        steps: number of decoded tokens.
    """
    logits, kept = found
    total = ids.shape[1]
    prompt = total - steps
    budgets = [policy.budget] * len(ids)
    if isinstance(policy.budget, float):
        budgets = [int(policy.budget * int(tokens)) for tokens in mask[:, :prompt].sum(1)]
    with attending(model, masks_of_run(model, kept, mask, prompt)):
        given = {"attention_mask": mask, "position_ids": positions_of(mask), "use_cache": False}
        whole = model(input_ids=ids, output_attentions=True, **given)
    assert_close(logits, whole.logits[:, prompt - 1 :], atol=5e-5, rtol=0)
    for layer, probs in enumerate(whole.attentions):
        grouped = probs.float().unflatten(1, (kept[0][layer].shape[1], -1))
        held = mask[:, None].bool().repeat(1, grouped.shape[1], 1)
        for now in range(prompt, total):
            if now == prompt or (policy.every != "prefill" and (now - prompt) % policy.every == 0):
                held[..., :now] &= choose(grouped[..., :now, :now], held[..., :now], mask[:, :now], budgets)
            step = now - prompt
            assert torch.equal(kept[step][layer][..., :now], held[..., :now]), f"step {step}, layer {layer}"


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


def streaming_llm(_probs: Tensor, held: Tensor, _real: Tensor, budgets: list[int]) -> Tensor:
    """Xiao et al. 2023, section 3.2: the first tokens and the most recent ones."""
    return pick(torch.zeros(held.shape), held, budgets, first=4)


def h2o(probs: Tensor, held: Tensor, real: Tensor, budgets: list[int], recent=0.5, first=0) -> Tensor:
    """Zhang et al. 2023, algorithm 1: summed attention, and recent tokens."""
    # Query by query: what a query could not see has zero in its row; padding queries do not count.
    scores = (probs.mean(2) * real[:, None, :, None]).sum(-2)
    return pick(scores, held, budgets, first, [int(budget * recent) for budget in budgets])


def tova(probs: Tensor, held: Tensor, _real: Tensor, budgets: list[int], first=0, last=0) -> Tensor:
    """Oren et al. 2024, section 4: the newest query, mean over all heads of the layer."""
    scores = probs[..., -1, :].mean((1, 2))[:, None].expand(held.shape)
    return pick(scores, held, budgets, first, [last] * len(budgets))


def progressive(probs: Tensor, held: Tensor, _real: Tensor, budgets: list[int], interval=4) -> Tensor:
    """Li et al. 2025, algorithm 6, where a choice evicts: the latest queries, mean over the heads of a kv head."""
    return pick(probs[..., -interval:, :].sum(-2).mean(2), held, budgets)


def snapkv(probs: Tensor, held: Tensor, real: Tensor, budgets: list[int], window=64, kernel=5, pooling="avg") -> Tensor:
    """Li et al. 2024, listing 1: attention of the last queries to what came before them, summed, then pooled.

    Both are over what a head still holds: weights sum to one over it, and neighbours are the nearest that are left.
    """
    scores = torch.zeros(held.shape)
    for row, head in np.ndindex(*held.shape[:2]):
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
        scores[row, head, earlier] = pooled.mean(0)
    return pick(scores, held, budgets, last=[window] * len(budgets))
