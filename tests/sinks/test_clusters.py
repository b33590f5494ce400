"""The clusters of `attack` against planted groups, and a run that is broken off."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from covering import slow
from organisms import Organism, organism

from sinkscope.errors import SinkscopeError
from sinkscope.results.parts import Head
from sinkscope.sinks.attack import clusters as module
from sinkscope.sinks.attack.attack import ClusterAttack, attack
from sinkscope.sinks.attack.clusters import head_activations

pytestmark = pytest.mark.few_texts


def measured(o: Organism, **options) -> ClusterAttack:
    return attack(o.model, tokenizer=o.tokenizer, **{"sequences": 0, **options})


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
    found = measured(o).clusters
    planted = planted_heads(o, found.ids)
    np.testing.assert_array_equal(found.head, planted)
    assert len(found.ids) == o.model.config.vocab_size
    (claim,) = found.claims
    assert claim.value == pytest.approx(np.isfinite(planted).mean()) and claim.verdict == "sufficient"
    assert [contrast.value for contrast in claim.contrasts] == pytest.approx([0, 0], abs=0.05)
    assert set(claim.subject) == {Head(0, int(head)) for head in planted[np.isfinite(planted)]}
    assert found.neuron.site == o.truth.neurons[0] or len(o.truth.neurons) > 1


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
