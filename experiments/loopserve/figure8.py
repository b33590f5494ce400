"""Figure 8 of the LoopServe paper: where questions stand in a turn, drawn from a dialogue of the benchmark.

    python -m experiments.loopserve.figure8 [--turns 3] [--tokens 160] [--out figures]

The figure shows one dialogue of the recall model three times, with the questions at the beginning, in the middle and at
the end of each turn. Every token is a cell. Colours mark the questions and the facts that their answers need; some
facts are in earlier turns.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from experiments.drawn import at_place, save
from experiments.record import record
from experiments.script import run
from sinkscope.bench.prompt import Turn
from sinkscope.bench.tasks.recall import ASK, FACT, POSITIONS, TAIL, Position, recall_dialogue
from sinkscope.display.style import BLUE, GREEN, ORANGE, RED, finished

CONTEXT, NEEDED, QUESTION, ANSWER = "context", "fact that an answer needs", "question", "answer"
COLOURS = {CONTEXT: "#d9d9d9", NEEDED: GREEN, QUESTION: ORANGE, ANSWER: BLUE}


def pieces(turn: Turn, needed: Sequence[str]) -> list[tuple[str, int]]:
    """Kind and length of the parts of a turn and its answer, in order; `needed` are facts as they are written."""
    words: list[str] = turn.text.split()
    kinds = [CONTEXT] * len(words)
    ask = words.index(ASK)
    kinds[ask : ask + 2 + len(TAIL)] = [QUESTION] * (2 + len(TAIL))
    for fact in needed:
        parts = fact.split()
        for at in range(len(words) - len(parts) + 1):
            if words[at : at + len(parts)] == parts:
                kinds[at : at + len(parts)] = [NEEDED] * len(parts)
    found: list[tuple[str, int]] = []
    for kind in [*kinds, *[ANSWER] * len(turn.answers[0].split())]:
        found[-1:] = [(kind, found[-1][1] + 1)] if found and found[-1][0] == kind else [*found[-1:], (kind, 1)]
    return found


def turns_at(place: Position, turns: int, tokens: int) -> tuple[Turn, ...]:
    """The turns of the dialogue with the questions at a place."""
    return recall_dialogue(4, turns=turns, tokens=tokens, hops=2, distractors=3, position=place).turns


def chain(turns: Sequence[Any], number: int) -> list[str]:
    """The facts that the answer of a turn runs through, as they are written."""
    words = turns[number].text.split()
    key, answer = words[words.index(ASK) + 1], turns[number].answers[0].split()
    found: list[str] = []
    for at in range(0, len(answer), 3):
        found.append(" ".join([FACT, key, *answer[at : at + 3]]))
        key = answer[at + 2]
    return found


def figure(data: dict[str, Any]) -> Any:
    """A bar per position: tokens from left to right, lines between turns."""
    rows, turns = data["result"]["pieces"], data["settings"]["turns"]
    import plotly.graph_objects as go

    fig: Any = go.Figure()
    for kind, colour in COLOURS.items():
        mine = [row for row in rows if row["kind"] == kind]
        fig.add_bar(
            y=[f"question {at_place(row['position'])}" for row in mine],
            x=[row["tokens"] for row in mine],
            base=[row["start"] for row in mine],
            orientation="h",
            name=kind,
            marker={"color": colour, "line": {"width": 0}},
        )
    for turn in range(turns):
        start = next(row["start"] for row in rows if row["turn"] == turn)
        fig.add_vline(x=start, line={"color": RED, "width": 1.5, "dash": "dot"})
        fig.add_annotation(x=start, y=1.12, yref="paper", text=f"turn {turn + 1}", showarrow=False, xanchor="left")
    fig.update_xaxes(title="token of the dialogue")
    fig.update_yaxes(autorange="reversed")
    away: dict[str, list[int]] = {}
    for row in rows:
        if row["kind"] == "question":
            same = [
                r for r in rows if (r["position"], r["turn"], r["kind"]) == (row["position"], row["turn"], "answer")
            ]
            away.setdefault(row["position"], []).append(same[0]["start"] - row["start"])
    found = "From a question to its answer: " + ", ".join(
        f"{fmean(tokens):.0f} tokens if it stands {at_place(place)}" for place, tokens in away.items()
    )
    margin = {"l": 190, "r": 20, "t": 110, "b": 100}
    return finished(
        fig,
        None,
        found,
        width=1300,
        height=400,
        barmode="overlay",
        legend=-0.25,
        bottom=100,
        margin=margin,
    )


def main(*, turns: int = 3, tokens: int = 160, out: Path = Path("figures")) -> None:
    """Make what the module describes.

    Args:
        tokens: Tokens of each turn's prompt.
    """
    started = time.perf_counter()
    needed = [fact for number in range(turns) for fact in chain(turns_at("end", turns, tokens), number)]
    rows = list[dict[str, Any]]()
    for place in POSITIONS:
        start = 0
        for number, turn in enumerate(turns_at(place, turns, tokens)):
            for kind, size in pieces(turn, needed):
                rows.append({"position": place, "turn": number, "kind": kind, "start": start, "tokens": size})
                start += size
    text = record("loopserve-fig8", {"pieces": rows}, {"turns": turns, "tokens": tokens}, started=started)
    save("loopserve_fig8", text, figure, out)


if __name__ == "__main__":
    run(main)
