"""Detection: what is reported and stopped is what the monitor says, and generation is otherwise the stock one."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from unittest.mock import patch

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kv_kit import prompts
from organisms import tiny_model
from repository import ROOT
from torch import Tensor

from experiments.loopguard.variants import OneSignal
from sinkscope.generation.decode import ForcedAnswer
from sinkscope.loops import Monitor, MonitorSettings
from sinkscope.loops.guard import LoopGuard
from sinkscope.loops.guard.steer import Steering
from sinkscope.loops.text import monitor as watching
from sinkscope.loops.text.monitor import Settings, WatchedRow

BUNDLED = ROOT / "sinkscope/models/bundled"
TAIL = OneSignal(signal="tail", warmup=0, window=16, tail_shortest=6)
P1 = OneSignal(signal="p1", window=4, warmup=0, theta_conf=0.05, streak=3, cooldown=4)
LOOPS = [11, 12, 13] * 20


def triggers(tokens: list[int], settings: Settings, probs: list[float] | None = None) -> list[int]:
    monitor = Monitor(settings)
    steps = [monitor.update(token, None if probs is None else probs[i]) for i, token in enumerate(tokens)]
    return [step.step for step in steps if step.trigger]


@pytest.mark.parametrize("sample", [False, True])
def test_a_report_changes_nothing_and_has_what_the_monitor_says(sample, model):
    ids, mask = prompts([8])
    model.generation_config.eos_token_id = None
    settings = {"output_logits": True, "return_dict_in_generate": True, "do_sample": sample, "top_k": 0}
    settings |= {"max_new_tokens": 40, "pad_token_id": None, "attention_mask": mask}
    torch.manual_seed(3)
    want = model.generate(ids, **settings)
    guard = LoopGuard(act="report", monitor=P1)
    torch.manual_seed(3)
    with guard.on(model) as run:
        got = model.generate(ids, **settings)
    assert torch.equal(got.sequences, want.sequences)
    new = got.sequences[0, 8:].tolist()
    # p_max(t) belongs to what follows token t.
    probs = [float(s.softmax(-1).max()) for s in got.logits[1:]]
    expected = triggers(new[:-1], P1, probs)
    assert expected and [event.data["generated"] for event in run.events] == expected
    assert [event.position for event in run.events] == [8 + step - 1 for step in expected]
    assert {event.data["cached_before"] - event.data["kept_count"] for event in run.events} == {0}


def test_the_looping_row_ends_after_the_trigger_and_no_other():
    model, _ = tiny_model("llama", num_hidden_layers=2)
    model.generation_config.eos_token_id = [2, 3]
    ids, mask = prompts([5, 9, 7])
    rows = [LOOPS, [*range(20, 40), *LOOPS], [4, 2, *LOOPS]]  # 2 ends a row
    guard = LoopGuard(act="stop", monitor=TAIL)
    first, second = (triggers(row, TAIL)[0] for row in rows[:2])

    def write(ids: Tensor, scores: Tensor) -> Tensor:
        told = torch.full_like(scores, -torch.inf)
        for row, tokens in enumerate(rows):
            if scores[row].argmax() != 2 or scores[row, 2] < 900 + scores[row, 3]:  # else the guard has ended it
                told[row, tokens[ids.shape[1] - 9]] = 0.0
            else:
                told[row, 2] = 0.0
        return told

    with guard.on(model) as run:
        options = {"attention_mask": mask, "max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
        out = model.generate(ids, logits_processor=[write], **options)[:, 9:].tolist()
    assert first < second < 40 and len(out[0]) == second + 1
    assert out[:2] == [[*rows[0][:first], 2, *[0] * (second - first)], [*rows[1][:second], 2]]
    assert {event.row for event in run.events} == {0, 1}


def test_a_row_that_is_stopped_ends_as_soon_as_the_settings_allow_it():
    model, _ = tiny_model("llama", num_hidden_layers=2)
    model.generation_config.eos_token_id = [2, 3]
    ids, mask = prompts([9])

    def loop(ids: Tensor, scores: Tensor) -> Tensor:
        """The row wants to loop, but for what the guard wants more."""
        wanted = scores.clone()
        wanted[:, LOOPS[ids.shape[1] - 9]] += 100
        return wanted

    guard = LoopGuard(act="stop", monitor=TAIL)
    ask = {"attention_mask": mask, "max_new_tokens": 40, "pad_token_id": 0, "do_sample": False, "min_new_tokens": 30}
    with guard.on(model) as run:
        new = model.generate(ids, logits_processor=[loop], **ask)[0, 9:].tolist()
    assert run.events[0].data["generated"] < 30 and new == [*LOOPS[:30], 2]


def test_a_token_that_is_padding_elsewhere_ends_no_row_of_a_model_without_an_end():
    model, _ = tiny_model("llama", num_hidden_layers=2)
    model.generation_config.eos_token_id = None
    ids, mask = prompts([9])
    row = [0, 30, 31, 32] * 10

    guard = LoopGuard(act="report", monitor=TAIL)
    with guard.on(model) as run:
        ask = {"attention_mask": mask, "max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
        model.generate(ids, logits_processor=[ForcedAnswer([row], 9)], **ask)
    assert run.events and run.events[0].data["period"] == 4


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
