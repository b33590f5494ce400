"""The loop organism loops when, where and because of what its truth says; by stock transformers alone."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
from organisms import LoopOrganism, LoopPrompt, loop_organism
from torch import Tensor
from transformers import DynamicCache

LEAD = 40


@cache
def made(seed: int, induction: bool = True, hold: int = 2) -> LoopOrganism:
    return loop_organism(seed, induction=induction, hold=hold, n_layers=3, vocab_size=1024)


@torch.no_grad()
def generated(o: LoopOrganism, ids: Tensor, n: int) -> list[int]:
    mask = torch.ones_like(ids)
    out = o.model.generate(ids, attention_mask=mask, max_new_tokens=n, do_sample=False)
    return out[0, ids.shape[1] :].tolist()


@torch.no_grad()
def attentions(o: LoopOrganism, ids: list[int]) -> list[Tensor]:
    """Per layer [head, query, key]."""
    o.model.set_attn_implementation("eager")
    try:
        return [a[0] for a in o.model(torch.tensor([ids]), output_attentions=True).attentions]
    finally:
        o.model.set_attn_implementation("sdpa")


def shortest_period(tokens: list[int]) -> int:
    return next(p for p in range(1, len(tokens)) if tokens[p:] == tokens[:-p])


def turns(o: LoopOrganism, prompt: LoopPrompt, n: int) -> list[int]:
    """The prompt and `n` turns of its loop."""
    return prompt.ids[0].tolist() + o.expected(prompt, prompt.onset + n * prompt.period)


@pytest.mark.parametrize(("seed", "period", "delay"), [(0, 1, 0), (1, 2, 30), (3, 24, 20)])
def test_generate_loops_with_the_period_from_the_onset(seed: int, period: int, delay: int) -> None:
    o = made(seed)
    prompt = o.looping_prompt(period, delay=delay, lead=LEAD, start=17 * seed)
    tokens = generated(o, prompt.ids, delay + 2 * period + 5)
    assert tokens == o.expected(prompt, len(tokens))
    assert (prompt.period, prompt.onset) == (period, delay)
    assert shortest_period(tokens[delay:]) == period
    seen = set(prompt.ids[0].tolist())
    assert not seen & set(tokens[:delay])
    assert set(tokens[delay:]) <= seen
    assert all(o.walk(token, 1) != [after] for token, after in zip(tokens[delay:], tokens[delay + 1 :], strict=False))


def test_the_healthy_walk_and_the_control_repeat_nothing() -> None:
    ids = made(0).healthy_prompt(30)[0].tolist()
    ids += made(0).walk(ids[-1], 500)
    assert len(set(ids)) == len(ids)
    with torch.no_grad():
        best = made(0).model(torch.tensor([ids])).logits[0].softmax(-1).max(-1)
    assert best.indices[29:-1].tolist() == ids[30:]
    assert 0.3 < best.values.median() < 0.9
    control = made(0, induction=False)
    for prompt in (control.looping_prompt(2), control.looping_prompt(24, delay=30)):
        tokens = generated(control, prompt.ids, 60)
        assert tokens == control.walk(int(prompt.ids[0, -1]), 60)


@pytest.mark.parametrize("seed", range(3))
def test_planted_heads_attend_where_the_truth_says_and_no_others(seed: int) -> None:
    o = made(seed)
    ids = turns(o, o.looping_prompt(24), 16)
    truth, matches = o.attention(torch.tensor(ids)), o.matches(torch.tensor(ids))
    late = slice(-24, None)  # 19 occurrences: 19 / (19 + 1.5) of the attention
    assert matches[late].sum(1).tolist() == [19] * 24
    for layer, weights in enumerate(attentions(o, ids)):
        matched = (weights * matches).sum(-1)[:, late]
        previous = weights.diagonal(-1, 1, 2)
        for head in range(len(weights)):
            if (layer, head) in o.truth.locking_heads:
                assert matched[head].sub(19 / 20.5).abs().max() < 0.005
                assert (weights[head] - truth).abs().max() < 0.01
            else:
                assert matched[head].mean() < 0.5
            if (layer, head) in o.truth.previous_heads:
                assert previous[head].min() > 0.999
            else:
                assert previous[head].mean() < 0.5


def test_without_its_locking_heads_the_loop_ends_and_without_any_other_head_it_goes_on() -> None:
    o = made(2)
    prompt = o.looping_prompt(7)
    ids = torch.tensor([turns(o, prompt, 4)])

    def next_token(heads: list[tuple[int, int]]) -> int:
        model = copy.deepcopy(o.model)
        for layer, head in heads:
            model.model.layers[layer].self_attn.o_proj.weight.data[:, head * 96 : (head + 1) * 96] = 0
        with torch.no_grad():
            return int(model(ids).logits[0, -1].argmax())

    planted = {*o.truth.locking_heads, *o.truth.previous_heads}
    others = [(layer, head) for layer in range(3) for head in range(6) if (layer, head) not in planted]
    assert next_token(others) == next_token([]) == prompt.cycle[0]
    assert next_token(list(o.truth.locking_heads)) == o.walk(prompt.cycle[-1], 1)[0]
    assert next_token(list(o.truth.previous_heads)) == o.walk(prompt.cycle[-1], 1)[0]


@torch.no_grad()
def decode_after_cut(o: LoopOrganism, ids: list[int], kept: Tensor, n: int) -> list[int]:
    """Greedy tokens after `ids`, all but its last in the cache, of which only `kept` positions are left."""
    past = DynamicCache()
    o.model(torch.tensor([ids[:-1]]), past_key_values=past)
    for layer in past.layers:
        layer.keys, layer.values = layer.keys[:, :, kept], layer.values[:, :, kept]
    out = [ids[-1]]
    for position in range(len(ids) - 1, len(ids) - 1 + n):
        call = torch.tensor([[out[-1]]])
        logits = o.model(call, past_key_values=past, position_ids=torch.tensor([[position]])).logits
        out.append(int(logits[0, -1].argmax()))
    return out[1:]


@pytest.mark.parametrize(("seed", "hold", "period", "delay"), [(1, 1, 7, 0), (2, 2, 60, 0), (3, 3, 7, 20)])
def test_without_the_tail_in_the_cache_the_base_rule_moves_on(seed: int, hold: int, period: int, delay: int) -> None:
    o = made(seed, hold=hold)
    prompt = o.looping_prompt(period, delay=delay, lead=LEAD)
    ids = turns(o, prompt, 5)[: -(period // 2) or None]
    anchors = torch.arange(1 + LEAD)
    new = decode_after_cut(o, ids, anchors, period + 20)
    assert new == o.walk(ids[-1], period + 20)
    assert decode_after_cut(o, ids, torch.arange(len(ids) - 1), 10) != new[:10]


def test_the_loop_lives_on_as_many_copies_as_it_needs() -> None:
    """The cut leaves whole turns in the middle of the cache: `hold` of them restart the loop, one less does not."""
    o = made(3)
    prompt = o.looping_prompt(7, lead=LEAD)
    ids = turns(o, prompt, 8)
    for left in (1, 2):
        kept = torch.cat([torch.arange(1 + LEAD), torch.arange(LEAD + 8, LEAD + 8 + 7 * left)])
        new = decode_after_cut(o, ids, kept, 30)
        assert new == ((list(prompt.cycle) * 5)[:30] if left == 2 else o.walk(ids[-1], 30))


def test_with_a_reach_the_loop_lives_on_its_own_tail_and_the_prompt_may_stay() -> None:
    o = loop_organism(6, reach=40, n_layers=3, vocab_size=1024)
    prompt = o.looping_prompt(7)
    ids = turns(o, prompt, 12)
    assert generated(o, prompt.ids, 84) == ids[-84:]
    truth, weights = o.attention(torch.tensor(ids)), attentions(o, ids)
    assert all((weights[layer][head] - truth).abs().max() < 0.01 for layer, head in o.truth.locking_heads)
    kept = torch.arange(prompt.ids.shape[1])
    assert decode_after_cut(o, ids, kept, 30) == o.walk(ids[-1], 30)
    without = made(6)
    assert decode_after_cut(without, turns(without, without.looping_prompt(7), 12), kept, 30) == ids[-84:-54]
    with pytest.raises(ValueError, match="of the attention finds this cycle"):
        o.looping_prompt(60)


def test_seeds_draw_other_heads_and_the_same_seed_the_same_weights() -> None:
    again = loop_organism(0, n_layers=3, vocab_size=1024).model.state_dict()
    assert all(torch.equal(weight, again[name]) for name, weight in made(0).model.state_dict().items())
    assert len({made(seed).truth.locking_heads for seed in range(5)}) == 5
    for seed in range(5):
        truth = made(seed).truth
        assert 2 <= len(truth.locking_heads) <= 3
        assert all(layer >= 1 for layer, _ in truth.locking_heads)
        assert all(layer == 0 for layer, _ in truth.previous_heads)
        assert len(set(truth.ring)) == len(truth.ring) == 1020
    assert made(0, induction=False).truth.locking_heads == ()


def test_text_reads_back_as_the_ids_and_impossible_prompts_are_refused() -> None:
    o = made(0)
    ids = o.looping_prompt(7).ids[0].tolist()
    assert o.tokenizer(o.tokenizer.decode(ids[1:]))["input_ids"] == ids
    with pytest.raises(ValueError, match=r"0\.40 of the attention finds this cycle"):
        o.looping_prompt(7, repeats=2)
    with pytest.raises(ValueError, match="the ring has 1020"):
        o.healthy_prompt(5000)
