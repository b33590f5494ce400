"""What the tests of LoopGuard share: tokens fed by hand, and what a cut cache must give, from one dense pass."""

from __future__ import annotations

import torch
from intervention_kit import bridge_of, nnsight_of
from organisms import tiny_model
from torch import Tensor
from transformers import DynamicCache

from sinkscope.interventions import Event
from sinkscope.opening.live import target_of

KINDS = {"hf": lambda model, _tokenizer: model, "bridge": bridge_of, "nnsight": nnsight_of}
SMALL = {"budget": 24, "anchors": 4, "window": 16}
EAGER = {"warmup": 0, "tail_shortest": 6, "cooldown": 8}  # a monitor that fires after two or three short copies


def tiny(kind: str = "hf", model_type: str = "llama", **overrides):
    model, tokenizer = tiny_model(model_type, **{"num_hidden_layers": 2, **overrides})
    return KINDS[kind](model, tokenizer)


def padded(*lengths: int) -> tuple[Tensor, Tensor]:
    """Random prompts of these lengths, padded on the left."""
    width = max(lengths)
    ids = torch.randint(3, 90, (len(lengths), width))
    mask = torch.tensor([[0] * (width - n) + [1] * n for n in lengths])
    return ids * mask, mask


@torch.no_grad()
def feed(model, prompt: Tensor, mask: Tensor, tokens: Tensor, cache: DynamicCache | None = None) -> Tensor:
    """Prompt at once, then `tokens` `[row step]` one by one; logits at the end of the prompt and after each token."""
    hf, cache = target_of(model).hf, DynamicCache() if cache is None else cache
    seen = cache.get_seq_length()
    mask = torch.cat([torch.ones(len(mask), seen, dtype=mask.dtype), mask], 1)
    logits = [hf(input_ids=prompt, attention_mask=mask, past_key_values=cache).logits[:, -1]]
    for step in tokens.T:
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        logits.append(hf(input_ids=step[:, None], attention_mask=mask, past_key_values=cache).logits[:, -1])
    return torch.stack(logits, 1)


@torch.no_grad()
def dense(model, row: Tensor, events: list[Event], lag: int = 0) -> Tensor:
    """Logits of a stock model for one unpadded row, computed at once, without what the events took from the cache.

    Tokens after an event (and `lag` more) do not see positions before it that it did not keep.
    """
    total = len(row)
    sees = torch.ones(total, total, dtype=torch.bool).tril()
    for event in events:
        end = event.position + lag + 1
        kept = {p for start, stop in event.data["kept"] for p in range(start, stop)}
        gone = [p for p in range(end) if p not in kept]
        sees[end:, gone] = False
    zero = torch.zeros(total, total).masked_fill(~sees, torch.finfo(torch.float32).min)
    return model(input_ids=row[None], attention_mask=zero[None, None], use_cache=False).logits[0]
