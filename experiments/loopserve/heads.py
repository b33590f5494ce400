"""A conversation of four turns under LoopServe, head by head: cells, weight, kept positions, tokens read.

    python -m experiments.loopserve.heads [--work runs] [--out figures]

The recall model answers a dialogue of four turns on one cache. Prompts use the lines that the default chooses, and
decoding attends to 128 tokens from the first step on.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import sinkscope as ss
from experiments.drawn import save
from experiments.loopserve.turn_drawing import draw_turns
from experiments.record import record
from experiments.script import run
from sinkscope.bench.prompt import Prompt
from sinkscope.bench.tasks.recall import recall_dialogue
from sinkscope.models.names import RECALL

TURNS, TOKENS, BUDGET = 4, 400, 128


def asked() -> tuple[Prompt, ss.Conversation]:
    """The dialogue, and the conversation that answered it."""
    dialogue = recall_dialogue(1, turns=TURNS, tokens=TOKENS, hops=1)
    chat = ss.Conversation(ss.load(RECALL, backend="hf"), ss.LoopServe(budget=BUDGET, shortest=0, first=0))
    for turn in dialogue.turns:
        chat.ask(turn.text, max_new_tokens=8)
    return dialogue, chat


def figure(_: dict[str, Any]) -> Any:
    """Draw the conversation, which is asked again in seconds: a record does not hold every line."""
    return draw_turns(asked()[1])


def main(*, work: Path | None = None, out: Path = Path("figures")) -> None:
    """Make what the module describes.

    Args:
        work: Nothing is kept between runs; the option is there for the command that made the figure.
    """
    started = time.perf_counter()
    dialogue, chat = asked()
    rows = [
        {
            "turn": number,
            "right": said.text == turn.answers[0].removesuffix(" ."),
            "prompt_tokens": said.prompt_tokens,
            "read": said.read,
            "cells": [None if lines is None else lines.density().tolist() for lines in said.lines],
            "recovered": [event.data.get("recovered") for event in said.events if event.kind == "prefill"],
        }
        for number, (said, turn) in enumerate(zip(chat.turns, dialogue.turns, strict=True), 1)
    ]
    for row in rows:
        print(f"turn {row['turn']}: right {row['right']}, {row['prompt_tokens']} tokens, {row['read']} read")
    settings = {"turns": TURNS, "tokens": TOKENS, "budget": BUDGET, "model": RECALL}
    save(
        "loopserve_heads",
        record("loopserve-heads", {"rows": rows}, settings, started=started),
        lambda _: draw_turns(chat),
        out,
    )


if __name__ == "__main__":
    run(main)
