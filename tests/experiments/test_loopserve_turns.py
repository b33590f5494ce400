"""The picture of a conversation's turns shows what the turns hold."""

from __future__ import annotations

import pytest

import sinkscope as ss
from experiments.loopserve.turn_drawing import draw_turns
from sinkscope.bench.tasks.recall import recall_dialogue
from sinkscope.errors import SinkscopeError


def test_panels_show_the_lines_of_every_turn() -> None:
    model = ss.load("recall", backend="hf", probe=False)
    chat = ss.Conversation(model, ss.LoopServe(budget=64, shortest=0, first=0))
    with pytest.raises(SinkscopeError, match="no turn yet"):
        draw_turns(chat)
    for turn in recall_dialogue(0, turns=2, tokens=120, hops=1).turns:
        chat.ask(turn.text, max_new_tokens=4)
    cells, weight, places, whole, read = draw_turns(chat).data
    for i, turn in enumerate(chat.turns):
        held = [event.data["recovered"] for event in turn.events if event.kind == "prefill"]
        attended = [event.data["attended_by_head"] for event in turn.events if event.kind == "prefill"]
        for layer, lines in enumerate(turn.lines):
            assert lines is not None
            rows = slice(8 * layer, 8 * layer + 8)
            assert [row[i] for row in cells.z[rows]] == pytest.approx(attended[layer])
            assert [row[i] for row in weight.z[rows]] == pytest.approx(held[layer])
    assert list(whole.y) == [turn.prompt_tokens for turn in chat.turns]
    assert list(read.y) == [turn.read for turn in chat.turns]
    first, second = (turn.lines[2].vertical for turn in chat.turns)  # type: ignore[union-attr]
    wide = places.x[1] - places.x[0]
    kept = sum(lines[:, : int(wide)].float().mean(1) for lines in (first, second)) / 2
    assert [row[0] for row in places.z[16:]] == pytest.approx(kept.tolist())  # type: ignore[union-attr]
