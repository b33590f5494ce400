"""One request, one run: what counts from the prompt goes on counting while a guard takes tokens back."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import transformers.generation.stopping_criteria as criteria
from organisms import loop_organism
from transformers import LogitsProcessor, LogitsProcessorList

from sinkscope.generation.write import write
from sinkscope.loops import MonitorSettings
from sinkscope.loops.guard import LoopGuard, Steer

GUARD = LoopGuard(monitor=MonitorSettings(tail_beyond=0, cooldown=8), steer=Steer(temperature=0.0))
NEW, PERIOD = 90, 12
LOOPS = "One day, the bird sang the same song again and again:"
"""The model of the package goes on with a loop."""


@cache
def organism() -> Any:
    return loop_organism(0, reach=64, n_layers=2, vocab_size=1024)


def prompts(rows: int) -> list[torch.Tensor]:
    """Prompts of one length after which rows loop at different times."""
    o = organism()
    return [o.looping_prompt(PERIOD, delay=30 - 20 * row, start=250 + 250 * row).ids for row in range(rows)]


def written(rows: int = 1, **options: Any) -> list[list[int]]:
    """What is written after each prompt, and how often a row was cut."""
    o, ids = organism(), prompts(rows)
    width = max(prompt.shape[1] for prompt in ids)
    wide = torch.zeros(rows, width, dtype=torch.long)
    mask = torch.zeros_like(wide)
    for row, prompt in enumerate(ids):
        wide[row, width - prompt.shape[1] :], mask[row, width - prompt.shape[1] :] = prompt[0], 1
    settings = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": NEW, **options}
    with GUARD.on(o.model) as run, torch.no_grad():
        output = write(run, o.model, wide, attention_mask=mask, **settings)
    assert all(any(event.row == row and event.data["taken_back"] for event in run.events) for row in range(rows))
    return output[:, width:].tolist()


class Seen(LogitsProcessor):
    """Notes the rows as they are when their next token is chosen."""

    def __init__(self) -> None:
        self.rows: list[list[int]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.rows += input_ids.tolist()
        return scores


@pytest.mark.parametrize("rows", [1, 2])
def test_processors_are_asked_of_each_text_as_it_is(rows):
    seen, width = Seen(), max(prompt.shape[1] for prompt in prompts(rows))
    texts = written(rows, logits_processor=LogitsProcessorList([seen]))
    lengths = [len(row) for row in seen.rows]
    assert lengths.count(width) == rows, "the first token is chosen once"
    assert set(lengths) == set(range(width, width + NEW))
    assert len(lengths) > rows * NEW, "what was taken back is chosen again"
    for text in texts:
        assert len(text) == NEW and text[:-1] in [row[width:] for row in seen.rows], "before its last token was chosen"


def test_rows_are_what_they_are_alone():
    together = written(2)
    o = organism()
    for prompt, text in zip(prompts(2), together, strict=True):
        with GUARD.on(o.model) as run, torch.no_grad():
            settings = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "pad_token_id": 0}
            alone = write(run, o.model, prompt, max_new_tokens=NEW, **settings)
        assert alone[0, prompt.shape[1] :].tolist() == text


def test_a_clock_is_that_of_the_request(monkeypatch):
    class Clock:
        now = 0.0

        @classmethod
        def time(cls) -> float:
            return cls.now

    class Tick(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            Clock.now += 1.0
            return scores

    monkeypatch.setattr(criteria, "time", Clock)
    written(logits_processor=LogitsProcessorList([Tick()]), max_time=80.5)
    assert Clock.now == 81
