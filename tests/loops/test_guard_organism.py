"""LoopGuard where the loop, its period and its onset are known and the cache drives it: it has to end the loop."""

from __future__ import annotations

from functools import cache
from unittest.mock import Mock

import torch
from organisms import LoopOrganism, loop_organism

from sinkscope.generation.conversation import Conversation
from sinkscope.generation.decode import padded
from sinkscope.generation.generate import generate
from sinkscope.loops import MonitorSettings, tail_period
from sinkscope.loops.guard import LoopGuard

STEPS, REWOUND = 140, 90  # new tokens; where a loop is taken back, fewer show it
GUARD = LoopGuard(monitor=MonitorSettings(tail_beyond=0, cooldown=8))


@cache
def made() -> LoopOrganism:
    """The loop lives on its own tail, as the paper has it."""
    return loop_organism(0, reach=64, n_layers=2, vocab_size=1024)


def test_loops_end_soon_after_they_can_be_told_and_decoding_goes_on():
    o = made()
    looping = [
        o.looping_prompt(period, delay=onset, start=start) for period, onset, start in ((6, 20, 250), (12, 0, 500))
    ]
    healthy = o.healthy_prompt(60, start=750)
    ids, mask = padded([p[0].tolist() for p in (*(one.ids for one in looping), healthy)], 0, torch.device("cpu"))
    with LoopGuard.paper().on(o.model) as run:
        out = o.model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=STEPS, do_sample=False)
    written = out[:, ids.shape[1] :].tolist()
    events = sorted(run.events, key=lambda event: event.row)
    assert [event.row for event in events] == [0, 1] and written[2] == o.walk(int(healthy[0, -1]), STEPS)
    for prompt, event, tokens in zip(looping, events, written, strict=False):
        period, found = event.data["period"], event.data["generated"]
        # Two votes. The type-token ratio has its own once one token in five is new; the slower of the others, the
        # compression ratio, once what there is of different tokens makes 12 % of all, and it is computed every 16.
        assert 64 <= found <= max(64, (prompt.onset + prompt.period) / 0.12) + 16 and period == prompt.period
        # The token after the alarm was chosen by the call that raised it; from the next on the cache is clean.
        assert tokens[: found + 1] == o.expected(prompt, found + 1)
        assert tokens[found + 1 :] == o.walk(tokens[found], STEPS - found - 1), "the base rule goes on"
        (begin, end), whole = event.data["bad"][-1], [*prompt.ids[0].tolist(), *tokens]
        assert end == event.position + 1 and whole[begin : end - period] == whole[begin + period : end]
        assert begin == end - 256 or whole[begin - 1] != whole[begin - 1 + period], "with the copies in the prompt"
    ends = {"eos_token_id": o.tokenizer.eos_token_id, "pad_token_id": 0, "max_new_tokens": STEPS, "do_sample": False}
    with LoopGuard(act="stop", monitor=GUARD.monitor).on(o.model) as run:
        out = o.model.generate(input_ids=ids, attention_mask=mask, **ends)[:, ids.shape[1] :].tolist()
    for event, tokens in zip(sorted(run.events, key=lambda event: event.row), out, strict=False):
        found = event.data["generated"]
        assert tokens[found:] == [ends["eos_token_id"], *[0] * (STEPS - found - 1)], "a row that loops ends"
    assert out[2] == written[2] and len(run.events) == 2, "and no other"


def test_a_loop_is_taken_back_from_the_output_unless_it_is_shown_while_it_is_written():
    o = made()
    prompt = o.looping_prompt(12, delay=30, start=250)
    (output,) = generate(o.model, [prompt.ids[0].tolist()], guard=GUARD, tokenizer=o.tokenizer, max_new_tokens=REWOUND)
    tokens, first = output.tokens, output.events[0].data
    stays = first["generated"] - first["taken_back"]
    assert first["taken_back"] >= 2 * 12 and stays <= prompt.onset + 12 + 1, "one copy of the cycle stays"
    assert len(tokens) == REWOUND and tokens[:stays] == o.expected(prompt, stays)
    assert tokens[: stays + 24] != o.expected(prompt, stays + 24), "the third copy is left before its end"
    assert sum(tokens[i : i + 12] == list(prompt.cycle) for i in range(REWOUND)) <= 2
    assert tail_period(tokens, shortest=24) is None
    chat = Conversation(o.model, GUARD, tokenizer=o.tokenizer)
    turn = chat.ask(prompt.ids[0].tolist(), max_new_tokens=REWOUND, streamer=Mock())
    assert len(turn.ids) == REWOUND and turn.events and not any(event.data["taken_back"] for event in turn.events)
