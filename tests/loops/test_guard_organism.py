"""LoopGuard where the loop, its period and its onset are known and the cache drives it: it has to end the loop."""

from __future__ import annotations

from unittest.mock import Mock

import torch
from organisms import kept_loop
from organisms.tokens import BOS
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sinkscope.generation.conversation import Conversation
from sinkscope.generation.decode import decode
from sinkscope.loops import MonitorSettings, tail_period
from sinkscope.loops.guard import LoopGuard
from sinkscope.opening.load import target_of

STEPS, REWOUND = 140, 90  # new tokens; where a loop is taken back, fewer show it
GUARD = LoopGuard(monitor=MonitorSettings(tail_beyond=0, cooldown=8))


def test_loops_end_soon_after_they_can_be_told_and_decoding_goes_on():
    o, onsets = kept_loop(reach=80), (20, 0)  # the loop lives on its own tail, as the paper has it
    rows = [*map(o.prompt, onsets), [BOS, *o.walk(400, 59)]]
    ids = pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_side="left")
    # No word has the id of padding.
    options = {"attention_mask": (ids != 0).long(), "pad_token_id": 0, "do_sample": False}
    with LoopGuard.paper().on(o.model) as run:
        out = o.model.generate(ids, max_new_tokens=STEPS, **options)[:, ids.shape[1] :].tolist()
    assert out[2] == o.walk(459, STEPS), "a row without a loop stays as it is"
    events = sorted(run.events, key=lambda event: event.row)
    assert [event.row for event in events] == [0, 1]
    for row, onset, event, tokens in zip(rows, onsets, events, out, strict=False):
        found = event.data["generated"]
        # Two votes. The type-token ratio has its own once one token in five is new; the slower of the others, the
        # compression ratio, once what there is of different tokens makes 12 % of all, and it is computed every 16.
        assert 64 <= found <= max(64, (onset + 6) / 0.12) + 16 and event.data["period"] == 6
        # The token after the alarm was chosen by the call that raised it; from the next on the cache is clean.
        assert tokens[: found + 1] == o.answer(onset, found + 1)
        assert tokens[found + 1 :] == o.after(tokens[found], STEPS - found - 1), "the base rule goes on"
        (begin, end), whole = event.data["bad"][-1], row + tokens
        assert end == event.position + 1 and whole[begin : end - 6] == whole[begin + 6 : end]
        assert begin == end - 256 or whole[begin - 1] != whole[begin + 5], "with the copies in the prompt"


def test_a_loop_is_taken_back_from_the_output_unless_it_is_shown_while_it_is_written():
    """Processors are asked of the text as it is."""
    o, seen = kept_loop(period=12, reach=80), list[list[int]]()
    prompt, want = o.prompt(30), o.answer(30, REWOUND)

    def see(input_ids: Tensor, scores: Tensor) -> Tensor:
        seen.append(input_ids[0, len(prompt) :].tolist())
        return scores

    (tokens,), run = decode(target_of(o.model), [prompt], REWOUND, GUARD, logits_processor=[see])
    assert run is not None
    (event,) = run.events  # a guard that had forgotten the text would meet the loop as a new one
    stays = event.data["generated"] - event.data["taken_back"]
    assert event.data["taken_back"] >= 2 * 12 and stays <= 30 + 12 + 1, "one copy of the cycle stays"
    assert len(tokens) == REWOUND and tokens[:stays] == want[:stays]
    assert tokens[: stays + 24] != want[: stays + 24], "the third copy is left before its end"
    assert tail_period(tokens, shortest=24) is None
    lengths = [*map(len, seen)]
    assert {*lengths} == {*range(REWOUND)} and len(lengths) > REWOUND, "what was taken back is chosen again"
    assert lengths.count(0) == 1 and tokens[:-1] in seen, "the first token is chosen once"
    chat = Conversation(o.model, GUARD, tokenizer=o.tokenizer)
    turn = chat.ask(prompt, max_new_tokens=REWOUND, streamer=Mock())
    assert len(turn.ids) == REWOUND and turn.events and not any(event.data["taken_back"] for event in turn.events)
