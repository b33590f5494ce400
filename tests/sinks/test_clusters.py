"""The clusters of `attack` against planted groups, and its batch of single heads against ablation head by head."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from covering import slow
from organisms import Organism, organism
from raw_kit import blocks, down, inputs_edited, part
from torch.testing import assert_close

from sinkscope.errors import SinkscopeError
from sinkscope.measure import Setup
from sinkscope.sinks.attack import clusters as module
from sinkscope.sinks.attack.attack import ClusterAttack, attack
from sinkscope.sinks.attack.clusters import TokenClusters, head_activations
from sinkscope.sinks.find.spikes import sink_spike
from sinkscope.sinks.marking_heads import Replacement

pytestmark = pytest.mark.few_texts


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
        assert (claim.role, claim.verdict) == ("marks", "sufficient") and claim.value > 0.7
    assert found.neuron == o.truth.neurons[0] or len(o.truth.neurons) > 1


@pytest.mark.parametrize("family", ["neox", "gemma2", "gpt2"])
def test_one_batch_of_heads_equals_a_plain_pass_for_each(family):
    o = organism(family, 2)
    setup = Setup.open(o.model, tokenizer=o.tokenizer)
    sink = sink_spike(setup)
    neuron, heads, tokens = sink.neurons[0], setup.n_heads, [1, 17]
    model = Replacement.of(setup, neuron.layer, [neuron], sink.spike.place)
    mixed = part(blocks(o.model)[0], "self_attn.o_proj", "attention.dense", "attn.c_proj")
    seen: list[torch.Tensor] = []

    def see(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor)
        return tensor

    with torch.no_grad(), inputs_edited(mixed, see):
        o.model(setup.ids)
    mean = seen[0][:, 1:].mean((0, 1))
    head_of = torch.arange(heads).repeat_interleave(len(mean) // heads)
    for row, token in zip(head_activations(model, tokens), tokens, strict=True):
        for head in range(-1, heads):  # -1: no head is left as it is
            alone = functools.partial(torch.where, head_of == head, other=mean)
            with torch.no_grad(), inputs_edited(mixed, alone), inputs_edited(down(blocks(o.model)[neuron.layer]), see):
                o.model(torch.tensor([[token]]))
            assert_close(row[head + 1], seen[-1].flatten()[neuron.neuron], rtol=1e-4, atol=1e-4)


def test_a_run_that_was_broken_off_goes_on_with_the_same_table(tmp_path, monkeypatch):
    o = organism("llama", 1)
    monkeypatch.setattr("sinkscope.sinks.attack.clusters.ROWS", 60)
    whole = measured(o).to_dict()["result"]
    asked = []

    def breaking(*args):
        asked.append(args[-1])
        if len(asked) == 4:
            raise KeyboardInterrupt
        return head_activations(*args)

    monkeypatch.setattr(module, "head_activations", breaking)
    with pytest.raises(KeyboardInterrupt):
        measured(o, resume=tmp_path)
    assert measured(o, resume=tmp_path).to_dict()["result"] == whole
    del asked[3]  # which is asked again
    assert [token for tokens in asked for token in tokens] == whole["clusters"]["ids"]
    with torch.no_grad():
        o.model.model.layers[-1].mlp.down_proj.weight[0, 0] += 1
    with pytest.raises(SinkscopeError, match="model was"):
        measured(o, resume=tmp_path)
