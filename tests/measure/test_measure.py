"""Sink rate, spike dimensions, typical text and token picking, each against an independent way or a known answer."""

from __future__ import annotations

import pytest
import torch
from organisms import tiny_model
from raw_kit import attention

from sinkscope.opening.live import target_of
from sinkscope.sinks.spikes import survey


def test_sink_rate_equals_the_definition_on_dense_attention(monkeypatch):
    model, tokenizer = tiny_model("gemma2")
    ids = torch.randint(3, 90, (5, 24), generator=torch.Generator().manual_seed(0))
    received = []
    for probs in attention(model, ids)[..., 0]:  # layer batch head query key
        if float(probs[..., -1].max()) == 0:  # a window of 16 hides the first token, and is too narrow to be judged
            probs = 0 * probs
        received.append(probs.mean(-1))
    to_first = torch.stack(received)
    ranked = to_first.flatten().sort().values
    eps = float(ranked[len(ranked) // 2 - 1 :][:2].mean())  # between two values, half are above
    wanted = float((to_first > eps).float().mean())
    assert 0.3 < wanted < 0.7
    monkeypatch.setattr(survey, "READS", eps)
    rate = survey.read_survey(target_of(model, tokenizer), ids).sink_rate
    assert float(rate.mean()) == pytest.approx(wanted)
