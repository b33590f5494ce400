"""What ends the loops of a real model, and how its text goes on: guards and samplers, on openings of four kinds.

    python -m experiments.papers.loopguard.real WORK --model FILE [--only ARM ...]

The outputs of each arm are appended to WORK/runs.jsonl; given again, the command goes on from there.
`experiments.papers.loopguard.real_table` makes the tables.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList
from transformers import RepetitionPenaltyLogitsProcessor as Penalty

from experiments.papers.loopguard.dry import DRY
from experiments.papers.loopguard.variants import MONITORS
from experiments.papers.loopguard.verdicts import HALVES
from experiments.record import Row, read_rows
from experiments.script import run
from sinkscope.generation.decode import decode
from sinkscope.loops.guard import LoopGuard, Steer
from sinkscope.models.inputs import end_ids
from sinkscope.opening.load import load, target_of

KINDS: dict[str, list[str]] = json.loads(Path(__file__).with_name("real_openings.json").read_text(encoding="utf-8"))
"""Openings of prose, dialogue, code and tables; every second one is for choosing."""
BUDGET = 256
"""Of the printed guard: it is as far below the length of these outputs as the paper's is below that of its own."""
FULL, NEW = "full", 400
PENALTY = Steer(temperature=0.0)
GUARDS: dict[str, LoopGuard] = {
    "rewind": LoopGuard(),
    "rewind, temperature 0": LoopGuard(steer=PENALTY),
    "rewind, penalty 0": LoopGuard(steer=Steer(penalty=0.0)),
    **{f"cut {k}, penalty 2": LoopGuard(act="cut", steer=PENALTY, local=k) for k in (0, 4, 16)},
    "cut 4, penalty 0": LoopGuard(act="cut", steer=None),
    "as printed": LoopGuard.paper(BUDGET),
    "as printed, local 4": LoopGuard.paper(BUDGET, local=4),
    **{f"as printed, {name}": LoopGuard.paper(BUDGET, monitor=monitor) for name, monitor in MONITORS.items()},
}


def dry_with_breakers(tokenizer: Any, pad: int) -> LogitsProcessor:
    """DRY with its usual numbers and breakers: a token that contains one is part of no repetition."""
    ignored = {pad}
    for token in range(len(tokenizer)):
        if not {"\n", ":", '"', "*"}.isdisjoint(tokenizer.decode([token])):
            ignored.add(token)
    return DRY(ignore=ignored)


SAMPLERS: dict[str, Callable[[Any, int], LogitsProcessor]] = {
    "DRY, breakers": dry_with_breakers,
    "repetition penalty 1.1": lambda tokenizer, pad: Penalty(1.1),
}


def openings_of(half: str) -> list[tuple[str, str]]:
    """The openings of a half, with their kinds; the halves take turns within each kind."""
    return [(kind, text) for kind, texts in KINDS.items() for text in texts[HALVES.index(half) :: len(HALVES)]]


def outputs_of(work: Path, **where: Any) -> list[Row]:
    """The outputs in the runs.jsonl of a folder that have these values."""
    rows = read_rows(work / "runs.jsonl")
    return [row for row in rows if all(row[name] == value for name, value in where.items())]


@torch.no_grad()
def continued(live: Any, texts: Sequence[str], arm: str) -> list[Row]:
    """Continue openings greedily under a remedy: new tokens, whether they ended, and what a guard did."""
    target = target_of(live)
    ends = end_ids(target)
    pad = max(0, min(ends, default=0))
    options: dict[str, Any] = {}
    if arm in SAMPLERS:
        options["logits_processor"] = LogitsProcessorList([SAMPLERS[arm](live.tokenizer, pad)])
    outputs: list[Row] = []
    for text in texts:  # one by one: a guard takes tokens back of one text
        ids = live.tokenizer(text, verbose=False)["input_ids"]
        (tokens,), acting = decode(target, [ids], NEW, GUARDS.get(arm), **options)
        acts = []
        for event in () if acting is None else acting.events:
            acts.append({key: event.data[key] for key in ("generated", "taken_back", "period", "bad")})
        outputs.append({"tokens": tokens, "ended": tokens[-1] in ends, "acts": acts})
    return outputs


def main(
    work: Path,
    *,
    model: str,
    only: Sequence[str] = (FULL,),
) -> None:
    """Make what the module describes.

    Args:
        work: Folder of the outputs.
        model: A name, hub id, folder or file.
        only: Arms.
    """
    live: Any = load(model, device="cpu")
    work.mkdir(parents=True, exist_ok=True)
    file = work / "runs.jsonl"
    file.touch()
    for arm, half in product(only, HALVES):
        where = {"model": Path(model).stem, "new": NEW, "arm": arm, "half": half}
        if outputs_of(work, **where):
            continue
        kinds, texts = zip(*openings_of(half), strict=True)
        with file.open("a") as out:
            for number, output in enumerate(continued(live, texts, arm)):
                out.write(json.dumps({**where, "number": number, "kind": kinds[number], **output}) + "\n")


if __name__ == "__main__":
    run(main)
