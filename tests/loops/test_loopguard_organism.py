"""LoopGuard where the loop, its period and its onset are known and the cache drives it: it has to end the loop."""

from __future__ import annotations

from functools import cache
from unittest.mock import Mock

import torch
from organisms import LoopOrganism, loop_organism, tiny_model

from sinkscope.generation.conversation import Conversation
from sinkscope.generation.decode import padded
from sinkscope.generation.generate import generate
from sinkscope.hooks.edit import Event
from sinkscope.loops import MonitorSettings, tail_period
from sinkscope.loops.guard import LoopGuard

STEPS, REWOUND = 140, 90  # new tokens; where a loop is taken back, fewer show it
CASES = [(4, 0, 0), (6, 20, 250), (12, 0, 500)]  # period, onset, where on the ring the prompt begins


@cache
def made(reach: int | None) -> LoopOrganism:
    """With a reach, the loop lives on its own tail, as the paper has it; with none, heads look back at everything."""
    return loop_organism(0, reach=reach, n_layers=2, vocab_size=1024)


EAGER = MonitorSettings(tail_beyond=0, cooldown=8)


def guarded(
    o: LoopOrganism, prompts: list[torch.Tensor], guard: LoopGuard, steps: int = STEPS
) -> tuple[list[list[int]], list[Event]]:
    ids, mask = padded([prompt[0].tolist() for prompt in prompts], 0, torch.device("cpu"))
    with guard.on(o.model) as run:
        out = o.model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=steps, do_sample=False)
    return out[:, ids.shape[1] :].tolist(), run.events


def test_loops_end_soon_after_they_can_be_told_and_decoding_goes_on():
    o = made(64)
    looping = [o.looping_prompt(period, delay=onset, start=start) for period, onset, start in CASES]
    healthy = o.healthy_prompt(60, start=750)
    tokens, events = guarded(o, [*[p.ids for p in looping], healthy], LoopGuard.paper())
    for row, prompt in enumerate(looping):
        mine = [e for e in events if e.row == row]
        assert len(mine) == 1 and mine[0].data["period"] == prompt.period
        found = mine[0].data["generated"]
        # Two votes. The type-token ratio has its own once one token in five is new; the slower of the others, the
        # compression ratio, once what there is of different tokens makes 12 % of all, and it is computed every 16.
        assert 64 <= found <= max(64, (prompt.onset + prompt.period) / 0.12) + 16
        # The token after the alarm was chosen by the call that raised it; from the next on the cache is clean.
        assert tokens[row][: found + 1] == o.expected(prompt, found + 1)
        assert tokens[row][found + 1 :] == o.walk(tokens[row][found], STEPS - found - 1), "the base rule goes on"
        begin, end = mine[0].data["bad"][-1]
        whole, period = [*prompt.ids[0].tolist(), *tokens[row]], prompt.period
        assert end == mine[0].position + 1 and whole[begin : end - period] == whole[begin + period : end]
        assert begin == end - 256 or whole[begin - 1] != whole[begin - 1 + period], "with the copies in the prompt"
    assert tokens[-1] == o.walk(int(healthy[0, -1]), STEPS) and {e.row for e in events} == {0, 1, 2}


def test_a_loop_is_taken_back_from_the_output():
    o = made(64)
    prompt = o.looping_prompt(12, delay=30, start=250)
    text = o.tokenizer.decode(prompt.ids[0, 1:])
    options = {"tokenizer": o.tokenizer, "max_new_tokens": REWOUND}
    (output,) = generate(o.model, text, guard=LoopGuard(monitor=EAGER), **options)
    tokens, first = output.tokens, output.events[0].data
    assert first["taken_back"] >= 2 * 12
    stays = first["generated"] - first["taken_back"]
    assert stays <= prompt.onset + 12 + 1, "one copy of the cycle stays"
    assert len(tokens) == REWOUND and tokens[:stays] == o.expected(prompt, stays)
    assert tokens[: stays + 24] != o.expected(prompt, stays + 24), "the third copy is left before its end"
    copies = sum(tokens[i : i + 12] == list(prompt.cycle) for i in range(REWOUND))
    assert copies <= 2 and tail_period(tokens, shortest=24) is None


def test_nothing_is_taken_back_from_a_text_that_is_shown_while_it_is_written():
    o = made(64)
    prompt = o.looping_prompt(12, delay=30, start=250).ids[0].tolist()
    chat = Conversation(o.model, LoopGuard(monitor=EAGER), tokenizer=o.tokenizer)
    turn = chat.ask(prompt, max_new_tokens=REWOUND, streamer=Mock())
    assert len(turn.ids) == REWOUND
    assert turn.events and not any(event.data["taken_back"] for event in turn.events)


@cache
def two_loops():
    """A model whose next token depends on the last one above all, and two rows that loop at different times."""
    model, tokenizer = tiny_model("llama", num_hidden_layers=2)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data.mul_(0.2)
    torch.manual_seed(2)
    rows = [torch.randint(3, 90, (length,)).tolist() for length in (9, 14)]
    guard = LoopGuard(64, anchors=4, monitor=MonitorSettings(window=48, cooldown=8, tail_shortest=12, tail_beyond=0))
    return model, tokenizer, rows, guard


def test_a_row_that_is_taken_back_reads_its_own_last_token_again():
    model, tokenizer, rows, guard = two_loops()
    options = {"tokenizer": tokenizer, "guard": guard, "max_new_tokens": 48}
    together = generate(model, rows, batch_size=2, **options)
    found = [output.events[0].data for output in together]
    assert found[0]["generated"] != found[1]["generated"] and found[0]["taken_back"] and found[1]["taken_back"]
    assert [output.tokens for output in together] == [generate(model, [row], **options)[0].tokens for row in rows]
