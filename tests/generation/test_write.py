"""One request, one run: what counts from the prompt goes on counting while a guard takes tokens back."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import transformers.generation.stopping_criteria as criteria
from organisms import loop_organism
from transformers import LogitsProcessor, LogitsProcessorList

from sinkscope.generation.decode import decode
from sinkscope.loops import MonitorSettings
from sinkscope.loops.guard import LoopGuard, Steer
from sinkscope.opening.live import target_of

GUARD = LoopGuard(monitor=MonitorSettings(tail_beyond=0, cooldown=8), steer=Steer(temperature=0.0))
NEW, PERIOD = 90, 12


@cache
def organism() -> Any:
    return loop_organism(0, reach=64, n_layers=2, vocab_size=1024)


def prompt() -> torch.Tensor:
    """A prompt after which the text loops."""
    return organism().looping_prompt(PERIOD, delay=30, start=250).ids


def written(**options: Any) -> list[int]:
    """What is written after the prompt, of which something is taken back."""
    (answer,), run = decode(target_of(organism().model), prompt().tolist(), NEW, GUARD, **options)
    assert run is not None
    (act,) = run.events  # a guard that had forgotten the text would meet the loop as a new one
    assert act.data["taken_back"]
    return answer


class Seen(LogitsProcessor):
    """Notes the rows as they are when their next token is chosen."""

    def __init__(self) -> None:
        self.rows: list[list[int]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.rows += input_ids.tolist()
        return scores


def test_processors_are_asked_of_the_text_as_it_is():
    seen, width = Seen(), prompt().shape[1]
    text = written(logits_processor=LogitsProcessorList([seen]))
    lengths = [len(row) for row in seen.rows]
    assert lengths.count(width) == 1, "the first token is chosen once"
    assert set(lengths) == set(range(width, width + NEW))
    assert len(lengths) > NEW, "what was taken back is chosen again"
    assert len(text) == NEW and text[:-1] in [row[width:] for row in seen.rows], "before its last token was chosen"


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
