"""Budgets of layers, heads and rows: what is always kept stays, and the numbers are those that were asked for."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from kv_kit import model_of, prompts, run_policy, shallow_of
from refusals import refused
from torch import Tensor

from sinkscope.generation.progressive import Progressive
from sinkscope.kv import H2O, TOVA, AdaKV, LayerMoment, PerLayer, Policy, Pyramid, SnapKV, StreamingLLM


@dataclass(frozen=True, kw_only=True)
class Halved(Policy):
    """Keeps the least worthy tokens, half as many in each higher layer."""

    def scores(self, at: LayerMoment):
        return -at.kv.pos.float()

    def layer_budget(self, at: LayerMoment):
        return at.rows.total[0] >> at.layer


def _kept(policy: Policy, lengths: list[int], steps: int = 1) -> list[Tensor]:
    """The columns `[row head column]` that each layer holds after the prompts and some tokens."""
    ids, mask = prompts(lengths, steps)
    _, kept = run_policy(policy, model_of("llama", num_hidden_layers=4), ids, mask, max(lengths))
    return kept[-1]


def test_a_layers_own_budget_keeps_what_is_protected():
    for layer, kept in enumerate(_kept(Halved(budget=24, first=1, last=2), [30, 30])):
        for head in kept.flatten(0, 1):
            assert head.nonzero().flatten().tolist() == [*range((24 >> layer) - 2), 28, 29, 30]


def test_a_layers_budget_below_what_is_protected_is_refused():
    with refused(r"layer 2 has a budget of 3 tokens, which is below the 4 tokens that are always kept: raise"):
        _kept(Halved(budget=12, first=2, last=2), [30, 26])


def test_the_pyramid_keeps_what_its_line_says():
    """By hand: 20 of 24 tokens are free; with beta 4 the lowest layer keeps 35 of them, or what the prompt holds."""
    free_tokens = {60: [35, 25, 15, 5], 28: [24, 21, 18, 16]}  # the second: 24 fit, so the highest keeps 16
    for length, expected in free_tokens.items():
        policy = Pyramid(budget=24, beta=4, window=3, first=1)
        for free, kept in zip(expected, _kept(policy, [length]), strict=True):
            for head in kept[0]:
                held = head.nonzero().flatten().tolist()
                assert len(held) == 4 + free + 1 and {0, *range(length - 3, length + 1)} <= set(held)


PER_LAYER = [
    StreamingLLM(),
    H2O(),
    TOVA(last=1),
    SnapKV(window=3, kernel=3, every=2),
    AdaKV(window=3),
    Progressive(every=2, after=0),
]


@pytest.mark.parametrize("policy", PER_LAYER, ids=repr)
def test_per_layer_keeps_in_each_layer_what_its_budget_says(policy):
    model, (ids, mask) = shallow_of("llama"), prompts([26, 19], 5)

    def run(entered):
        return run_policy(entered, model, ids, mask, 26)

    alike, alone = run(PerLayer(policy, [0.4, 0.4])), run(replace(policy, budget=0.4))
    assert torch.equal(alike[0], alone[0])
    _, kept = run(PerLayer(policy, [12, 0.4]))
    first = run(replace(policy, budget=12))[1][0][0]  # before anything that another layer kept is read
    assert torch.equal(kept[0][0], first) and not torch.equal(kept[0][0], alone[1][0][0])
    assert kept[0][1].sum(-1).float().mean(1).tolist() == alone[1][0][1].sum(-1).float().mean(1).tolist()
