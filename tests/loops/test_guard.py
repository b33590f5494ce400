"""LoopGuard on a model: when it acts, what it takes from a cache and a text, and what is left as it was."""

from __future__ import annotations

from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from itertools import pairwise
from unittest.mock import patch

import pytest
import torch
from covering import slow
from guard_kit import EAGER, SMALL, eager_guard, feed
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kv_kit import prompts, shallow_of
from organisms import tiny_model
from organisms.decoders import decoder
from refusals import refused
from torch.testing import assert_close
from transformers import DynamicCache

from experiments.loopguard.variants import OneSignal, Timed
from sinkscope.generation.decode import forced_answers
from sinkscope.generation.edit_options import edit_from_options
from sinkscope.generation.generate import generate
from sinkscope.kv import H2O, StreamingLLM
from sinkscope.loops import Monitor, MonitorSettings
from sinkscope.loops.guard import DRY, LoopGuard, Steer, ranges_of, tokens_to_keep
from sinkscope.loops.guard.cut import Retention
from sinkscope.loops.guard.steer import Steering
from sinkscope.loops.text import monitor as watching
from sinkscope.loops.text.monitor import WatchedRow
from sinkscope.loops.text.repetition import EarlierCopies

LOOP = [11, 12, 13]


# What is kept


@pytest.mark.parametrize(
    ("held", "bad", "recent", "level", "kept"),
    [
        # Without a window the latest clean tokens, seven eighths of what anchors leave; bad anchors go, but the first.
        (range(40), range(1, 9), None, 0, [0, 13, 21, *range(26, 40)]),
        (range(40), range(30, 40), None, 3, [0, 1, 2, 3, 7, 13, *range(16, 30)]),
        # In a window of 8: half of it, halved by each level; anchors stay though they are bad.
        (range(40), range(2, 36), 8, 0, [0, 1, 2, 3, 5, 7, 9, 12, 14, 16, 19, 21, 23, 26, 28, 30, 36, 37, 38, 39]),
        (range(0, 40, 2), range(40, 40), 8, 1, [0, 2, 4, 6, 8, 12, 14, 16, 18, 20, 22, 26, 28, 30, 36, 38]),
    ],
)
def test_plans_are_those_by_hand(held, bad, recent, level, kept):
    assert tokens_to_keep([*held], 40, bad, Retention(20, 4, recent), level) == kept
    assert [Retention(recent=256).recent_tokens(level) for level in (0, 3, 4)] == [128, 16, 16], "the paper's sizes"


def test_guard_keeps_the_plan(model):
    """In each row by its own tokens, and fewer with each act."""
    always = LoopGuard.paper(**SMALL, monitor=Timed(window=16, every=9, warmup=0, cooldown=0))
    prompt, mask = prompts([14, 9])
    with always.on(model) as run:
        feed(model, prompt, mask, torch.tensor([[*LOOP * 3, *range(20, 29)]] * 2))
    for row, length in enumerate((14, 9)):
        held = [*range(length + 9)]
        for level, event in enumerate(event for event in run.events if event.row == row):
            seen, data = length + 9 * level + 9, event.data
            assert data["generated"] == event.step == seen - length and event.position == seen - 1
            made = tokens_to_keep(held, seen, range(*(data["bad"] or [(0, 0)])[-1]), always.retention(length), level)
            assert data["kept"] == ranges_of(made) and (data["cached_before"], data["level"]) == (len(held), level)
            assert data["kept_count"] == len(made) <= SMALL["budget"]
            held = [*made, *range(seen, seen + 9)]
    assert run.summary().endswith("It gave 4 alarms in all, in rows 0 and 1.")


@pytest.mark.parametrize(
    ("policy", "budget", "first"),
    [
        (StreamingLLM(budget=20, first=4), 48, 10),  # half of the policy's budget is left for the latest tokens
        (H2O(budget=40), 48, 12),
    ],
)
def test_anchors_hold_beside_a_policy_and_its_first_tokens_beside_a_guard(policy, budget, first, model):
    (prompt, mask), cache = prompts([60]), DynamicCache()
    with (policy | LoopGuard.paper(budget, anchors=16, monitor=EAGER)).on(model) as run:
        feed(model, prompt, mask, torch.tensor([LOOP * 12]), cache)
    assert run.events and all(e.data["kept"][0][0] == 0 and e.data["kept"][0][1] >= first for e in run.events)
    for head in cache.layers[0].pos[0]:
        kept = sorted(head[head >= 0].tolist())
        assert kept[:first] == list(range(first)) and len(kept) <= policy.budget + 1


def test_anchors_keep_no_copies_and_the_copy_that_has_begun_stays(model):
    assert LoopGuard(budget=32).retention(6).anchors == 8, "a quarter of a small budget"
    prompt, mask = prompts([6])
    new = torch.tensor([(LOOP * 5)[:14]])  # from position 6 on, in the middle of the fifth copy
    with LoopGuard(monitor=MonitorSettings(tail_shortest=14, tail_beyond=0), act="cut").on(model) as run:
        feed(model, prompt, mask, new)
    (event,) = run.events
    assert event.data["bad"] == [(6, 16)] and event.data["kept"] == [(0, 6), (16, 20)], "at least the last 4"


@pytest.mark.parametrize("family", ["lfm2", slow("qwen3_next")])
def test_a_hybrid_model_keeps_its_state_when_attention_is_cut(family):
    """After a cut the attending layers lack the loop, and the first layer's state has it to the bit, as uncut."""
    ids, model = torch.tensor([[5, 6, 7, 8, *LOOP * 12]]), decoder(family)

    def read(edit):
        """The state of the first layer, below all attention, and how many tokens each attending layer holds."""
        cache = DynamicCache(config=model.config)
        with torch.no_grad(), edit:
            for part in ids.split([4] + [1] * 36, 1):
                model(part, past_key_values=cache)
        return cache.layers[0].conv_states, {one.keys.shape[-2] for one in cache.layers if hasattr(one, "keys")}

    states, held = read(nullcontext())
    with pytest.warns():
        cut_states, cut_held = read(eager_guard().on(model))
    assert held == {ids.shape[1]} and max(cut_held) < 20
    assert_close(cut_states, states, rtol=0, atol=0)


# How a row that looped goes on


@pytest.mark.parametrize(
    ("ids", "since", "window", "numbers", "losses"),
    [  # half a logit for each token of a copy but the first two
        ([7, 8, 9, 6, 7, 8, 9], 7, 9, (), {}),  # before the act no token counts
        ([7, 8, 9, 6, *[7, 8, 9, 5] * 2, 7, 8, 9], 6, 20, (), {6: 0.5, 5: 2.5 + 0.5}),  # every copy since the act
        ([1, 7, 8, 9, 5, 2, 7, 8, 9, 5, 1, 7, 8, 9], 10, 20, (), {5: 1.0}),  # of those before it the longest
        ([7, 8, 9, 5] * 4 + [7, 8, 9], 8, 5, (), {5: 4.5 + 4.5}),  # behind the act and in the window, and before
        ([1, 8, 9, 6, 2, 8, 9], 3, 9, (1, 2), {6: 0.5}),  # numbers are equal
    ],
)
def test_losses_count_each_copy_since_the_act_and_the_longest_before(ids, since, window, numbers, losses):
    steering = Steering(0.5, window, since, copies=EarlierCopies(3, numbers.__contains__))
    steering.losses([*ids, 5, 5])
    steering.copies.take_back(len(ids))
    assert steering.losses(ids) == losses


def test_a_penalty_rises_with_each_act_in_succession_and_an_end_gains_nothing():
    ids = [7, 8, 9, 6] * 3
    steering = Steering(0.5, window=20, since=len(ids))
    assert steering.act(ids, 0, now=12) == 0 and steering.losses([*ids, 7, 8, 9]) == {6: 0.5}
    assert steering.act([*ids, *ids], 6, now=32) == 1 and steering.losses([*ids, 7, 8, 9]) == {6: 1.0}
    assert steering.act(ids, 6, now=40) == 2 and steering.since == 6
    assert steering.act(ids, 0, now=61) == 0 and steering.since == 6, "one token later than the window"
    for likeliest, lost in ((7, 0.5), (5, 0.0)):
        logits = torch.zeros(12)
        logits[likeliest] = 4.0
        want = logits.clone()
        want[7] -= 0.5
        want[2] -= lost
        Steering(0.5, 99, 3).steer(logits, [7, 8, 9, 7, 8, 9], [2])
        assert torch.equal(logits, want)


def stubborn():
    """A model that always prefers token 33, whatever is in its cache: only a ban or a drawn token help."""
    model = shallow_of("llama", num_hidden_layers=1)
    vocab = len(model.lm_head.weight)
    model.lm_head.bias = torch.nn.Parameter(8.0 * torch.nn.functional.one_hot(torch.tensor(33), vocab).float())
    model.lm_head.weight.data /= 10
    return model


def test_penalty_ends_a_loop_after_few_copies():
    """Token 33 leads by 8. After k of them, k + 1 copies count k - 2 tokens each: 4 and 10 at a penalty of 1."""
    model, (prompt, mask) = stubborn(), prompts([10])
    with eager_guard(steer=Steer(penalty=1.0), act="cut").on(model) as run:
        new = model.generate(prompt, attention_mask=mask, max_new_tokens=110, pad_token_id=0)[0, 10:].tolist()
    first = run.events[0].data
    assert (first["generated"], first["level"], first["taken_back"]) == (12, 0, 0), "three copies and 12 tokens"
    assert first["left_in_text"] == 11 and "and left 11 repeated ones in the text." in run.summary()
    others = [i for i, token in enumerate(new) if token != 33]
    assert others[0] == 12 + 4
    assert all(after - before <= 6 for before, after in pairwise(others)), "no copy gets long again"
    options = {"guard": eager_guard(), "tokenizer": tiny_model("llama")[1], "max_new_tokens": 40}
    (told,) = generate(model, [prompt[0].tolist()], **options)
    assert told.events[0].data["left_in_text"] == 0 < told.events[0].data["taken_back"]


def test_nothing_is_drawn_where_the_caller_draws_and_under_the_papers_guard():
    model, (prompt, mask), texts = stubborn(), prompts([9]), []
    options = {"attention_mask": mask, "max_new_tokens": 40, "pad_token_id": 0, "do_sample": True, "top_k": 0}
    for steer in (Steer(temperature=0.0), Steer()):
        torch.manual_seed(1)
        with eager_guard(steer=steer, act="cut").on(model) as run:
            texts.append(model.generate(prompt, **options))
        assert run.events
    assert torch.equal(*texts) and LoopGuard.paper().steer is None


@pytest.mark.parametrize(
    ("ids", "settings", "losses"),
    [
        ([5, 6, 7, 5, 6], {}, {7: 0.8}),
        ([5, 6, 7, 9, 6, 7, 5, 6], {"allowed_length": 1, "base": 2.0}, {7: 1.6}),  # the longer of two copies
        ([4, 5, 6, 7, 8, 6, 9, 4, 5, 6], {"allowed_length": 1, "base": 2.0}, {7: 0.8 * 4, 9: 0.8}),  # the longest
        ([5, 6, 7, 5, 6, 3, 3, 5, 6], {"ignore": [3]}, {7: 0.8, 3: 0.8}),
        ([3, 6, 7, 3, 6], {"ignore": [3]}, {}),
    ],
)
def test_dry_lowers_what_followed_earlier_copies(ids, settings, losses):
    rows, scores, expected = [ids, [*range(10, 10 + len(ids))]], torch.zeros(2, 40), torch.zeros(2, 40)
    found = DRY(**settings)(torch.tensor(rows), scores)
    for token, loss in losses.items():
        expected[0, token] = -loss
    assert not scores.any(), "the scores of the caller stay"
    assert_close(found, expected)
    for dtype in (torch.float32, torch.float16):
        scores = DRY(base=1e6)(torch.tensor([[5, 6] * 40]), torch.zeros(1, 9, dtype=dtype))
        assert scores[0, 5] <= -6e4 and not scores.isnan().any() and scores[0, 4] == 0, "beyond all numbers"


# Reports and stops


def test_a_report_changes_nothing_and_has_what_the_monitor_says(model):
    ids, mask = prompts([8])
    model.generation_config.eos_token_id = None
    asked = {"output_logits": True, "return_dict_in_generate": True, "do_sample": True, "top_k": 0}
    asked |= {"max_new_tokens": 40, "pad_token_id": None, "attention_mask": mask}
    torch.manual_seed(3)
    want = model.generate(ids, **asked)
    sure = [float(logits.softmax(-1).max()) for logits in want.logits[1:]]  # of what follows each token
    rule = OneSignal(signal="p1", window=4, warmup=0, theta_conf=sorted(sure)[12], streak=2, cooldown=4)
    torch.manual_seed(3)
    with LoopGuard(act="report", monitor=rule).on(model) as run:
        got = model.generate(ids, **asked)
    assert torch.equal(got.sequences, want.sequences)
    steps = list[int]()
    for step in range(2, len(sure) + 1):
        if min(sure[step - 2 : step]) > rule.theta_conf and (not steps or step > steps[-1] + 4):
            steps.append(step)
    assert len(steps) > 1 and [event.data["generated"] for event in run.events] == steps
    assert [event.position for event in run.events] == [8 + step - 1 for step in steps]
    assert {event.data["cached_before"] - event.data["kept_count"] for event in run.events} == {0}
    assert "It changed nothing." in run.summary()


def test_a_row_ends_at_its_alarm_or_as_soon_as_the_settings_allow_it():
    model, (prompt, mask) = stubborn(), prompts([10])
    model.generation_config.eos_token_id = [2, 3]
    for least in (0, 30):
        with eager_guard(act="stop").on(model) as run:
            options = {"max_new_tokens": 40, "pad_token_id": 0, "min_new_tokens": least, "do_sample": False}
            new = model.generate(prompt, attention_mask=mask, **options)[0, 10:].tolist()
        assert run.events[0].data["generated"] == 12 and new == [33] * max(12, least) + [2]
        assert "the guard found a loop with a period of 1 token. It ended the row. It gave 1 alarm" in run.summary()


def test_without_an_end_padding_ends_no_row_and_no_row_can_be_stopped():
    model, _ = tiny_model("llama", num_hidden_layers=2)
    model.generation_config.eos_token_id = None
    ids, mask = prompts([9])
    asked = {"attention_mask": mask, "max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
    with LoopGuard(act="report", monitor=EAGER).on(model) as run:
        model.generate(ids, logits_processor=[forced_answers([[0, 30, 31, 32] * 10], 9)], **asked)
    assert run.events and run.events[0].data["period"] == 4
    with eager_guard(act="stop").on(model), refused("no end token; use act='report'"):
        model.generate(ids, **asked)


def test_the_names_of_a_guard_and_of_its_monitor():
    assert (
        edit_from_options(policy="loopguard:paper") == LoopGuard.paper()
        and edit_from_options(guard=True) == LoopGuard()
    )
    model, tokenizer = tiny_model("llama")
    with refused("guard"):
        generate(model, "x", guard="papers", tokenizer=tokenizer)


# A row that is taken back

PIECES = st.lists(
    st.tuples(st.lists(st.integers(0, 4), min_size=1, max_size=5), st.integers(1, 5)), min_size=1, max_size=6
)
SOON = MonitorSettings(tail_shortest=8, tail_beyond=4, tail_longest=9, cooldown=0, counter_copies=3, counter_tokens=9)


def looped_row() -> WatchedRow:
    """A row that a guard steers; two of its five tokens are numbers."""
    row = WatchedRow(partial(Monitor, SOON, lambda ids: [["cat", "7", "8", "dog", "sun"][token] for token in ids]))
    row.steering = Steering(1.0, 16, 0)
    row.monitor.rule.looped = True
    return row


ASKED_LATE = ([0], 1), ([0, 0, 1], 3), ([0] * 3, 3), ([0] * 4, 1), ([0] * 5, 3), ([0] * 5, 3)
"""Copies whose kind is another one if it is asked after four of them."""


@settings(max_examples=40)
@example([(ASKED_LATE, 42)], [([0], 1)])
@given(st.lists(st.tuples(PIECES, st.integers(0, 60)), min_size=1, max_size=4), PIECES)
def test_a_row_that_was_taken_back_goes_on_like_one_that_never_had_those_tokens(turns, rest):
    """Its monitor is marked every 5 tokens; pieces come once or several times in a row."""
    row, plain = looped_row(), looped_row()
    with patch.multiple(watching, MARKED_EVERY=5, MARKS=3):
        for pieces, back in turns:
            for token in [token for piece, times in pieces for token in piece * times]:
                row.add(token, None)
            row.steering.losses(row.ids)
            row.take_back(min(back, row.written))
            row = deepcopy(row)
    for token in row.ids:
        plain.add(token, None)
    for token in [token for piece, times in rest for token in piece * times]:
        assert row.add(token, None) == plain.add(token, None) and row.monitor.last == plain.monitor.last
        assert row.steering.losses(row.ids) == plain.steering.losses(row.ids)
