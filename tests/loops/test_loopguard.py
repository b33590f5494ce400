"""LoopGuard on a model: what it takes from a cache, from whom, when, and what is left as it was."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch
from covering import slow
from guard_kit import EAGER, SMALL, eager_guard, feed
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_kit import prompts, shallow_of
from organisms import tiny_model
from organisms.decoders import decoder
from refusals import refused
from torch.testing import assert_close
from transformers import DynamicCache

from experiments.loopguard.variants import Timed
from sinkscope.engine.run import Event
from sinkscope.generation.edit_options import edit_from_options
from sinkscope.generation.generate import generate
from sinkscope.kv import H2O, StreamingLLM
from sinkscope.loops import MonitorSettings
from sinkscope.loops.guard import LoopGuard, Steer, ranges_of, tokens_to_keep
from sinkscope.loops.guard.steer import Steering
from sinkscope.loops.text.repetition import EarlierCopies

ALWAYS = LoopGuard.paper(**SMALL, monitor=Timed(window=16, every=9, warmup=0, cooldown=0))
TAIL = LoopGuard.paper(**SMALL, monitor=EAGER)
LOOP = [11, 12, 13]


def looping(after: int, steps: int) -> list[int]:
    return [*torch.randperm(40)[:after].add(20).tolist(), *(LOOP * steps)][:steps]


def test_guard_keeps_the_plan(model):
    prompt, mask = prompts([14, 9])
    new = torch.tensor([looping(5, 40), looping(21, 40)])
    with ALWAYS.on(model) as run:
        feed(model, prompt, mask, new)
    for row, length in enumerate((14, 9)):
        events = [e for e in run.events if e.row == row]
        assert [e.data["generated"] for e in events] == [9, 18, 27, 36] and {e.kind for e in events} == {"guard"}
        held = []
        seen = 0
        for event in events:
            held += range(seen, seen := event.position + 1)
            assert seen == length + event.data["generated"] and event.step == event.data["generated"]
            made = tokens_to_keep(
                held, seen, range(*(event.data["bad"] or [(0, 0)])[0]), ALWAYS.retention(length), event.data["level"]
            )
            assert event.data["kept"] == ranges_of(made) and event.data["cached_before"] == len(held)
            held = made
            assert event.data["kept_count"] == len(held) <= SMALL["budget"]
        assert [e.data["level"] for e in events] == [0, 1, 2, 3]
        assert events[-1].data["period"] == 3 and events[-1].data["bad"][-1][1] == events[-1].position + 1


def test_a_summary_says_what_the_guard_did_and_in_which_rows(model):
    """Nothing is cut where alarms are only reported, or end the row."""
    prompt, mask = prompts([14, 9])
    new = torch.tensor([looping(5, 40), looping(21, 40)])
    with ALWAYS.on(model) as run:
        feed(model, prompt, mask, new)
    assert run.summary().endswith("Then 7 more alarms followed, in rows 0 and 1.")
    for act, then in (("report", "It changed nothing."), ("stop", "It ended the row.")):
        guard = LoopGuard(monitor=EAGER, act=act)
        with guard.on(model) as run:
            model.generate(prompt, attention_mask=mask, max_new_tokens=2, do_sample=False, eos_token_id=2)
        run.log(lambda: [Event(1, 9, 30, None, "guard", {"period": 3, "generated": 24})])
        found = "After 24 new tokens of row 1 the guard found a loop with a period of 3 tokens."
        assert run.summary() == f"{found} {then} No further alarms."


def test_anchors_hold_beside_a_policy_and_its_first_tokens_beside_a_guard(model):
    prompt, mask = prompts([60])
    new = torch.tensor([looping(3, 40)])
    for policy, budget, first in (
        (StreamingLLM(budget=40, first=16), 24, 16),
        (StreamingLLM(budget=20, first=4), 48, 10),  # half of the policy's budget is left for the latest tokens
        (H2O(budget=40), 48, 12),
    ):
        guard = LoopGuard.paper(budget, anchors=16, monitor=EAGER)
        cache = DynamicCache()
        with (policy | guard).on(model) as run:
            feed(model, prompt, mask, new, cache)
        assert run.events and all(e.data["kept"][0][0] == 0 and e.data["kept"][0][1] >= first for e in run.events)
        for head in cache.layers[0].pos[0]:
            kept = sorted(head[head >= 0].tolist())
            assert kept[:first] == list(range(first)) and len(kept) <= policy.budget + 1


def losses_of(ids: list[int], since: int, window: int, equal: Collection[int] = ()) -> dict[int, float]:
    """What tokens lose after a row, from all pairs of slices: 0.5 for each token of a copy but the first two.

    Tokens of `equal` count as one.
    """
    every, longest = Counter[int](), Counter[int]()
    masked = [-1 if token in equal else token for token in ids]
    for place in range(1, len(ids)):
        lengths = range(min(place, len(ids) - since) + 1)
        length = max(n for n in lengths if masked[place - n : place] == masked[len(ids) - n :])
        loss = max(0, length - 2) / 2
        if place >= max(since, len(ids) - window):
            every[ids[place]] += loss
        else:
            longest[ids[place]] = max(longest[ids[place]], loss)
    return every + longest


PIECE = st.lists(st.integers(0, 3), min_size=1, max_size=5)


@settings(max_examples=60)
@given(
    st.lists(PIECE, min_size=1, max_size=15),
    st.integers(0, 10),
    st.integers(1, 12),
    st.lists(st.integers(0, 30), max_size=3),
    st.sampled_from([(), (2, 3)]),
)
def test_losses_count_each_copy_since_the_act_and_the_longest_before(pieces, since, window, backs, equal):
    """In a row in which a piece comes again and again between others, also where tokens were taken back and come anew.

    Args:
        equal: Tokens that count as one.
    """
    ids = [token for other in pieces for token in (*pieces[0], *other, *pieces[0])]
    steering = Steering(0.5, window, min(since, len(ids)), copies=EarlierCopies(3, equal.__contains__))
    for back in backs:
        steering.losses(ids)
        del ids[max(1, len(ids) - back) :]
        steering.copies.take_back(len(ids))
        steering.since = min(since, len(ids))
        assert steering.losses(ids) == losses_of(ids, steering.since, window, equal)
        ids += pieces[-1] + pieces[0]
    assert steering.losses(ids) == losses_of(ids, steering.since, window, equal)


def test_a_penalty_rises_with_each_act_in_succession():
    ids = [7, 8, 9, 6] * 3
    steering = Steering(0.5, window=20, since=len(ids))
    assert steering.act(ids, 0, now=12) == 0 and steering.losses([*ids, 7, 8, 9]) == {6: 0.5}
    assert steering.act([*ids, *ids], 6, now=32) == 1 and steering.losses([*ids, 7, 8, 9]) == {6: 1.0}
    assert steering.act(ids, 6, now=40) == 2 and steering.since == 6
    assert steering.act(ids, 0, now=61) == 0 and steering.since == 6, "one token later than the window"


def test_an_end_of_the_text_gains_nothing_from_a_penalty():
    steering = Steering(0.5, 99, 3)
    ids = [7, 8, 9, 7, 8, 9]
    for likeliest, lost in ((7, 0.5), (5, 0.0)):
        logits = torch.zeros(12)
        logits[likeliest] = 4.0
        want = logits.clone()
        want[7] -= 0.5
        want[2] -= lost
        steering.steer(logits, ids, [2])
        assert torch.equal(logits, want)


def stubborn(bias: float):
    """A model that always prefers token 33, whatever is in its cache: only a ban or a drawn token help."""
    model = shallow_of("llama", num_hidden_layers=1)
    vocab = len(model.lm_head.weight)
    model.lm_head.bias = torch.nn.Parameter(bias * torch.nn.functional.one_hot(torch.tensor(33), vocab).float())
    model.lm_head.weight.data /= 10
    return model


def test_penalty_ends_a_loop_after_few_copies():
    """Token 33 leads by 8. After k of them, k + 1 copies count k - 2 tokens each: 4 and 10 at a penalty of 1."""
    model = stubborn(8.0)
    prompt, mask = prompts([10])
    with eager_guard(steer=Steer(penalty=1.0), act="cut").on(model) as run:
        new = model.generate(prompt, attention_mask=mask, max_new_tokens=110, pad_token_id=0)[0, 10:].tolist()
    first = run.events[0].data
    assert (first["generated"], first["level"], first["taken_back"]) == (12, 0, 0), "three copies and 12 tokens"
    others = [i for i, token in enumerate(new) if token != 33]
    assert others[0] == 12 + 4
    assert all(after - before <= 6 for before, after in pairwise(others)), "no copy gets long again"


def test_copies_that_stay_in_the_text_are_counted():
    model = stubborn(4.0)
    prompt, mask = prompts([10])
    with eager_guard(steer=Steer(penalty=1.0)).on(model) as run:
        new = model.generate(prompt, attention_mask=mask, max_new_tokens=40, pad_token_id=0, do_sample=False)
    first = run.events[0].data
    assert first["left_in_text"] == first["generated"] - 1 and set(new[0, 10 : 10 + first["generated"]].tolist()) == {
        33
    }
    assert f"and left {first['left_in_text']} repeated ones in the text." in run.summary()
    tokenizer = tiny_model("llama")[1]
    (told,) = generate(model, [prompt[0].tolist()], guard=eager_guard(), tokenizer=tokenizer, max_new_tokens=40)
    assert told.events[0].data["left_in_text"] == 0 < told.events[0].data["taken_back"]


def test_anchors_keep_no_copies_and_the_copy_that_has_begun_stays(model):
    retention = LoopGuard(budget=32).retention(6)
    assert retention.anchors == 8, "a quarter of a small budget"
    prompt, mask = prompts([6])
    new = torch.tensor([[*(LOOP * 20)][:14]])  # from position 6 on, in the middle of the fifth copy
    with LoopGuard(monitor=MonitorSettings(tail_shortest=14, tail_beyond=0), act="cut").on(model) as run:
        feed(model, prompt, mask, new)
    (event,) = run.events
    assert event.data["bad"] == [(6, 16)] and event.data["kept"] == [(0, 6), (16, 20)], "at least the last 4"


@pytest.mark.parametrize("family", ["lfm2", slow("qwen3_next")])
def test_a_hybrid_model_keeps_its_state_when_attention_is_cut(family):
    """After a cut the attending layers lack the loop, and the first layer's state has it to the bit, as uncut."""
    ids = torch.tensor([[5, 6, 7, 8, *LOOP * 12]])
    model = decoder(family)

    def read(edit):
        """The state of the first layer, below all attention, and how many tokens each attending layer holds."""
        cache = DynamicCache(config=model.config)
        with torch.no_grad(), edit:
            for part in ids.split([4] + [1] * 36, 1):
                model(part, past_key_values=cache)
        held = {layer.keys.shape[-2] for layer in cache.layers if hasattr(layer, "keys")}
        return cache.layers[0].conv_states, held

    states, held = read(nullcontext())
    with pytest.warns():
        cut_states, cut_held = read(eager_guard().on(model))
    assert held == {ids.shape[1]} and max(cut_held) < 20
    assert_close(cut_states, states, rtol=0, atol=0)


def test_a_row_without_an_end_cannot_be_stopped():
    model = stubborn(8.0)
    model.generation_config.eos_token_id = None
    prompt, mask = prompts([10])
    with eager_guard(act="stop").on(model), refused("no end token; use act='report'"):
        model.generate(prompt, attention_mask=mask, max_new_tokens=4)


def test_the_names_of_a_guard_and_of_its_monitor():
    assert edit_from_options(guard="paper") == LoopGuard.paper()
    assert edit_from_options(guard=True) == LoopGuard()
    model, tokenizer = tiny_model("llama")
    with refused("guard"):
        generate(model, "x", guard="papers", tokenizer=tokenizer)
