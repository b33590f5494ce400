"""Token by token, under interventions, while observers watch: generated, or along a given text."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from sinkscope.interventions.base import Event, Intervention
from sinkscope.interventions.sink_patch import SinkPatch
from sinkscope.models.target import Target


@dataclass(frozen=True)
class Mark:
    """Something that an intervention did.

    Attributes:
        step: token that was generated then, from 0.
        kind: of the event.
        count: events of that kind in that step.
    """

    step: int
    kind: str
    count: int


def joined(*parts: Intervention | None) -> Intervention | None:
    """Interventions entered together, in order; those that are None are left out."""
    whole: Intervention | None = None
    for part in parts:
        if part is not None:
            whole = part if whole is None else whole | part
    return whole


def acting(policy: str | None, guard: bool) -> Intervention | None:
    """A policy as commands name it, and LoopGuard if asked for.

    Raises:
        SinkscopeError: no such policy, or no such budget.
    """
    from sinkscope.kv.loopguard import LoopGuard
    from sinkscope.kv.registry import policy_named

    return joined(None if policy is None else policy_named(policy), LoopGuard() if guard else None)


def loaded(patch: SinkPatch | str | PathLike[str] | None) -> SinkPatch | None:
    """A patch, from its file if need be."""
    return patch if patch is None or isinstance(patch, SinkPatch) else SinkPatch.load(patch)


@torch.no_grad()
def decode(
    target: Target, prompt: list[int], new: int, edit: Intervention | None, forced: list[int] | None = None
) -> tuple[list[int], list[Event]]:
    """Continue a prompt by the likeliest tokens, or by given ones.

    Args:
        target: the model, whole.
        prompt: ids.
        new: tokens at most; fewer where the sequence ends.
        edit: what acts and watches.
        forced: the tokens that follow instead of the likeliest ones, at least `new`.

    Returns:
        The new ids, and what interventions did; an event's step is the call's, 0 for the prompt.
    """
    ends = getattr(target.hf.generation_config, "eos_token_id", None)
    stop = set(ends) if isinstance(ends, list | tuple) else set() if ends is None else {int(ends)}
    ids = torch.tensor([prompt], device=target.device)
    extra: dict[str, Any] = {}
    if forced is not None:
        extra = {"logits_processor": [_Forced(forced, len(prompt))], "eos_token_id": None}
    with edit.on(target) if edit is not None else nullcontext() as run:
        out = target.hf.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            do_sample=False,
            pad_token_id=min(stop, default=0),
            **extra,
        )
        events = [] if run is None else run.events
    return out[0, len(prompt) :].tolist(), events


def marks(events: list[Event]) -> tuple[Mark, ...]:
    """Events by step and kind."""
    counted = Counter((event.step, event.kind) for event in events)
    return tuple(Mark(step, kind, n) for (step, kind), n in sorted(counted.items()))


class _Forced:
    """A logits processor that leaves one token to choose."""

    def __init__(self, forced: list[int], prompt: int) -> None:
        self.forced, self.prompt = forced, prompt

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        out = torch.full_like(scores, -torch.inf)
        out[:, self.forced[ids.shape[1] - self.prompt]] = 0
        return out
