"""The clusters of `attack` against planted groups, and its batch of single heads against ablation head by head."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from covering import slow
from organisms import Organism, organism
from raw_kit import inputs_edited
from torch.testing import assert_close

import sinkscope
from sinkscope.errors import SinkscopeError
from sinkscope.measure import Setup
from sinkscope.models.wrapped import target_of
from sinkscope.sinks.attack.attack import ClusterAttack, cluster_attack
from sinkscope.sinks.attack.clusters import HeadWork, TokenClusters, later_mean


def measured(o: Organism, **options) -> ClusterAttack:
    return cluster_attack(o.model, tokenizer=o.tokenizer, **{"sequences": 0, "prefix": "", **options})


def clusters_of(o: Organism, **options) -> TokenClusters:
    return measured(o, **options).clusters


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
    assert (found.silent, found.unserved, found.without_heads) == (int(np.isnan(planted).sum()), 0, 0)
    assert found.neuron == o.truth.neurons[0] or len(o.truth.neurons) > 1


def one_forward(o: Organism, layer: int, neuron: int, token: int, head: int, mean: torch.Tensor) -> float:
    """The neuron's activation in a forward pass of its own: what other heads write is exchanged by hand."""
    target, values = target_of(o.model, o.tokenizer), []

    def exchange(z: torch.Tensor) -> torch.Tensor:
        others = torch.arange(target.n_heads) != head
        return torch.where(others.repeat_interleave(len(mean) // target.n_heads), mean, z)

    out_proj, down = target.sub(0, target.adapter.o), target.sub(layer, target.adapter.down)
    with inputs_edited(out_proj, exchange), inputs_edited(down, lambda x: values.append(x) or x), torch.no_grad():
        o.model(torch.tensor([[token]]))
    return float(values[0].flatten()[neuron])


@pytest.mark.parametrize("family", ["neox", "gemma2", "gpt2"])
def test_one_batch_of_heads_equals_a_forward_pass_for_each(family):
    o = organism(family, 2)
    target, layer = target_of(o.model, o.tokenizer), o.truth.sink_layer
    neuron, mean = o.truth.neurons[0][-1], later_mean(target, o.natural(2, 12))
    tokens = [1, 17]
    shares = HeadWork(layer, neuron, 2.0, mean).shares(target, tokens)
    for row, token in zip(shares, tokens, strict=True):
        alone = [one_forward(o, layer, neuron, token, head, mean) for head in range(-1, target.n_heads)]
        assert_close(2.0 * row[1:], torch.tensor(alone), rtol=1e-4, atol=1e-4)


def test_later_mean_is_that_of_later_positions_head_by_head():
    o = organism("qwen2", 1)
    target, ids, inputs = target_of(o.model, o.tokenizer), o.natural(2, 10), []
    with inputs_edited(target.sub(0, "self_attn.o_proj"), lambda z: inputs.append(z) or z), torch.no_grad():
        o.model(ids)
    assert_close(later_mean(target, ids), inputs[0][:, 1:].flatten(0, 1).mean(0))


def test_no_single_head_and_not_in_layer_0_are_answers():
    spread = measured(organism("llama", 1, kind="spread"))
    assert not spread.clusters.heads and spread.clusters.unserved > 100
    assert "No single head" in str(spread) and spread.rows() == []
    for late in (organism("llama", 1, kind="late_mark"), organism("gpt2", 1)):
        result = measured(late)
        assert not result.clusters.heads
        grouped = sum(group >= 0 for group in late.truth.groups.values()) or len(result.clusters.ids)
        assert result.clusters.without_heads == grouped and "heads of layer 0 do not make the mark" in str(result)


def test_tokens_of_a_head_are_sorted_and_whole():
    o = organism("mistral", 2)
    result = measured(o)
    found = result.clusters
    head = found.heads[0]
    mine = list(found.tokens_of(head))
    assert set(mine) == set(found.ids[planted_heads(o, found.ids) == head].tolist())
    assert (np.diff(found.best[mine]) <= 0).all()
    row = result.rows()[0]
    assert (row["head"], row["tokens"]) == (head, len(mine))


def test_a_killed_run_goes_on_with_the_same_table(tmp_path, monkeypatch):
    o = organism("llama", 1)
    monkeypatch.setattr("sinkscope.sinks.attack.clusters.ROWS", 60)
    whole = measured(o).to_dict()["result"]
    real, calls = HeadWork.__call__, []

    def dying(self, target, items):
        calls.append(items)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real(self, target, items)

    monkeypatch.setattr(HeadWork, "__call__", dying)
    with pytest.raises(KeyboardInterrupt):
        measured(o, resume=tmp_path / "r")
    assert measured(o, resume=tmp_path / "r").to_dict()["result"] == whole
    assert sum(map(len, calls[:3] + calls[4:])) == len(whole["clusters"]["ids"])  # none twice
    with torch.no_grad():
        o.model.model.layers[-1].mlp.down_proj.weight[0, 0] += 1
    with pytest.raises(SinkscopeError, match="model was"):
        measured(o, resume=tmp_path / "r")


def test_some_tokens_are_what_they_are_among_all():
    o = organism("llama", 0)
    every, token = clusters_of(o), o.tokens_of(0)[0]
    one = clusters_of(o, tokens=[o.tokenizer.decode([token])])
    assert one.ids.tolist() == [token]
    assert (one.head[0], one.best[0]) == (every.head[token], every.best[token])


@pytest.mark.slow
def test_bundled_model_learned_its_clusters():
    made = Setup.open()
    tokenizer = made.target.tokenizer
    folder = Path(str(sinkscope.__file__)).parent / "models" / "bundled"
    circuit = json.loads((folder / "circuit.json").read_text())
    heads = {mark["group"]: mark["head"] for mark in circuit["marking_heads"]}
    words = [tokenizer.decode([token]) for token in range(300, 900, 5)]
    single = [word for word in words if len(tokenizer(word, add_special_tokens=False)["input_ids"]) == 1]
    found = cluster_attack(made.target.hf, tokenizer=tokenizer, tokens=single, sequences=0).clusters
    truth = np.array([heads.get(circuit["group_of_token"][token], np.nan) for token in found.ids.tolist()])
    right = (found.head == truth) | (np.isnan(found.head) & np.isnan(truth))
    assert len(truth) > 50 and right.mean() >= 0.95
