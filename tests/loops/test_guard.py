"""LoopGuard on a model: when it acts, what it takes from a cache and a text, and what is left as it was."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from itertools import pairwise
from unittest.mock import patch

import pytest
import torch
from guard_kit import EAGER, eager_guard, feed
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kv_kit import prompts, shallow_of
from organisms import tiny_model
from organisms.decoders import decoder
from refusals import refused
from transformers import DynamicCache

from experiments.papers.loopguard.variants import OneSignal, Timed
from sinkscope.errors import SinkscopeWarning
from sinkscope.generation.decode import forced_answers
from sinkscope.generation.generate import generate
from sinkscope.kv import H2O, StreamingLLM
from sinkscope.loops import Monitor, MonitorSettings
from sinkscope.loops.guard import LoopGuard, Steer, tokens_to_keep
from sinkscope.loops.guard.cut import Retention
from sinkscope.loops.guard.steer import Steering
from sinkscope.loops.text import monitor as watching
from sinkscope.loops.text.monitor import WatchedRow
from sinkscope.loops.text.repetition import EarlierCopies

LOOP = [11, 12, 13]


def digits(text: str) -> list[int]:
    return [int(digit) for digit in text]


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


def test_each_act_soon_after_another_keeps_fewer_tokens(model):
    always = LoopGuard.paper(24, anchors=4, monitor=Timed(window=16, every=9, warmup=0, cooldown=0))
    with always.on(model) as run:
        feed(model, *prompts([14]), torch.arange(20, 47)[None])
    assert [(event.data["level"], event.data["kept_count"]) for event in run.events] == [(0, 15), (1, 12), (2, 10)]


@pytest.mark.parametrize(
    ("policy", "budget", "first"),
    [
        (StreamingLLM(budget=20, first=4), 48, 10),  # half of the policy's budget is left for the latest tokens
        (StreamingLLM(budget=40, first=16), 24, 16),
        (H2O(budget=40), 48, 12),
    ],
)
def test_anchors_hold_beside_a_policy_and_its_first_tokens_beside_a_guard(policy, budget, first, model):
    (prompt, mask), cache = prompts([60]), DynamicCache()
    with (policy | LoopGuard.paper(budget, anchors=16, monitor=EAGER)).on(model) as run:
        feed(model, prompt, mask, torch.tensor([LOOP * 12]), cache)
    assert run.events and all(event.data["kept"][0][1] >= first for event in run.events)
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


def test_of_a_hybrid_model_attention_alone_is_cut_and_it_is_said():
    ids, model = torch.tensor([[5, 6, 7, 8, *LOOP * 12]]), decoder("lfm2")
    cache = DynamicCache(config=model.config)
    with pytest.warns(SinkscopeWarning, match="with a state, of which LoopGuard can take nothing"), torch.no_grad():
        with eager_guard().on(model):
            for part in ids.split([4] + [1] * 36, 1):
                model(part, past_key_values=cache)
    assert max(one.keys.shape[-2] for one in cache.layers if hasattr(one, "keys")) < 20


# How a row that looped goes on


@pytest.mark.parametrize(
    ("ids", "since", "window", "numbers", "losses"),
    [  # half a logit for each token of a copy but the first two
        ("7896789", 7, 9, "", {}),  # before the act no token counts
        ("7896" + "7895" * 2 + "789", 6, 20, "", {6: 0.5, 5: 2.5 + 0.5}),  # every copy since the act
        ("17895278951789", 10, 20, "", {5: 1.0}),  # of those before it the longest
        ("7895" * 4 + "789", 8, 5, "", {5: 4.5 + 4.5}),  # behind the act and in the window, and before
        ("1896289", 3, 9, "12", {6: 0.5}),  # numbers are equal
    ],
)
def test_losses_count_each_copy_since_the_act_and_the_longest_before(ids, since, window, numbers, losses):
    steering = Steering(0.5, window, since, copies=EarlierCopies(3, digits(numbers).__contains__))
    steering.losses(digits(ids + "55"))
    steering.copies.take_back(len(ids))
    assert steering.losses(digits(ids)) == losses


def test_a_penalty_rises_with_each_act_in_succession():
    ids = digits("7896" * 3)
    steering = Steering(0.5, window=20, since=len(ids))
    assert steering.act(ids, 0, now=12) == 0 and steering.losses([*ids, 7, 8, 9]) == {6: 0.5}
    assert steering.act([*ids, *ids], 6, now=32) == 1 and steering.losses([*ids, 7, 8, 9]) == {6: 1.0}
    assert steering.act(ids, 6, now=40) == 2 and steering.since == 6
    assert steering.act(ids, 0, now=61) == 0 and steering.since == 6, "one token later than the window"


@pytest.mark.parametrize(("likeliest", "lost"), [(7, 0.5), (5, 0.0)])
def test_an_end_gains_nothing(likeliest, lost):
    logits = torch.zeros(12)
    logits[likeliest] = 4.0
    want = logits.clone()
    want[[7, 2]] -= torch.tensor([0.5, lost])
    Steering(0.5, 99, 3).steer(logits, digits("789789"), [2])
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
    assert (first["generated"], first["taken_back"], first["left_in_text"]) == (12, 0, 11), "three copies and 12 tokens"
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


# Reports and stops


def test_a_report_changes_nothing_and_has_what_the_monitor_says(model):
    (prompt, mask), tokens = prompts([8]), torch.randint(5, 96, (1, 40))
    want = feed(model, prompt, mask, tokens)
    sure = want[0, 1:].softmax(-1).amax(-1)  # of what follows each token
    rule = OneSignal(signal="p1", window=4, warmup=0, theta_conf=float(sure.quantile(0.3)), streak=2, cooldown=4)
    with LoopGuard(act="report", monitor=rule).on(model) as run:
        assert torch.equal(feed(model, prompt, mask, tokens), want)
    steps = list[int]()
    for step in range(2, 41):
        if sure[step - 2 : step].min() > rule.theta_conf and (not steps or step > steps[-1] + 4):
            steps.append(step)
    assert len(steps) > 1 and [event.data["generated"] for event in run.events] == steps
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


# A row that is taken back

RUNS = st.lists(
    st.tuples(st.lists(st.integers(0, 4), min_size=1, max_size=5), st.integers(1, 5)), min_size=1, max_size=6
).map(lambda parts: [token for piece, times in parts for token in piece * times])
SOON = MonitorSettings(tail_shortest=8, tail_beyond=4, tail_longest=9, cooldown=0, counter_copies=3, counter_tokens=9)


def looped_row() -> WatchedRow:
    """A row that a guard steers; two of its five tokens are numbers."""
    row = WatchedRow(partial(Monitor, SOON, lambda ids: [["cat", "7", "8", "dog", "sun"][token] for token in ids]))
    row.steering = Steering(1.0, 16, 0)
    row.monitor.rule.looped = True
    return row


ASKED_LATE = digits("0" + "001" * 3 + "0" * 43)
"""Copies whose kind is another one if it is asked after four of them."""


@settings(max_examples=40)
@example([(ASKED_LATE, 42)], [0])
@given(st.lists(st.tuples(RUNS, st.integers(0, 60)), min_size=1, max_size=4), RUNS)
def test_a_row_that_was_taken_back_goes_on_like_one_that_never_had_those_tokens(turns, rest):
    """Its monitor is marked every 5 tokens; pieces come once or several times in a row."""
    row, plain = looped_row(), looped_row()
    with patch.multiple(watching, MARKED_EVERY=5, MARKS=3):
        for tokens, back in turns:
            for token in tokens:
                row.add(token, None)
            row.steering.losses(row.ids)
            row.take_back(min(back, row.written))
            row = deepcopy(row)
    for token in row.ids:
        plain.add(token, None)
    for token in rest:
        assert row.add(token, None) == plain.add(token, None) and row.monitor.last == plain.monitor.last
        assert row.steering.losses(row.ids) == plain.steering.losses(row.ids)


def test_rows_that_change_places_twice_are_refused_by_their_name():
    """As beams do at every token: each time, the guard forgets what it knew of them."""
    model, (prompt, mask) = stubborn(), prompts([9, 9])
    with eager_guard(act="report").on(model), torch.no_grad():
        cache = model(prompt, attention_mask=mask).past_key_values
        for _ in range(2):
            cache.reorder_cache(torch.tensor([1, 0]))
        whole = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
        with refused("rows of the cache changed places"):
            model(prompt[:, :1], attention_mask=whole, past_key_values=cache)
