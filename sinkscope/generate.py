"""Generate text from prompts, with interventions: the quickest way to see what a patch changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from os import PathLike
from typing import Any

import torch
from transformers import TextStreamer

from sinkscope.errors import SinkscopeError
from sinkscope.interventions.base import Event, Intervention
from sinkscope.interventions.sink_patch import SinkPatch
from sinkscope.kv import Policy, policy_named
from sinkscope.kv.loopguard import LoopGuard
from sinkscope.models.target import Target


@dataclass(frozen=True)
class Generated:
    """What a model wrote after one prompt.

    Attributes:
        prompt: as given.
        text: the new text alone.
        tokens: ids of the new tokens, up to and with the end of sequence if it came.
        prompt_tokens: length of the prompt, BOS included.
        events: what the interventions did in this row (`row` is the number of the prompt).
    """

    prompt: str
    text: str
    tokens: list[int]
    prompt_tokens: int
    events: list[Event]


def generate(
    model: object,
    prompts: str | Sequence[str],
    *,
    patch: SinkPatch | str | PathLike[str] | None = None,
    interventions: Intervention | None = None,
    policy: Policy | str | None = None,
    guard: LoopGuard | bool = False,
    tokenizer: Any = None,
    max_new_tokens: int = 100,
    temperature: float = 0.0,
    seed: int = 0,
    bos: bool | None = None,
    batch_size: int = 1,
    on_text: Callable[[int, str], None] | None = None,
) -> list[Generated]:
    """Generate after each prompt.

    Args:
        model: Hugging Face, TransformerBridge, nnsight (dispatched) or `Target`.
        prompts: texts; one is a list of one.
        patch: a `SinkPatch` or the path of a patch.json.
        interventions: any others; they act after the patch.
        policy: what the KV cache keeps: a policy, or its name as `policy_named` takes it: "h2o:512".
        guard: watch for repetition loops and cut the cache of rows that loop; True is `LoopGuard()`.
        tokenizer: needed where the model carries none.
        max_new_tokens: stops there at the latest.
        temperature: 0 is greedy.
        seed: of the sampling. The caller's random numbers are left as they were.
        bos: begin with the BOS token; by default as the tokenizer does.
        batch_size: prompts run together, padded on the left.
        on_text: called with (number of the prompt, piece of text) while a prompt is generated; needs batch_size 1.

    Returns:
        One `Generated` per prompt, in order.

    Raises:
        SinkscopeError: empty prompt, prompt and new tokens longer than the context, no tokenizer, bad numbers, no such
            policy, a budget that is too small for a prompt.
    """
    target = Target.of(model, tokenizer)
    tok: Any = target.tokenizer
    prompts = [prompts] if isinstance(prompts, str) else list(prompts)
    if tok is None:
        raise SinkscopeError(
            f"{target.name} carries no tokenizer: give tokenizer=..., or put the tokenizer's files beside the weights",
            page="no-tokenizer",
        )
    _check_numbers(max_new_tokens, temperature, seed, batch_size, on_text)
    _check_loaded(target)
    rows = [_encode(tok, i, prompt, bos, target.name) for i, prompt in enumerate(prompts)]
    for i, ids in enumerate(rows):
        _check_length(i, len(ids), max_new_tokens, target)
    loaded = patch if patch is None or isinstance(patch, SinkPatch) else SinkPatch.load(patch)
    cache: Intervention | None = policy_named(policy) if isinstance(policy, str) else policy
    watch = (LoopGuard() if guard else None) if isinstance(guard, bool) else guard
    parts: list[Intervention] = [part for part in (loaded, interventions, cache, watch) if part is not None]
    for part in parts:
        for ids in rows:
            check_budget(part, len(ids))
    edit = reduce(or_, parts) if parts else None
    sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
    results: list[Generated] = []
    device = target.device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        for start in range(0, len(rows), batch_size):
            batch = rows[start : start + batch_size]
            ids, mask = _pad(batch, _pad_id(tok, target))
            streamer = None if on_text is None else _Streamer(tok, start, on_text)
            with edit.on(target) if edit is not None else nullcontext() as run, torch.no_grad():
                out = target.hf.generate(
                    input_ids=ids.to(device),
                    attention_mask=mask.to(device),
                    max_new_tokens=max_new_tokens,
                    pad_token_id=_pad_id(tok, target),
                    streamer=streamer,
                    **sampling,
                )
            events = [] if run is None else run.events
            ends = _ends(target)
            for i, row in enumerate(out[:, ids.shape[1] :].tolist()):
                new = row[: next((j + 1 for j, t in enumerate(row) if t in ends), len(row))]
                # A row that has ended goes on as padding until the last one ends: nothing that is there was generated.
                last = len(batch[i]) + len(new) - 1
                own = [replace(e, row=start + i) for e in events if e.row == i and e.position <= last]
                text = tok.decode(new, skip_special_tokens=True)
                results.append(Generated(prompts[start + i], text, new, len(batch[i]), own))
    return results


def check_budget(part: Intervention, prompt_tokens: int) -> None:
    """Refuse before the first token a budget that would be refused after it.

    Raises:
        SinkscopeError: a fraction of this prompt is less than a policy or a guard always keeps.
    """
    if isinstance(part, Policy):
        part.tokens(torch.tensor([prompt_tokens]))
    if isinstance(part, LoopGuard):
        part.retention(prompt_tokens)


class _Streamer(TextStreamer):
    def __init__(self, tokenizer: Any, number: int, on_text: Callable[[int, str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._number, self._on_text = number, on_text

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if text:
            self._on_text(self._number, text)


def _encode(tok: Any, number: int, prompt: str, bos: bool | None, name: str) -> list[int]:
    if not prompt.strip():
        raise SinkscopeError(f"prompt {number + 1} is empty: write at least one word", page="generate")
    ids = [int(i) for i in tok(prompt)["input_ids"]]
    if bos is None:
        return ids
    if tok.bos_token_id is None:
        if bos:
            raise SinkscopeError(
                f"--bos: the tokenizer of {name} has no BOS token; leave --bos out or use --no-bos", page="generate"
            )
        return ids
    begins = ids[:1] == [tok.bos_token_id]
    if bos and not begins:
        return [tok.bos_token_id, *ids]
    return ids[1:] if begins and not bos else ids


def _pad(rows: list[list[int]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, rows))
    ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return ids, mask


def _pad_id(tok: Any, target: Target) -> int:
    if tok.pad_token_id is not None:
        return int(tok.pad_token_id)
    return min(_ends(target), default=0)


def _ends(target: Target) -> set[int]:
    end = getattr(target.hf.generation_config, "eos_token_id", None)
    return set(end) if isinstance(end, list | tuple) else set() if end is None else {int(end)}


def _check_length(number: int, length: int, new: int, target: Target) -> None:
    limit = target.max_positions
    if limit is None or length + new <= limit:
        return
    if length >= limit:
        raise SinkscopeError(
            f"prompt {number + 1} has {length} tokens and the context of {target.name} is {limit}: shorten the prompt",
            page="generate",
        )
    raise SinkscopeError(
        f"prompt {number + 1} has {length} tokens and {new} more were asked for, {length + new} in all, but the "
        f"context of {target.name} is {limit}: shorten the prompt or ask for at most {limit - length} new tokens",
        page="generate",
    )


def _check_numbers(max_new_tokens: int, temperature: float, seed: int, batch_size: int, on_text: object) -> None:
    for name, value, least in (("max_new_tokens", max_new_tokens, 1), ("seed", seed, 0), ("batch_size", batch_size, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise SinkscopeError(f"{name}={value!r}: expected a whole number from {least}", page="generate")
    if seed >= 1 << 63:
        raise SinkscopeError(f"seed={seed!r}: expected a number below 2**63", page="generate")
    if not 0 <= temperature < float("inf"):
        raise SinkscopeError(f"temperature={temperature!r}: expected 0 (greedy) or a positive number", page="generate")
    if on_text is not None and batch_size != 1:
        raise SinkscopeError(
            f"on_text with batch_size={batch_size}: text can be passed on while it comes only with batch_size=1",
            page="generate",
        )


def _check_loaded(target: Target) -> None:
    if next(target.hf.parameters()).is_meta:
        raise SinkscopeError(
            f"{target.name} holds no weights yet: load it with sinkscope.load(...), or make it with "
            "dispatch=True (nnsight)",
            page="generate",
        )
