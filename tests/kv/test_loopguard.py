"""LoopGuard on a model: what it takes from a cache, from whom, when, and what is left as it was."""

from __future__ import annotations

from itertools import groupby, pairwise
from typing import Any

import pytest
import torch
from guard_kit import EAGER, KINDS, SMALL, dense, feed, padded, tiny
from intervention_kit import count_hooks
from transformers import DynamicCache

from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.interventions import SinkPatch
from sinkscope.kv import H2O, StreamingLLM
from sinkscope.kv.loopguard import LoopGuard, tokens_to_keep
from sinkscope.kv.loopguard.steer import Ban
from sinkscope.models.target import Target

ALWAYS = LoopGuard.paper(**SMALL, variant="always", monitor={"every": 9, "warmup": 0, "cooldown": 0})
TAIL = LoopGuard.paper(**SMALL, variant="tail", monitor=EAGER)
LOOP = [11, 12, 13]


def looping(after: int, steps: int) -> list[int]:
    return [*torch.randperm(40)[:after].add(20).tolist(), *(LOOP * steps)][:steps]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_kept_is_the_plan_and_later_logits_are_those_of_a_masked_full_cache(kind: str) -> None:
    stock, model = tiny(), tiny(kind)
    prompt, mask = padded(14, 9)
    new = torch.tensor([looping(5, 40), looping(21, 40)])
    with ALWAYS.on(model) as run:
        got = feed(model, prompt, mask, new)
    for row, length in enumerate((14, 9)):
        events = [e for e in run.events if e.row == row]
        assert [e.data["generated"] for e in events] == [9, 18, 27, 36] and {e.kind for e in events} == {"guard"}
        held: list[int] = []
        seen = 0
        for event in events:
            held += range(seen, seen := event.position + 1)
            assert seen == length + event.data["generated"] and event.step == event.data["generated"]
            made = tokens_to_keep(held, seen, event.data["bad"], ALWAYS.retention(length), event.data["level"])
            assert event.data["kept"] == made.ranges and event.data["cached_before"] == len(held)
            held = list(made.positions)
            assert event.data["kept_count"] == len(held) <= SMALL["budget"]
        assert [e.data["level"] for e in events] == [0, 1, 2, 3]
        assert events[-1].data["period"] == 3 and events[-1].data["bad"][-1][1] == events[-1].position + 1
        want = dense(stock, torch.cat([prompt[row, -length:], new[row]]), events)[length - 1 :]
        torch.testing.assert_close(got[row], want, atol=1e-5, rtol=1e-5)
        plain = dense(stock, torch.cat([prompt[row, -length:], new[row]]), [])[length - 1 :]
        assert (got[row] - plain).abs().max() > 1e-2, "the cuts made no difference, so nothing was tested"


def test_only_the_rows_that_loop_are_cut() -> None:
    model = tiny()
    prompt, mask = padded(10, 13, 6)
    new = torch.tensor([looping(3, 36), looping(19, 36), looping(36, 36)])
    stock = feed(model, prompt, mask, new)
    with TAIL.on(model) as run:
        got = feed(model, prompt, mask, new)
    first = {row: min(e.data["generated"] for e in run.events if e.row == row) for row in (0, 1)}
    assert first[0] < 19 < first[1] and {e.row for e in run.events} == {0, 1}
    torch.testing.assert_close(got[2], stock[2], atol=1e-5, rtol=1e-5)
    for row in range(3):
        assert row == 2 or torch.allclose(got[row, : first[row]], stock[row, : first[row]], atol=1e-5)
        assert row == 2 or not torch.allclose(got[row, first[row] + 1 :], stock[row, first[row] + 1 :], atol=1e-3)


@pytest.mark.parametrize("kind", ["hf", "bridge"])
def test_without_a_trigger_generation_is_the_stock_one_bit_for_bit(kind: str) -> None:
    model = tiny(kind)
    prompt, mask = padded(12)
    settings = {"max_new_tokens": 16, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    hf = Target.of(model).hf
    want = hf.generate(input_ids=prompt, attention_mask=mask, **settings)
    for between in ("full", "window"):  # shorter than the warm-up and the budget
        with LoopGuard(between=between).on(model) as run:
            got = hf.generate(input_ids=prompt, attention_mask=mask, **settings)
        assert torch.equal(got.sequences, want.sequences) and run.events == []
        for a, b in zip(got.logits, want.logits, strict=True):
            assert torch.equal(a, b) if kind != "bridge" else torch.allclose(a, b, atol=1e-5)


def test_tokens_decided_at_once_give_the_same_signals_a_little_later() -> None:
    model, stock = tiny(), tiny()
    prompt, mask = padded(10)
    new = torch.tensor([looping(3, 48)])
    runs, logits = [], new.new_zeros(0)
    for poll in (1, 2, 8):
        with LoopGuard.paper(**SMALL, variant="tail", monitor=EAGER, poll=poll).on(model) as run:
            logits = feed(model, prompt, mask, new)
        runs.append(run.events)
        at_once, later = runs[0], runs[-1]
        if poll == 1:
            continue
        assert [e.data["generated"] for e in later] == [e.data["generated"] for e in at_once][: len(later)] and later
        assert [repr(e.data["signals"]) for e in later] == [repr(e.data["signals"]) for e in at_once][: len(later)]
        lag = later[0].data["bad"][-1][1] - 1 - later[0].position
        assert 0 < lag <= poll
        want = dense(stock, torch.cat([prompt[0], new[0]]), later[:1], lag)[9:]
        until = later[1].data["generated"]
        torch.testing.assert_close(logits[0, :until], want[:until], atol=1e-5, rtol=1e-5)


def test_a_new_turn_begins_anew() -> None:
    model = tiny()
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


def test_between_window_is_streaming_llm_until_a_loop_comes() -> None:
    model = tiny()
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


def test_composed_with_a_patch_and_a_policy() -> None:
    model = tiny()
    model.model.layers[1].mlp.down_proj.weight.data[:, 3] *= 8
    prompt, mask = padded(20)
    new = torch.tensor([looping(3, 40)])
    both = SinkPatch(sites=[(1, 3)]) | StreamingLLM(budget=28) | TAIL
    with both.on(model) as run:
        feed(model, prompt, mask, new)
    assert {"patched", "guard"} <= set(run.counts) and run.usage[0].peak_tokens[0] <= 29
    assert all(e.data["cached_before"] <= 29 for e in run.events if e.kind == "guard")
    with pytest.raises(UnsupportedError, match="LoopGuardWindow"):
        (StreamingLLM(budget=28) | LoopGuard.paper(**SMALL, between="window")).on(model).__enter__()
    with (
        pytest.raises(UnsupportedError, match="positions="),
        (StreamingLLM(budget=28, positions="rebased") | TAIL).on(model),
    ):
        feed(model, prompt, mask, new)


def test_beams_and_assistants_are_refused_and_the_model_is_left_as_it_was() -> None:
    model = hf = tiny()
    hf.generation_config.eos_token_id = None
    before, attention = count_hooks(hf), hf.config._attn_implementation
    prompt, mask = padded(12)
    for settings, word in (({"num_beams": 2}, "num_beams=1"), ({"prompt_lookup_num_tokens": 3}, "assist")):
        with pytest.raises(UnsupportedError) as caught, LoopGuard().on(model):
            hf.generate(
                input_ids=prompt.repeat(1, 2),
                attention_mask=mask.repeat(1, 2),
                max_new_tokens=20,
                do_sample=False,
                **settings,
            )
        assert word in str(caught.value) and "\n" not in str(caught.value)
        assert (count_hooks(hf), hf.config._attn_implementation) == (before, attention)


def test_a_fraction_of_the_prompt() -> None:
    model = tiny()
    prompt, mask = padded(40, 60)
    guard = LoopGuard.paper(budget=0.25, anchors=4, window=16, variant="tail", monitor=EAGER)
    with guard.on(model) as run:
        feed(model, prompt, mask, torch.tensor([looping(3, 30)] * 2))
    counts = {row: {e.data["kept_count"] for e in run.events if e.row == row} for row in (0, 1)}
    assert max(counts[0]) <= 10 < max(counts[1]) <= 15
    with pytest.raises(SinkscopeError, match="prompt of 8 tokens is 2"), guard.on(model):
        feed(model, *padded(8), torch.tensor([looping(3, 30)]))


@torch.no_grad()
def feed_greedily(model: Any, prompt: Any, mask: Any, steps: int) -> list[int]:
    settings = {"max_new_tokens": steps, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(input_ids=prompt, attention_mask=mask, **settings)[0, prompt.shape[1] :].tolist()


def test_anchors_hold_beside_a_policy_and_its_first_tokens_beside_a_guard() -> None:
    model = tiny()
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
        held: Any = cache.layers[0]
        for head in held.pos[0]:
            kept = sorted(head[head >= 0].tolist())
            assert kept[:first] == list(range(first)) and len(kept) <= policy.budget + 1
            assert kept[first] > first or policy == H2O(budget=40), (
                "only the anchors are kept of the prompt's beginning"
            )


def test_a_ban_covers_the_n_grams_of_the_loop_alone() -> None:
    ban = Ban()
    ban.add([1, 2, 3, 1, 2, 3, 1], 3, until=50)
    assert [ban.banned(ids) for ids in ([9, 1, 2], [1, 2], [2, 3], [3, 1], [2, 1], [9, 9, 3])] == [
        [3],
        [3],
        [1],
        [2],
        [],
        [],
    ]
    ban.add([3, 7], 2, until=60)
    assert ban.banned([9, 2, 3]) == [1, 7] and ban.until == 60


@pytest.mark.parametrize("escalate", ["none", "ban", "sample", "both"])
def test_what_is_done_when_an_alarm_comes_again(escalate: Any) -> None:
    """A model that always prefers one token loops whatever is in its cache: only a ban or a drawn token help."""
    model = tiny(num_hidden_layers=1)
    vocab = len(model.lm_head.weight)
    model.lm_head.bias = torch.nn.Parameter(2.5 * torch.nn.functional.one_hot(torch.tensor(33), vocab).float())
    model.lm_head.weight.data /= 10
    prompt, mask = padded(10)
    monitor = {"warmup": 0, "tail_shortest": 12, "cooldown": 20}
    guard = LoopGuard(budget=64, anchors=4, window=64, monitor=monitor, escalate=escalate, draws=3, ends=())
    with guard.on(model) as run:
        new = feed_greedily(model, prompt, mask, 90)
    assert [e.data["generated"] for e in run.events][:2] == [12, 33], "three copies and 12 tokens, then the cooldown"
    done = {e.data["escalated"] for e in run.events[1:]}
    assert run.events[0].data["escalated"] is None and done == {None if escalate == "none" else escalate}
    assert set(new[:33]) == {33}, "the first alarm only cuts"
    others = [i for i, token in enumerate(new) if token != 33]
    if escalate == "ban":
        assert others[0] == 33, "from the second alarm on there are no four in a row"
        assert all(b - a <= 4 for a, b in pairwise([*others, 90])) and len(others) < 57
    elif escalate == "both":
        assert others and max(len(list(g)) for same, g in groupby(new[33:], lambda token: token == 33) if same) <= 4
    elif escalate == "sample":
        after = {e.data["generated"] + i for e in run.events[1:] for i in (1, 2, 3)}
        assert others and set(others) <= after, "three tokens for each alarm"
    else:
        assert others == []


def test_a_second_guard_is_refused() -> None:
    model = tiny()
    with pytest.raises(UnsupportedError, match="two guards"), (LoopGuard() | LoopGuard(anchors=4)).on(model):
        pass


def test_a_drawn_token_is_never_a_banned_one() -> None:
    """A loop of one token that nearly every draw would give again: the only drawn token must not be banned after it."""
    model = tiny(num_hidden_layers=1)
    bias = 8.0 * torch.nn.functional.one_hot(torch.tensor(33), len(model.lm_head.weight)).float()
    model.lm_head.bias = torch.nn.Parameter(bias)
    model.lm_head.weight.data /= 10
    model.generation_config.eos_token_id = None
    guard = LoopGuard(budget=64, anchors=4, window=64, monitor={"warmup": 0, "tail_shortest": 12, "cooldown": 20})
    options: dict[str, Any] = {"max_new_tokens": 60, "output_logits": True, "return_dict_in_generate": True}
    for sample in (False, True):
        with guard.on(model) as run:
            prompt, mask = padded(10)
            found = model.generate(input_ids=prompt, attention_mask=mask, do_sample=sample, pad_token_id=0, **options)
        assert any(e.data["escalated"] == "both" for e in run.events)
        chosen = [float(logits[0, token]) for logits, token in zip(found.logits, found.sequences[0, 10:], strict=True)]
        assert min(chosen) > -torch.inf and [33] * 4 not in [
            found.sequences[0, i : i + 4].tolist() for i in range(10 + 33 + 4, 70)
        ]
