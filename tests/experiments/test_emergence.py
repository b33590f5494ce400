"""The task of the emergence experiment against its rules, and a killed run against one that was not."""

from __future__ import annotations

import pytest
import torch

from experiments import emergence
from experiments.emergence import is_trigger, sequences, transitions
from sinkscope.models.text import typical_text


def test_sequences_follow_the_task():
    table = transitions(typical_text())
    ids = sequences(table, 200, True, torch.Generator().manual_seed(0))
    assert ids.shape == (200, emergence.LENGTH) and (ids[:, 0] == 0).all() and (ids[:, 1:] > 0).all()
    trigger = is_trigger(ids)
    assert not trigger[:, 1].any() and 0.15 < trigger.float().mean() < 0.6
    assert torch.equal(ids[:, 3:][trigger[:, 2:-1]], ids[:, 1:-2][trigger[:, 2:-1]])  # repeated after a trigger
    assert not (trigger[:, 1:] & trigger[:, :-1]).any()
    # elsewhere the bigrams are those of the table
    before, after = ids[:, 1:-1][~trigger[:, 1:-1]], ids[:, 2:][~trigger[:, 1:-1]]
    common = int(before.bincount().argmax())
    seen = after[before == common].bincount(minlength=len(table)).float()
    assert (seen / seen.sum() - table[common]).abs().max() < 0.06
    torch.testing.assert_close(table.sum(-1), torch.ones(len(table)))
    without = sequences(table, 50, False, torch.Generator().manual_seed(0))
    assert without.shape == (50, emergence.LENGTH) and (without > 0).all()


def test_idle_attention_is_that_of_positions_without_a_trigger():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=32, max_position_embeddings=64, initializer_range=0.5, **emergence.SIZES)
    config._attn_implementation = "eager"
    model = LlamaForCausalLM(config).eval()
    ids = sequences(transitions(typical_text()), 5, True, torch.Generator().manual_seed(0))
    idle = ~torch.isin(ids[:, 1:], torch.tensor([1, 2, 3]))
    best = max(
        float(layer[:, 0, 1:, 0][idle].detach().mean()) for layer in model(ids, output_attentions=True).attentions
    )
    assert emergence.measure(model, ids, 0.0)["idle_attention"] == pytest.approx(best, rel=1e-4)
