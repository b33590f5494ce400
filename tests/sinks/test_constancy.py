"""Why heads read a place: states, values and scores are those of plain hooks, masks and attention."""

from __future__ import annotations

import pytest
import torch
from raw_kit import blocks, part
from test_spikes import bundled  # noqa: F401  (a fixture)

from sinkscope.sinks.spikes.conditions import LAST, TEXTS, ordinary_positions
from sinkscope.sinks.spikes.constancy import constancy_of
from sinkscope.sinks.spikes.find import sinks_of

CAUSES = ("sight",)


@pytest.fixture(scope="module")
def spike(bundled):  # noqa: F811
    return sinks_of(bundled).spikes[0].reported


@pytest.fixture(scope="module")
def found(spike):
    return constancy_of(spike, spike.layers[0], CAUSES, 0)


def rotated(x, width: int, base: float) -> torch.Tensor:
    """Queries or keys after rotary, `[text head pos width]`."""
    x = x.unflatten(-1, (-1, width)).transpose(1, 2)
    angle = torch.arange(x.shape[2])[:, None] * base ** (-torch.arange(0, width, 2) / width)
    cos, sin = torch.cat([angle, angle], -1).cos(), torch.cat([angle, angle], -1).sin()
    turned = torch.cat([-x[..., width // 2 :], x[..., : width // 2]], -1)
    return x * cos + turned * sin


def plain(model, ids, mask) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    """What enters each layer, scores before the softmax, and the values of each layer."""
    read, handles = {"q_proj": [], "k_proj": [], "v_proj": []}, []
    for block in blocks(model):
        for name, outputs in read.items():
            module = part(block, "self_attn").get_submodule(name)
            handles.append(module.register_forward_hook(lambda _m, _a, out, outputs=outputs: outputs.append(out)))
    added = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)[:, None]
    with torch.no_grad():
        out = model(ids, attention_mask=added, output_hidden_states=True, use_cache=False)
    for handle in handles:
        handle.remove()
    width, base = model.config.head_dim, model.config.rope_parameters["rope_theta"]
    scores = []
    for query, key in zip(read["q_proj"], read["k_proj"], strict=True):
        query, key = rotated(query, width, base), rotated(key, width, base)
        scores.append(query @ key.repeat_interleave(query.shape[1] // key.shape[1], 1).mT / width**0.5)
    return torch.stack(out.hidden_states), scores, read["v_proj"]


def test_states_are_those_of_plain_masks(bundled, spike, found):  # noqa: F811
    ids = spike.survey.ids[:TEXTS]
    at, rows, length = ordinary_positions(ids, 0).at, torch.arange(TEXTS), ids.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril().expand(TEXTS, -1, -1)
    alone = causal.clone()
    alone[rows, at] = torch.arange(length) == at[:, None]
    alone[rows, at, at] = True
    states = plain(bundled.target.hf, ids, alone)[0][:, rows, at]
    has = spike.along(states[spike.peak + 1]) >= 0.5
    assert int(has.sum()) == found.texts < TEXTS  # some do not become such a place, and are left out
    for mask, said in ((alone, found.by_layer), (causal, found.ordinary_by_layer)):
        own = torch.nn.functional.normalize(plain(bundled.target.hf, ids, mask)[0][:, rows, at][:, has], dim=-1)
        pairs = torch.triu_indices(found.texts, found.texts, 1)
        between = (own[:, pairs[0]] * own[:, pairs[1]]).sum(-1).mean(1)
        torch.testing.assert_close(torch.tensor(said[:-1]), between[: len(said) - 1], atol=1e-4, rtol=1e-4)


def test_values_and_scores_are_those_of_plain_attention(bundled, spike, found):  # noqa: F811
    ids, model = spike.survey.ids[:TEXTS], bundled.target.hf
    at, rows, length = ordinary_positions(ids, 0).at, torch.arange(TEXTS), ids.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril().expand(TEXTS, -1, -1)
    _, scores, values = plain(model, ids, causal)
    heads = spike.survey.received(spike.place.mask).nanmean(-1) > 0.3
    of_value, of_score = {0: [], 1: []}, {0: [], 1: []}
    for layer in range(found.after, min(spike.layers[1] + 2, len(values))):
        norms = values[layer].unflatten(-1, (-1, model.config.head_dim)).norm(dim=-1)
        norms = norms.repeat_interleave(heads.shape[1] // norms.shape[2], 2)
        for head in heads[layer].nonzero().flatten().tolist():
            for key, where in enumerate((torch.zeros_like(at), at)):
                own = norms[..., head]
                of_value[key].append(own[rows, where] / own[:, 1:].median(1).values)
                above = torch.zeros(TEXTS, length - LAST)
                for query in range(LAST, length):
                    seen = scores[layer][:, head, query, : query + 1]
                    others = seen[:, 1:].sum(1) - torch.where(where > 0, seen[rows, where], 0)
                    above[:, query - LAST] = seen[rows, where] - others / (query - (where > 0).int())
                of_score[key].append(above.mean(1) ** 2 / (above**2).mean(1))
    assert len(of_value[0]) == found.heads
    for number, numbers in ((found.numbers[1], of_value), (found.numbers[2], of_score)):
        assert number.after == pytest.approx(float(torch.stack(numbers[0]).mean()), abs=1e-3)
        assert number.ordinary_after == pytest.approx(float(torch.stack(numbers[1]).mean()), abs=1e-3)


def test_a_spike_makes_a_constant_of_its_place(found):
    state, value, score = found.numbers
    assert state.after > 0.999 > state.before and state.ordinary_after < 0.8
    assert value.after < 0.1 and 0.8 < value.ordinary_after < 1.2
    assert score.after > 0.9 and score.ordinary_after < 0.7


def test_where_nothing_makes_another_such_place_nothing_is_said(spike):
    assert constancy_of(spike, spike.layers[0], (), 0) is None
