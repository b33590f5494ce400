"""Measure the recall model for its card: `python -m experiments.recall_card [--out FOLDER]`.

A dialogue with right answers as its history is read once. An answer is right if each of its tokens is the most likely
one at its place, because greedy generation would then have written it.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from experiments.drawn import markdown, put_table
from experiments.record import Row
from experiments.script import run
from sinkscope.bench.prompt import Prompt
from sinkscope.bench.tasks.recall import POSITIONS, recall_dialogue, uneven
from sinkscope.files.output import write_atomic

FOLDER = Path(__file__).parents[1] / "sinkscope/models/recall"
NUMBERS = "measured.json"


@dataclass(frozen=True)
class Case:
    """A number of dialogues of one shape. Every other one ends with a question about an unknown key."""

    dtype: str
    total: int
    turns: int
    hops: int
    dialogues: int


CASES = (
    Case("float32", 512, 3, 2, 16),
    Case("float32", 2048, 3, 2, 4),
    Case("float32", 2048, 16, 3, 4),
    Case("bfloat16", 512, 3, 2, 16),
    Case("bfloat16", 2048, 9, 3, 4),
    Case("float16", 512, 3, 2, 4),
    Case("float32", 8192, 3, 4, 2),
    Case("float32", 16384, 3, 4, 2),
)


def sequence(tokenizer: Any, dialogue: Prompt) -> tuple[list[int], list[tuple[int, list[int]]]]:
    """Return the ids of a dialogue with right answers; per turn, the position of `answer` and the ids of the answer."""
    ids = [tokenizer.bos_token_id]
    answers = []
    for turn in dialogue.turns:
        ids += tokenizer(turn.text, add_special_tokens=False)["input_ids"]
        answer = tokenizer(turn.answers[0], add_special_tokens=False)["input_ids"]
        answers.append((len(ids) - 1, answer))
        ids += answer
    return ids, answers


@torch.no_grad()
def right(model: Any, tokenizer: Any, dialogue: Prompt) -> tuple[list[bool], float]:
    """Return whether each answer is right, and the smallest lead of a right token's logit over the next best."""
    ids, answers = sequence(tokenizer, dialogue)
    hidden = model.model(torch.tensor([ids])).last_hidden_state[0]
    found = []
    lead = float("inf")
    for at, answer in answers:
        logits = model.lm_head(hidden[at : at + len(answer)]).float()
        gold = torch.tensor(answer)[:, None]
        other = logits.scatter(1, gold, -torch.inf).amax(1)
        leads = logits.gather(1, gold)[:, 0] - other
        found.append(bool((leads > 0).all()))
        lead = min(lead, float(leads.min()))
    return found, lead


def measure(model: Any, tokenizer: Any, case: Case) -> Row:
    """Return the accuracy of stated and of unstated questions by position, and the smallest lead."""
    model.to(getattr(torch, case.dtype))
    counts: dict[str, list[bool]] = {f"{p} {s}": [] for p in POSITIONS for s in ("stated", "unstated")}
    lead = float("inf")
    start = time.monotonic()
    for seed in range(case.dialogues):
        stated = seed % 2 == 0
        lengths = uneven(case.total, case.turns, seed)
        hops = min(case.hops, 60 // case.turns)
        for position in POSITIONS:
            dialogue = recall_dialogue(
                900_000 + seed, turns=case.turns, tokens=lengths, hops=hops, stated=stated, position=position
            )
            found, least = right(model, tokenizer, dialogue)
            lead = min(lead, least)
            counts[f"{position} stated"] += found if stated else found[:-1]
            counts[f"{position} unstated"] += [] if stated else found[-1:]
    print(case, f"{time.monotonic() - start:.0f} s, lead {lead:.1f}", flush=True)
    return {
        **vars(case),
        "lead": round(lead, 2),
        "right": {name: [sum(found), len(found)] for name, found in counts.items()},
    }


HEAD = ("dtype", "tokens", "turns", "hops", *POSITIONS, "unstated (begin / middle / end)", "lead")


def table(numbers: list[Row]) -> str:
    """Return completely correct answers by position of the question, and the smallest lead, a row for each case."""
    rows = []
    for n in numbers:
        shares = {name: f"{right}/{asked}" for name, (right, asked) in n["right"].items()}
        stated = [shares[f"{position} stated"] for position in POSITIONS]
        unstated = " / ".join(shares[f"{position} unstated"] for position in POSITIONS)
        lead = f"{n['lead']:.1f}"
        rows.append([n["dtype"], f"{n['total']:,}", str(n["turns"]), str(n["hops"]), *stated, unstated, lead])
    return markdown(HEAD, rows)


def main(*, out: Path = FOLDER) -> None:
    import sinkscope as ss

    model = ss.load(out)
    numbers = []
    for case in CASES:
        numbers.append(measure(model, model.tokenizer, case))
    write_atomic(out / NUMBERS, json.dumps(numbers, indent=1) + "\n")
    put_table(out / "README.md", "recall_card", table(numbers))


if __name__ == "__main__":
    run(main)
