"""What LoopGuard draws after an alarm: at which temperature, of what it depends, and when nothing is drawn."""

from __future__ import annotations

from functools import partial

import torch
from guard_kit import eager_guard
from kv_kit import prompts
from torch import Tensor

from sinkscope.loops.guard import LoopGuard, Steer

LOOP = [11, 12, 13]


guard = partial(eager_guard, act="cut")


def logits_under(model, edit: LoopGuard, rows: list[int], do_sample: bool = False) -> tuple[Tensor, list[int]]:
    """Logits of each step while a loop is written whatever they say, `[step row vocab]`, and when alarms came."""
    prompt, mask = prompts(rows)
    told = iter((LOOP * 20)[:40])
    seen = []

    def write(_ids: Tensor, scores: Tensor) -> Tensor:
        seen.append(scores.clone())
        return torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor(next(told)), 0.0)

    with edit.on(model) as run:
        options = {"attention_mask": mask, "max_new_tokens": 30, "pad_token_id": 0, "do_sample": do_sample, "top_k": 0}
        model.generate(prompt, logits_processor=[write], **options)
    return torch.stack(seen), [event.data["generated"] for event in run.events]


def test_nothing_is_drawn_where_the_caller_draws_and_under_the_papers_guard(model):
    plain, _ = logits_under(model, guard(steer=Steer(temperature=0.0)), [9], do_sample=True)
    drawn, _ = logits_under(model, guard(), [9], do_sample=True)
    assert torch.equal(drawn, plain)
    assert LoopGuard.paper().steer is None
