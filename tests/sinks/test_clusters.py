"""The clusters of `attack` against planted groups, and its batch of single heads against ablation head by head."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from covering import slow
from organisms import Organism, organism
from torch.testing import assert_close

from sinkscope.opening.live import target_of
from sinkscope.sinks.attack.attack import ClusterAttack, attack
from sinkscope.sinks.attack.clusters import TokenClusters, head_activations, later_mean, neuron_at
from sinkscope.sinks.marking_heads import replacing


def measured(o: Organism, **options) -> ClusterAttack:
    return attack(o.model, tokenizer=o.tokenizer, **{"sequences": 0, "prefix": "", **options})


def clusters_of(o: Organism, **options) -> TokenClusters:
    clusters = measured(o, **options).clusters
    return clusters


def planted_heads(o: Organism, ids: np.ndarray) -> np.ndarray:
    """The head of each token's group; NaN for tokens of none."""
    groups = [o.truth.groups[token] for token in ids.tolist()]
    return np.array([np.nan if group < 0 else o.truth.group_heads[group][0] for group in groups])


@pytest.mark.parametrize(
    ("family", "bos"),
    [
        ("qwen3", False),
        *(slow(*case) for case in (("gemma2", True), ("neox", False), ("mixtral", True))),
    ],
)
def test_planted_groups_are_recovered_token_by_token(family, bos):
    o = organism(family, 1, bos=bos)
    found = clusters_of(o)
    planted = planted_heads(o, found.ids)
    np.testing.assert_array_equal(found.head, planted)
    assert len(found.ids) == o.model.config.vocab_size
    assert found.without_heads == 0
    for claim in found.claims:
        assert claim.verdict == "sufficient" and claim.value > 0.7
    assert found.neuron == o.truth.neurons[0] or len(o.truth.neurons) > 1


@pytest.mark.parametrize("family", ["neox", "gemma2", "gpt2"])
def test_one_batch_of_heads_equals_a_forward_pass_for_each(family):
    o = organism(family, 2)
    target, layer = target_of(o.model, o.tokenizer), o.truth.sink_layer
    neuron, mean = o.truth.neurons[0][-1], later_mean(target, o.natural(2, 12))
    means, first = mean.view(1, target.n_heads, -1), torch.ones(1).bool()
    tokens = [1, 17]
    for row, token in zip(head_activations(target, layer, neuron, mean, tokens), tokens, strict=True):
        for head in range(-1, target.n_heads):  # -1: no head is left as it is
            replaced = torch.arange(target.n_heads) != head
            with target.hooks(*replacing(target, means, replaced[None, None], first)):
                alone = neuron_at(target, layer, neuron, torch.tensor([[token]]))
            assert_close(row[head + 1], alone[0], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_no_single_head_and_not_in_layer_0_are_answers():
    spread = measured(organism("llama", 1, kind="spread"))
    assert spread.claims == () and "No single head" in str(spread) and spread.rows() == []
    late = measured(organism("llama", 1, kind="late_mark"))
    assert late.claims == () and "heads of layer 0 do not make the mark" in str(late)
