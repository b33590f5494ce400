"""The plain readings themselves: the published facts about these models, and sums that have to come out."""

from __future__ import annotations

import plain
import pytest
import torch
from texts import prose


def test_the_spike_of_smollm2_is_written_by_two_neurons_of_layer_11(smollm2):
    ids = plain.ids_of(smollm2.tokenizer, prose(), 64, bos=True)
    norms = plain.norms(smollm2.model, ids)[:, 0, 0]
    typical = plain.norms(smollm2.model, ids)[11, 0, 1:].median()
    written = plain.contributions(smollm2.model, ids, 11)
    assert norms[[0, 1, 2, 11]].tolist() == pytest.approx([98.7, 345.0, 810.5, 25_101.9], rel=1e-3)
    assert written.topk(2).indices.tolist() == [1229, 1487] and norms[11] > 150 * typical
    assert written[[1229, 1487]].tolist() == pytest.approx([18_227, 6_944], rel=1e-3)


def test_zeroing_both_neurons_takes_the_spike_away(smollm2):
    ids = plain.ids_of(smollm2.tokenizer, prose(), 64, bos=True)
    intact, before = plain.perplexity(smollm2.model, ids), plain.attention_received(smollm2.model, ids)
    with plain.zeroed(smollm2.model, [(11, 1229), (11, 1487)]):
        left = plain.norms(smollm2.model, ids)[11, 0]
        after = plain.attention_received(smollm2.model, ids)
        assert plain.perplexity(smollm2.model, ids) > 3 * intact
    assert left[0] < 4 * left[1:].median()
    assert (before[12:30] > 0.3).sum() > 140 > 40 > (after[12:30] > 0.3).sum()
    assert plain.perplexity(smollm2.model, ids) == intact  # no hook is left


@pytest.mark.slow
def test_gemma_neurons_sum_to_what_the_layer_adds(gemma3):
    ids = plain.ids_of(gemma3.tokenizer, prose(), 64, bos=True)
    block = plain.layers(gemma3.model)[11]
    with torch.no_grad(), plain.reading([block.post_feedforward_layernorm], "output") as added:
        gemma3.model(ids, use_cache=False)
    post = plain.activations(gemma3.model, ids, 11)[0, 0]
    norm = block.post_feedforward_layernorm
    total = block.mlp.down_proj.weight @ post
    behind = total / (total.square().mean() + norm.eps).sqrt() * (1 + norm.weight)
    assert behind.tolist() == pytest.approx(added[0][0, 0].tolist(), rel=1e-3, abs=1e-3)
    of_each = plain.contributions(gemma3.model, ids, 11)
    before = plain.contributions(gemma3.model, ids, 11, behind_norm=False)
    assert before[163] / total.norm() > 1.5 * of_each[163] / behind.norm()


@pytest.mark.slow
def test_gemma_attends_to_bos_and_to_no_other_first_token(gemma3):
    with_bos, without = (plain.ids_of(gemma3.tokenizer, prose(), 64, bos=bos) for bos in (True, False))
    assert (plain.attention_received(gemma3.model, with_bos) > 0.3).sum() > 45
    assert (plain.attention_received(gemma3.model, without) > 0.3).sum() == 0
