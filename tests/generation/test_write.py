"""One request, one run: what counts from the prompt goes on counting while a guard takes tokens back."""

from __future__ import annotations

import torch
from organisms import kept_loop

from sinkscope.generation.decode import decode
from sinkscope.loops import MonitorSettings
from sinkscope.loops.guard import LoopGuard, Steer
from sinkscope.opening.live import target_of

GUARD = LoopGuard(monitor=MonitorSettings(tail_beyond=0, cooldown=8), steer=Steer(temperature=0.0))
NEW = 90


def test_processors_are_asked_of_the_text_as_it_is():
    organism = kept_loop(period=12, reach=80)
    prompt = [organism.prompt(30)]  # after which the text loops
    seen: list[list[int]] = []

    def see(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(input_ids[0].tolist())
        return scores

    (text,), run = decode(target_of(organism.model), prompt, NEW, GUARD, logits_processor=[see])
    assert run is not None
    (act,) = run.events  # a guard that had forgotten the text would meet the loop as a new one
    width, lengths = len(prompt[0]), [len(row) for row in seen]
    assert act.data["taken_back"] and len(lengths) > NEW, "what was taken back is chosen again"
    assert lengths.count(width) == 1, "the first token is chosen once"
    assert {*lengths} == {*range(width, width + NEW)}
    assert len(text) == NEW and text[:-1] in [row[width:] for row in seen], "before its last token was chosen"
