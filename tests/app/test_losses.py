"""How often continuations loop, and what cache policies lose: the two measurements that compare with a control."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import sinkscope as ss
from sinkscope.bench import cache_loss, loop_rate
from sinkscope.bench.cache_loss import CacheLoss, PolicyLoss, RandomSlots
from sinkscope.errors import SinkscopeError
from sinkscope.measure import Setup
from sinkscope.serving.generate import Generated


@pytest.fixture(scope="module")
def setup() -> Setup:
    return Setup.open(loading="whole")


def test_loops_are_counted_for_each_way_to_continue(monkeypatch: pytest.MonkeyPatch, setup: Setup) -> None:
    """Greedy loops in all openings, guarded in one, drawn in none; the text's own continuation is held against them."""
    asked: list[dict[str, Any]] = []

    def fake(_target: Any, prompts: list[str], **given: Any) -> list[Generated]:
        asked.append({"prompts": prompts, **given})
        looping = {(False, 0.0): 4, (True, 0.0): 1, (False, 1.0): 0}[given["guard"], given["temperature"]]
        rows = [[7, 8, 9] * 20 if i < looping else list(range(60)) for i in range(4)]
        return [Generated(p, "", row, 16, []) for p, row in zip(prompts, rows, strict=True)]

    monkeypatch.setattr(loop_rate, "generate", fake)
    found = ss.loop_rate.on(setup, openings=4, opening=16, max_new_tokens=60)
    assert [(s.way, s.loops) for s in found.shares] == [("greedy", 4), ("guard", 1), ("drawn", 0), ("text", 0)]
    assert (
        "Of 4 openings, 4 end in a loop when they are continued greedily, and 1 under the guard" in found.conclusion()
    )
    greedy = found.shares[0]
    assert greedy.share == 1 and greedy.margin == pytest.approx(2 * (0.75 * 0.25 / 8) ** 0.5)
    assert len(asked) == 3 and len({tuple(one["prompts"]) for one in asked}) == 1
    assert all(one["max_new_tokens"] == 60 and one["bos"] is True for one in asked)
    ids = setup.tokenizer(asked[0]["prompts"][0], add_special_tokens=False)["input_ids"]
    assert ids == setup.ids[0, 1:16].tolist()  # the opening is the beginning of the text


@pytest.mark.parametrize(("row", "loops"), [([1, 2] * 30, True), (list(range(40)), False), ([*range(99), 3, 3], False)])
def test_what_counts_as_a_loop(row: list[int], loops: bool) -> None:
    assert loop_rate._share("greedy", [row]).loops == loops


def test_nothing_is_lost_with_the_whole_cache_and_less_than_by_chance_with_a_part(setup: Setup) -> None:
    found = ss.cache_loss.on(setup, policies=["tova", "streaming"], budgets=[1.0, 0.3], count=2, prompt=160, answer=6)
    assert [(x.policy, x.budget) for x in found.losses][:2] != [] and len(found.losses) == 4
    for x in found.losses:
        if x.budget == 1.0:
            assert x.kl < 1e-3 and x.top_1 == 1 and x.mass_lost < 0.01  # as much as was read, in later steps
        else:
            assert x.random_kl is not None and x.random_lost is not None
            assert 0 < x.kl < 0.5 * x.random_kl and 0.02 < x.mass_lost < x.random_lost
    best = found.best[0]
    assert best.budget == 0.3 and best.kl == min(x.kl for x in found.losses if x.budget == 0.3)
    assert f"{best.policy} stays nearest" in found.conclusion()


def test_the_divergence_is_that_of_a_cache_without_these_tokens(setup: Setup) -> None:
    """StreamingLLM by hand: the model with the middle of the prompt hidden, against the whole."""
    model, count = setup.target.hf, 2
    found = ss.cache_loss.on(setup, policies=["streaming"], budgets=[0.25], count=count, prompt=80, answer=4)
    ids = cache_loss.text_rows(setup.tokenizer, setup.text, count, 84, setup.bos)
    want: list[float] = []
    for row in ids:
        whole = model(row[None]).logits[0].double().log_softmax(-1)
        kl = [0.0]
        for step in range(1, 4):  # the token before was read with 20 in the cache: 4 first ones and the latest
            at = 80 + step - 1
            mask = torch.full((1, 1, at + 1, at + 1), -torch.inf).triu(1)
            for query in range(80, at + 1):
                mask[..., query, 4 : query - 16] = -torch.inf
            hidden = model(row[None, : at + 1], attention_mask=mask).logits[0, -1].double().log_softmax(-1)
            kl.append(float((whole[at].exp() * (whole[at] - hidden)).sum()))
        want.append(sum(kl) / 4)
    assert found.losses[0].kl == pytest.approx(sum(want) / count, rel=0.02)
    assert found.losses[0].kl > 1e-3


def test_random_slots_are_as_many_as_the_budget_and_stay(setup: Setup) -> None:
    kept: list[Any] = []
    ids = setup.ids[:1]
    with RandomSlots(budget=16).on(setup.target.hf), torch.no_grad():
        out = setup.target.hf(ids, use_cache=True)
        for _ in range(2):
            out = setup.target.hf(ids[:, :1], past_key_values=out.past_key_values, use_cache=True)
            kept.append([layer.pos.clone() for layer in out.past_key_values.layers])
    first, second = kept[0][0][0], kept[1][0][0]
    assert first.shape[-1] == 17  # the budget and the step's own token
    assert all(len({*a.tolist()} & {*b.tolist()}) >= 15 for a, b in zip(first, second, strict=True))
    assert any({*a.tolist()} != {*first[0].tolist()} for a in first[1:]) or len(first) == 1
    assert {*kept[0][1][0][0].tolist()} != {*first[0].tolist()}


def test_a_policy_that_refuses_or_does_nothing_is_named(setup: Setup) -> None:
    found = ss.cache_loss.on(
        setup, policies=["snapkv", "progressive", "h2o"], budgets=[0.25], count=1, prompt=96, answer=3
    )
    assert len(found.refused) == 1 and found.refused[0].startswith("snapkv: SnapKV: budget=0.25 of a prompt of 96")
    assert found.idle == ("progressive",) and found.best[0].policy == "h2o"
    told = found.text()
    assert "progressive takes nothing away within the first 3 tokens" in told and "Not measured: snapkv" in told
    with pytest.raises(SinkscopeError, match="nosuch"):
        ss.cache_loss.on(setup, policies=["nosuch"], count=1, prompt=64, answer=2)


def test_the_best_is_that_of_each_budget() -> None:
    def loss(policy: str, budget: float, kl: float) -> PolicyLoss:
        return PolicyLoss(policy, budget, kl, 0.1, 1.0, kl, 9.0, 0.0, 1.0)

    losses = (loss("a", 0.5, 1.0), loss("b", 0.5, 2.0), loss("b", 0.1, 3.0), loss("a", 0.1, 4.0), loss("i", 0.1, 0.0))
    found = CacheLoss(texts=1, prompt_tokens=9, answer_tokens=2, losses=losses)
    assert [(x.policy, x.budget) for x in found.best] == [("b", 0.1), ("a", 0.5)]
    assert found.best[0].margin == 0.2 and replace(found.best[0], kl_error=None).margin is None
