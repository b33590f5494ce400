"""LoopGuard on a model: what it takes from a cache, from whom, when, and what is left as it was."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch
from covering import each_other, slow
from guard_kit import EAGER, KINDS, SMALL, dense, feed, padded, tiny
from organisms.decoders import decoder
from torch.testing import assert_close
from transformers import DynamicCache, LogitsProcessor

from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.interventions import SinkPatch
from sinkscope.kv import H2O, StreamingLLM
from sinkscope.kv.loopguard import LoopGuard, ranges_of, steer, tokens_to_keep
from sinkscope.kv.loopguard import guard as guard_module
from sinkscope.kv.loopguard.steer import Steering, draw, generate_in_pieces
from sinkscope.opening.live import target_of

ALWAYS = LoopGuard.paper(**SMALL, variant="always", monitor={"every": 9, "warmup": 0, "cooldown": 0})
TAIL = LoopGuard.paper(**SMALL, variant="tail", monitor=EAGER)
LOOP = [11, 12, 13]


def looping(after: int, steps: int) -> list[int]:
    return [*torch.randperm(40)[:after].add(20).tolist(), *(LOOP * steps)][:steps]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_kept_is_the_plan_and_later_logits_are_those_of_a_masked_full_cache(kind):
    stock, model = tiny(), tiny(kind)
    prompt, mask = padded(14, 9)
    new = torch.tensor([looping(5, 40), looping(21, 40)])
    with ALWAYS.on(model) as run:
        got = feed(model, prompt, mask, new)
    for row, length in enumerate((14, 9)):
        events = [e for e in run.events if e.row == row]
        assert [e.data["generated"] for e in events] == [9, 18, 27, 36] and {e.kind for e in events} == {"guard"}
        held = []
        seen = 0
        for event in events:
            held += range(seen, seen := event.position + 1)
            assert seen == length + event.data["generated"] and event.step == event.data["generated"]
            made = tokens_to_keep(held, seen, event.data["bad"], ALWAYS.retention(length), event.data["level"])
            assert event.data["kept"] == ranges_of(made) and event.data["cached_before"] == len(held)
            held = made
            assert event.data["kept_count"] == len(held) <= SMALL["budget"]
        assert [e.data["level"] for e in events] == [0, 1, 2, 3]
        assert events[-1].data["period"] == 3 and events[-1].data["bad"][-1][1] == events[-1].position + 1
        want = dense(stock, torch.cat([prompt[row, -length:], new[row]]), events)[length - 1 :]
        assert_close(got[row], want, atol=1e-5, rtol=1e-5)
        plain = dense(stock, torch.cat([prompt[row, -length:], new[row]]), [])[length - 1 :]
        assert (got[row] - plain).abs().max() > 1e-2, "the cuts made no difference, so nothing was tested"


def test_only_the_rows_that_loop_are_cut():
    model = tiny()
    prompt, mask = padded(10, 13, 6)
    new = torch.tensor([looping(3, 36), looping(19, 36), looping(36, 36)])
    stock = feed(model, prompt, mask, new)
    with TAIL.on(model) as run:
        got = feed(model, prompt, mask, new)
    first = {row: min(e.data["generated"] for e in run.events if e.row == row) for row in (0, 1)}
    assert first[0] < 19 < first[1] and {e.row for e in run.events} == {0, 1}
    assert_close(got[2], stock[2], atol=1e-5, rtol=1e-5)
    for row in range(3):
        assert row == 2 or torch.allclose(got[row, : first[row]], stock[row, : first[row]], atol=1e-5)
        assert row == 2 or not torch.allclose(got[row, first[row] + 1 :], stock[row, first[row] + 1 :], atol=1e-3)


@pytest.mark.parametrize("kind", ["hf", "bridge"])
def test_without_a_trigger_generation_is_the_stock_one_bit_for_bit(kind):
    model = tiny(kind)
    prompt, mask = padded(12)
    settings = {"max_new_tokens": 16, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    hf = target_of(model).hf
    want = hf.generate(input_ids=prompt, attention_mask=mask, **settings)
    for between in ("full", "window"):  # shorter than the warm-up and the budget
        with LoopGuard(between=between).on(model) as run:
            got = hf.generate(input_ids=prompt, attention_mask=mask, **settings)
        assert torch.equal(got.sequences, want.sequences) and run.events == []
        for a, b in zip(got.logits, want.logits, strict=True):
            assert torch.equal(a, b) if kind != "bridge" else torch.allclose(a, b, atol=1e-5)


def test_a_new_turn_begins_anew(model):
    prompt, mask = padded(8)
    half = torch.tensor([LOOP * 2])  # too few copies in each turn, enough in both together
    with TAIL.on(model) as run:
        feed(model, prompt, mask, torch.cat([half, half], 1))
    assert run.events
    cache = DynamicCache()
    with TAIL.on(model) as run:
        feed(model, prompt, mask, half, cache)
        feed(model, torch.tensor([LOOP]), torch.ones(1, 3, dtype=torch.long), half, cache)
    assert run.events == []


def test_between_window_is_streaming_llm_until_a_loop_comes(model):
    prompt, mask = padded(20, 31)
    new = torch.tensor([looping(30, 30), looping(30, 30)])
    with StreamingLLM(budget=24, first=4).on(model):
        want = feed(model, prompt, mask, new)
    with LoopGuard.paper(**SMALL, between="window", variant="tail", monitor=EAGER).on(model) as run:
        got = feed(model, prompt, mask, new)
        more = feed(model, prompt, mask, torch.tensor([looping(10, 40)] * 2))
    assert torch.equal(got, want) and {e.data["generated"] > 10 for e in run.events} == {True} and len(more)
    assert all(peak <= 31 for usage in run.usage for peak in usage.peak_tokens)
    assert all(mean <= 26 for usage in run.usage for mean in usage.mean_tokens)


def test_composed_with_a_patch_and_a_policy(model):
    model.model.layers[1].mlp.down_proj.weight.data[:, 3] *= 8
    prompt, mask = padded(20)
    new = torch.tensor([looping(3, 40)])
    both = SinkPatch(sites=[(1, 3)]) | StreamingLLM(budget=28) | TAIL
    with both.on(model) as run:
        feed(model, prompt, mask, new)
    assert {"patched", "guard"} <= set(run.counts) and run.usage[0].peak_tokens[0] <= 29
    assert all(e.data["cached_before"] <= 29 for e in run.events if e.kind == "guard")
    with (
        pytest.raises(UnsupportedError, match="positions="),
        (StreamingLLM(budget=28, positions="rebased") | TAIL).on(model),
    ):
        feed(model, prompt, mask, new)


def test_a_fraction_of_the_prompt(model):
    prompt, mask = padded(40, 60)
    guard = LoopGuard.paper(budget=0.25, anchors=4, window=16, variant="tail", monitor=EAGER)
    with guard.on(model) as run:
        feed(model, prompt, mask, torch.tensor([looping(3, 30)] * 2))
    counts = {row: {e.data["kept_count"] for e in run.events if e.row == row} for row in (0, 1)}
    assert max(counts[0]) <= 10 < max(counts[1]) <= 15
    with pytest.raises(SinkscopeError, match=r"budget=2 leaves .*\(0.25 of a prompt of 8 tokens"), guard.on(model):
        feed(model, *padded(8), torch.tensor([looping(3, 30)]))


def test_anchors_hold_beside_a_policy_and_its_first_tokens_beside_a_guard(model):
    prompt, mask = padded(60)
    new = torch.tensor([looping(3, 40)])
    for policy, anchors, first in (
        (StreamingLLM(budget=40, first=4), 12, 12),
        (StreamingLLM(budget=20, first=4), 12, 10),  # half of the budget is left for the latest tokens
        (H2O(budget=40), 12, 12),
    ):
        guard = LoopGuard.paper(budget=24, anchors=anchors, window=16, variant="tail", monitor=EAGER)
        cache = DynamicCache()
        with (policy | guard).on(model) as run:
            feed(model, prompt, mask, new, cache)
        assert run.events and all(e.data["kept"][0][0] == 0 and e.data["kept"][0][1] >= first for e in run.events)
        held = cache.layers[0]
        for head in held.pos[0]:
            kept = sorted(head[head >= 0].tolist())
            assert kept[:first] == list(range(first)) and len(kept) <= policy.budget + 1
            assert kept[first] > first or policy == H2O(budget=40), (
                "only the anchors are kept of the prompt's beginning"
            )


def test_a_ban_covers_the_n_grams_of_the_loop_alone():
    """Three tokens long at the second rung, with pairs added at the last, and new ones only after it ended."""
    steering = Steering()
    steering.ban([1, 2, 3, 1, 2, 3, 1], rung=2, now=10, until=50)
    asked = ([9, 1, 2], [9, 9, 1, 2], [9, 2, 3], [9, 3, 1], [9, 2, 1], [2, 3, 9], [2])
    assert [steering.banned(ids) for ids in asked] == [[3], [3], [1], [2], [], [], []]
    steering.ban([3, 7], rung=9, now=50, until=60)
    assert steering.banned([9, 2, 3]) == [1, 7] and (steering.banned_until, steering.penalty) == (60, 45)
    steering.ban([3, 7], rung=9, now=61, until=90)
    assert steering.banned([9, 2, 3]) == [7]


def stubborn(bias: float):
    """A model that always prefers token 33, whatever is in its cache: only a ban or a drawn token help."""
    model = tiny(num_hidden_layers=1)
    vocab = len(model.lm_head.weight)
    model.lm_head.bias = torch.nn.Parameter(bias * torch.nn.functional.one_hot(torch.tensor(33), vocab).float())
    model.lm_head.weight.data /= 10
    model.generation_config.eos_token_id = None
    return model


def eager_guard(**fields) -> LoopGuard:
    monitor = {"warmup": 0, "tail_shortest": 12, "cooldown": 20}
    return LoopGuard(**{"budget": 64, "anchors": 4, "window": 64, "monitor": monitor, **fields})


@pytest.mark.parametrize("escalate", ["none", "ban", "draw"])
def test_the_rungs_of_the_answer_to_a_loop(escalate, monkeypatch):
    """Token 33 leads by 8: the first alarm only cuts, 5 are too little at the second, and 10 end it at the third."""
    monkeypatch.setattr(guard_module, "DRAW_FROM", 3)
    monkeypatch.setattr(guard_module, "DRAWS", 3)
    monkeypatch.setattr(steer, "MIN_P", 0.0)
    model = stubborn(8.0)
    prompt, mask = padded(10)
    with eager_guard(escalate=escalate).on(model) as run:
        new = model.generate(prompt, attention_mask=mask, max_new_tokens=150, pad_token_id=0)[0, 10:].tolist()
    done = [e.data["escalated"] for e in run.events]
    assert [e.data["generated"] for e in run.events[:3]] == [12, 33, 54], "three copies and 12 tokens, then a cooldown"
    if escalate == "none":
        assert set(new) == {33} and set(done) == {None}
        return
    assert done[:4] == [None, "ban", "ban", escalate]
    others = [i for i, token in enumerate(new) if token != 33]
    assert others[0] == 54 and max(b - a for a, b in pairwise([*others, 150])) <= 3, "no three in a row from there on"


def test_what_is_taken_back_is_banned_at_once_and_forgotten():
    model = stubborn(4.0)
    prompt, mask = padded(10)
    options = {"attention_mask": mask, "max_new_tokens": 100, "do_sample": False, "pad_token_id": 0}
    with eager_guard().on(model) as run:
        new = generate_in_pieces(run, model, prompt, **options)[0, 10:].tolist()
    first, second = run.events[:2]
    assert (first.data["escalated"], first.data["taken_back"], first.data["bad"]) == ("ban", 11, [(11, 22)])
    assert new[:3] == [33] * 3 and new[3] != 33 and len(new) == 100, "5 are enough, and no four in a row are written"
    assert second.data["bad"][-1] == (second.position + 1 - second.data["taken_back"], second.position + 1)


class Allow(LogitsProcessor):
    """A processor that comes after the guard and forbids everything else."""

    def __init__(self, allowed: list[int]):
        self._allowed = allowed

    def __call__(self, input_ids, scores):
        left = torch.full_like(scores, -torch.inf)
        left[:, self._allowed] = scores[:, self._allowed]
        return left


@pytest.mark.parametrize(("allowed", "sample"), each_other([[33], [33, 34], list(range(1, 90))], [False, True]))
def test_a_later_processor_never_leaves_a_row_without_a_token(allowed, sample, monkeypatch):
    """It may forbid what is drawn, or allow only what is banned: token 0 is written in neither case."""
    monkeypatch.setattr(guard_module, "DRAW_FROM", 1)
    monkeypatch.setattr(steer, "PENALTY", 1e4)
    model = stubborn(8.0)
    prompt, mask = padded(10)
    options = {"attention_mask": mask, "max_new_tokens": 60, "do_sample": sample, "pad_token_id": 1}
    with eager_guard().on(model) as run:
        made = model.generate(prompt, logits_processor=[Allow(allowed)], **options)[0, 10:].tolist()
    assert run.events and set(made) <= set(allowed)
    if len(allowed) > 2:
        assert [33] * 4 not in [made[i : i + 4] for i in range(33, 57)], "nor is a banned token drawn"


def test_draws_are_likely_ones():
    logits = torch.tensor([2.0, 1.0, -1.0, -0.5])
    random = torch.Generator().manual_seed(0)
    drawn = []
    for _ in range(200):
        here = logits.clone()
        draw(here, random)
        drawn.append(int(here.argmax()))
        assert (here != logits).sum() == 1
    share = drawn.count(0) / 200
    assert set(drawn) == {0, 1} and abs(share - torch.tensor(1.0).sigmoid()) < 0.1, (
        "exp(-3) and exp(-2.5) are below a tenth"
    )


def test_anchors_keep_no_copies_and_the_copy_that_has_begun_stays(model):
    retention = LoopGuard(budget=32).retention(6)
    assert retention.anchors == 8, "a quarter of a small budget"
    prompt, mask = padded(6)
    new = torch.tensor([[*(LOOP * 20)][:14]])  # from position 6 on, in the middle of the fifth copy
    with LoopGuard(monitor={"tail_shortest": 14}, rewind=False).on(model) as run:
        feed(model, prompt, mask, new)
    (event,) = run.events
    assert event.data["bad"] == [(6, 18)] and event.data["kept"] == [(0, 6), (18, 20)]


@pytest.mark.parametrize("family", ["lfm2", slow("qwen3_next")])
def test_of_a_hybrid_the_attention_is_cut_and_the_state_stays(family):
    """After a cut the attending layers lack the loop, and the first layer's state has it to the bit, as uncut."""
    ids = torch.tensor([[5, 6, 7, 8, *LOOP * 12]])
    model = decoder(family)
    states, held, logits = [], [], []
    for guard in (None, eager_guard(escalate="ban")):
        cache = DynamicCache(config=model.config)
        seen = []
        with torch.no_grad(), pytest.warns() if guard else nullcontext(), guard.on(model) if guard else nullcontext():
            model(ids[:, :4], past_key_values=cache)
            for token in ids[0, 4:]:
                seen.append(model(token.view(1, 1), past_key_values=cache).logits[0, -1])
        logits.append(seen)
        states.append(dict(cache.layers[0].conv_states))  # lies below all attention
        held.append([layer.keys.shape[-2] for layer in cache.layers if hasattr(layer, "keys")])
    assert set(held[0]) == {ids.shape[1]} and max(held[1]) < 20
    assert states[0].keys() == states[1].keys()
    for key, state in states[0].items():
        assert torch.equal(state, states[1][key])
    same = [torch.equal(a, b) for a, b in zip(*logits, strict=True)]
    assert same.index(False) in (11, 12), "12 tokens and three copies: the alarm"
