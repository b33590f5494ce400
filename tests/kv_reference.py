"""What cache policies keep, the slow way: each policy as a function of the attention matrix so far.

A token that a policy evicted is a column of the mask that later queries of that layer and kv head do not see. So a run
is one pass of the stock model, without a cache, under the masks that the run says; and at every step of it the policy
has to have kept what the function here keeps, of what it held before. The functions take nothing from the package but
the settings of a policy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from kv_kit import masks_of_run
from torch import Tensor
from torch.nn.functional import pad
from torch.testing import assert_close
from transformers import DynamicCache

from sinkscope.conformance.masked import attending, positions_of


@dataclass
class Seen:
    """A layer when a policy chooses: `probs` [row kv_head group query key], `keys` [row kv_head key d_head].

    `held` is [row kv_head key], `real` [row key].

    `budgets` are those of the rows in tokens, and `prompts` the lengths of their prompts.
    """

    probs: Tensor
    keys: Tensor
    held: Tensor
    real: Tensor
    budgets: list[int]
    prompts: list[int]
    layer: int
    layers: int


def pick(scores: Tensor, held: Tensor, budgets: list[int], first: int, last: list[int]) -> Tensor:
    """Per row and kv head: the first and last tokens, then the best scores, together `budget` tokens.

    Loops over everything, in plain Python. Of equal scores the later token stays.
    """
    keep = torch.zeros_like(held)
    for row, budget in enumerate(budgets):
        for head in range(held.shape[1]):
            there = held[row, head].nonzero().flatten().tolist()
            sure = {*there[:first], *there[max(0, len(there) - last[row]) :]}
            rest = sorted((i for i in there if i not in sure), key=lambda i: (-float(scores[row, head, i]), -i))
            keep[row, head, [*sure, *rest[: max(0, budget - len(sure))]]] = True
    return keep


def streaming(policy: Any, seen: Seen) -> Tensor:
    """Xiao et al. 2023, section 3.2: the first tokens and the most recent ones."""
    return pick(torch.zeros(seen.held.shape), seen.held, seen.budgets, policy.first, [policy.last] * len(seen.budgets))


def h2o(policy: Any, seen: Seen) -> Tensor:
    """Zhang et al. 2023, algorithm 1: summed attention, and recent tokens."""
    # Query by query: what a query could not see has zero in its row; padding queries do not count.
    scores = (seen.probs.mean(2) * seen.real[:, None, :, None]).sum(-2)
    recent = [max(policy.last, int(budget * policy.recent + 1e-6)) for budget in seen.budgets]
    return pick(scores, seen.held, seen.budgets, policy.first, recent)


def tova(policy: Any, seen: Seen) -> Tensor:
    """Oren et al. 2024, section 4: the newest query, mean over all heads of the layer."""
    scores = seen.probs[..., -1, :].mean((1, 2))[:, None].expand(seen.held.shape)
    return pick(scores, seen.held, seen.budgets, policy.first, [policy.last] * len(seen.budgets))


def windows(policy: Any, budgets: list[int]) -> list[int]:
    """The observation window of each row: as long as it says, or 64, but no more than half of the budget."""
    return [policy.window or min(64, max(1, (budget - policy.first) // 2)) for budget in budgets]


def votes(policy: Any, seen: Seen) -> Tensor:
    """Li et al. 2024, listing 1: attention of the last queries to what came before them, summed, then pooled.

    Both are over what a head still holds: weights sum to one over it, and neighbours are the nearest that are left.
    """
    scores = torch.zeros(seen.held.shape)
    for row, window in enumerate(windows(policy, seen.budgets)):
        for head in range(scores.shape[1]):
            there = seen.held[row, head].nonzero().flatten()
            earlier = there[there < scores.shape[2] - window]
            if not len(earlier):
                continue
            rows = seen.probs[row, head][:, -window:]  # group query key
            left = rows[..., there].sum(-1, keepdim=True).clamp(min=1e-30)
            rows = rows / left * rows.sum(-1, keepdim=True) * seen.real[row, -window:, None]
            around = pad(rows[..., earlier].sum(1), (policy.kernel // 2, policy.kernel // 2)).unfold(
                -1, policy.kernel, 1
            )
            pooled = around.mean(-1) if policy.pooling == "avg" else around.amax(-1)
            scores[row, head, earlier] = pooled.mean(0)
    return scores


def snapkv(policy: Any, seen: Seen) -> Tensor:
    """The best votes, and the window."""
    last = [max(policy.last, window) for window in windows(policy, seen.budgets)]
    return pick(votes(policy, seen), seen.held, seen.budgets, policy.first, last)


def pyramid(policy: Any, seen: Seen) -> Tensor:
    """Cai et al. 2024, section 4.2: budgets of the layers on a straight line, of which the highest is 1 / beta."""
    last = [max(policy.last, window) for window in windows(policy, seen.budgets)]
    budgets = []
    for budget, window, prompt in zip(seen.budgets, last, seen.prompts, strict=True):
        kept = policy.first + window
        mean = budget - kept
        lowest = min(2 * mean - mean / policy.beta, max(mean, prompt - kept))
        height = seen.layer / (seen.layers - 1)
        budgets.append(kept + int(lowest + 2 * height * (mean - lowest) + 1e-6))
    return pick(votes(policy, seen), seen.held, budgets, policy.first, last)


def shared_budget(scores: Tensor, held: Tensor, sure: Tensor, base: list[int], floor: float) -> Tensor:
    """Feng et al. 2024, algorithm 1, for one row: the best of all heads, less what `floor` gives each of them."""
    free = sorted([(float(scores[h, i]), h, i) for h, i in (held & ~sure).nonzero().tolist()], reverse=True)
    keep, total = held & sure, sum(base)
    for head, own in enumerate(base):
        share = sum(h == head for _, h, _ in free[:total])
        if len(free) > total:
            share = int((1 - floor) * share + floor * own + 1e-6)
        keep[head, [i for _, h, i in free if h == head][:share]] = True
    return keep


def adakv(policy: Any, seen: Seen) -> Tensor:
    """SnapKV's votes, and one budget for the heads of a layer."""
    scores, keep, at = votes(policy, seen), list[Tensor](), torch.arange(seen.real.shape[1])
    for row, window in enumerate(windows(policy, seen.budgets)):
        padding, held = int((~seen.real[row]).sum()), seen.held[row]
        sure = (at < padding + policy.first) | (at >= len(at) - max(policy.last, window))
        base = [max(0, seen.budgets[row] - int((of_head & sure).sum())) for of_head in held]
        keep.append(shared_budget(scores[row], held, sure.expand_as(held), base, policy.floor))
    return torch.stack(keep)


REFERENCES: dict[str, Callable[[Any, Seen], Tensor]] = {
    "full": lambda _, seen: seen.held,
    "streaming": streaming,
    "h2o": h2o,
    "tova": tova,
    "snapkv": snapkv,
    "pyramid": pyramid,
    "adakv": adakv,
}


def reference_of(name: str) -> Callable[[Any, Seen], Tensor]:
    """The function of a policy; one that has none fails and says where it belongs."""
    if name not in REFERENCES:
        pytest.fail(
            f"policy {name!r} has no reference: write a function of its settings and of Seen that gives what it keeps "
            "into tests/kv_reference.py, as `tova` is, and its row in REFERENCES",
            pytrace=False,
        )
    return REFERENCES[name]


def is_due(policy: Any, step: int) -> bool:
    """Whether a policy chooses before the generated token of this number: at the first, and then every so often."""
    return step == 0 or (policy.every != "prefill" and step % policy.every == 0)


@torch.no_grad()
def check_run(
    found: tuple[Tensor, list[list[Tensor]]], name: str, policy: Any, model, ids: Tensor, mask: Tensor, prompt: int
):
    """What `run_policy` found has the logits of a stock pass, and kept what the function says, step by step.

    Args:
        found: Logits and kept columns.
        name: Name of the function.
        policy: Its settings; a budget is in tokens, or a fraction of the prompt of a row, rounded down.
        model: The stock model.
        ids: Prompts, padded on the left, and the tokens that follow.
        mask: 0 at padding.
        prompt: Columns of the prompts.
    """
    logits, kept = found
    reference = reference_of(name)
    tokens = mask[:, :prompt].sum(1).tolist()
    budgets = [policy.budget if isinstance(policy.budget, int) else int(policy.budget * n + 1e-6) for n in tokens]
    with attending(model, masks_of_run(model, kept, mask, prompt)):
        given = {"attention_mask": mask, "position_ids": positions_of(mask), "past_key_values": DynamicCache()}
        whole = model(input_ids=ids, output_attentions=True, **given)
    assert_close(logits, whole.logits[:, prompt - 1 :], atol=5e-5, rtol=0)
    for layer, probs in enumerate(whole.attentions):
        grouped = probs.float().unflatten(1, (kept[0][layer].shape[1], -1))
        held = mask[:, None].bool().repeat(1, grouped.shape[1], 1)
        for now in range(prompt, ids.shape[1]):
            if is_due(policy, now - prompt):
                real = mask[:, :now].bool()
                keys = whole.past_key_values.layers[layer].keys[:, :, :now]
                seen = Seen(grouped[..., :now, :now], keys, held[..., :now], real, budgets, tokens, layer, len(kept[0]))
                held[..., :now] &= reference(policy, seen)
            step = now - prompt
            assert torch.equal(kept[step][layer][..., :now], held[..., :now]), f"step {step}, layer {layer}"
