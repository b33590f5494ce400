"""LoopGuard where the loop, its period and its onset are known and the cache drives it: it has to end the loop."""

from __future__ import annotations

import torch
from organisms import LoopOrganism, loop_organism

from sinkscope.interventions import Event
from sinkscope.kv.loopguard import LoopGuard

STEPS = 250
CASES = [(4, 0, 0), (12, 30, 900), (24, 0, 1800)]  # period, onset, where on the ring the prompt begins


def guarded(o: LoopOrganism, prompts: list[torch.Tensor], guard: LoopGuard) -> tuple[list[list[int]], list[Event]]:
    width = max(p.shape[1] for p in prompts)
    ids = torch.cat([torch.nn.functional.pad(p, (width - p.shape[1], 0)) for p in prompts])
    mask = torch.cat([torch.nn.functional.pad(torch.ones_like(p), (width - p.shape[1], 0)) for p in prompts])
    with guard.on(o.model) as run:
        out = o.model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=STEPS, do_sample=False)
    return out[:, width:].tolist(), run.events


def test_loops_end_soon_after_they_can_be_told_and_decoding_goes_on() -> None:
    o = loop_organism(0, reach=64)  # the loop lives on its own tail, as the paper has it
    looping = [o.looping_prompt(period, delay=onset, start=start) for period, onset, start in CASES]
    healthy = o.healthy_prompt(60, start=2700)
    tokens, events = guarded(o, [*[p.ids for p in looping], healthy], LoopGuard())
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
        assert end == mine[0].position + 1 and begin <= prompt.ids.shape[1] + prompt.onset, "the tail is the loop"
        assert all(whole[i] == whole[i + period] for i in range(begin, end - period))
        assert begin == end - 256 or whole[begin - 1] != whole[begin - 1 + period], "with the copies in the prompt"
    assert tokens[-1] == o.walk(int(healthy[0, -1]), STEPS) and {e.row for e in events} == {0, 1, 2}


def test_the_control_never_sets_it_off() -> None:
    o = loop_organism(0, induction=False)
    prompt = o.looping_prompt(4)
    tokens, events = guarded(o, [prompt.ids], LoopGuard())
    assert events == [] and tokens == [o.walk(int(prompt.ids[0, -1]), STEPS)]


def test_copies_further_back_keep_a_loop_alive_and_the_named_variant_takes_them_too() -> None:
    o = loop_organism(0)  # heads that look back at everything
    prompt = o.looping_prompt(16, delay=20)  # copies in the prompt, then 20 other tokens, then the loop
    tokens, events = guarded(o, [prompt.ids], LoopGuard())
    assert len(events) > 1 and tokens[0] == o.expected(prompt, STEPS), "the paper's: history holds the copies"
    tokens, events = guarded(o, [prompt.ids], LoopGuard(clean="repeats"))
    found = events[0].data["generated"]
    assert len(events) == 1 and tokens[0][: found + 1] == o.expected(prompt, found + 1)
    assert len(set(tokens[0][found:])) == STEPS - found, "no token comes twice after the cut"
