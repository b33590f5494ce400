"""What ends the loops of a real model, and how its text goes on: guards, cuts, samplers, on openings of four kinds.

    python -m experiments.loopguard.real WORK --model FILE [--halves choose report] [--new 400] [--only ARM ...]

The outputs of each arm are appended to WORK/runs.jsonl; given again, the command goes on from there. "full" also keeps
the largest probability of each step. With `--alarmed`, a guard's outputs are made only where "full" is there and raises
an alarm: before it a guard changes nothing, so the others equal "full" and are marked as "taken" from it.
`experiments.loopguard.real_table` makes the tables.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import LogitsProcessor, LogitsProcessorList
from transformers import RepetitionPenaltyLogitsProcessor as Penalty

from experiments.loopguard.real_openings import openings_of
from experiments.loopguard.variants import MONITORS
from experiments.record import Row, read_rows
from experiments.script import run
from sinkscope.generation.decode import decoding, padded, to_end
from sinkscope.generation.write import write
from sinkscope.hooks.edit.base import under
from sinkscope.loops import Tail
from sinkscope.loops.guard import LoopGuard, Steer
from sinkscope.loops.guard.detect import monitors
from sinkscope.loops.guard.steer import DRY
from sinkscope.loops.text.monitor import Settings
from sinkscope.loops.text.repetition import asked_copies
from sinkscope.models.inputs import end_ids
from sinkscope.opening.live import target_of
from sinkscope.opening.load import load

BUDGET = 256
"""Of the printed guard: it is as far below the length of these outputs as the paper's is below that of its own."""


def outputs_of(works: Sequence[Path], **where: Any) -> list[Row]:
    """The outputs in the runs.jsonl of folders that have these values; where one was made again, the last counts."""
    found: dict[tuple[Any, ...], Row] = {}
    for work in works:
        for row in read_rows(work / "runs.jsonl"):
            if all(row[name] == value for name, value in where.items()):
                found[row["model"], row["arm"], row["half"], row["number"]] = row
    return list(found.values())


class CutAll(LoopGuard):
    """A guard that removes the whole repetition, its last tokens too."""

    def to_cut(self, begin: int, length: int, period: int | None) -> tuple[int, int]:
        """Everything."""
        return begin, length


@dataclass(frozen=True)
class Arm:
    """One remedy.

    Attributes:
        guard: Makes its guard, if it has one.
        processors: Makes its samplers from the length of the padding and the tokenizer.
    """

    guard: Callable[[], LoopGuard] | None = None
    processors: Callable[[Any, int], list[LogitsProcessor]] | None = None


PENALTY = Steer(temperature=0.0)


def plain(kind: type[LoopGuard] = LoopGuard, **settings: Any) -> Arm:
    """A guard that only cuts the cache."""
    return Arm(lambda: kind(act="cut", **settings))


def printed(**settings: Any) -> Arm:
    """The guard as printed, with some fields changed."""
    return Arm(lambda: LoopGuard.paper(BUDGET, **settings))


def dry_with_breakers(tokenizer: Any, pad: int) -> list[LogitsProcessor]:
    """DRY with its usual numbers and breakers: a token that contains one is part of no repetition."""
    ignored = {pad}
    for token in range(len(tokenizer)):
        if not {"\n", ":", '"', "*"}.isdisjoint(tokenizer.decode([token])):
            ignored.add(token)
    return [DRY(ignore=ignored)]


FULL = "full"
ARMS: dict[str, Arm] = {
    FULL: Arm(),
    "cut all, penalty 2": plain(CutAll, steer=PENALTY, local=0),
    **{f"cut {k}, penalty 2": plain(steer=PENALTY, local=k) for k in (0, 4, 16)},
    "cut 4, penalty 0": plain(steer=None),
    "rewind": Arm(LoopGuard),
    "rewind, temperature 0": Arm(lambda: LoopGuard(steer=PENALTY)),
    "rewind, penalty 0": Arm(lambda: LoopGuard(steer=Steer(penalty=0.0))),
    "as printed": printed(),
    "as printed, local 4": printed(local=4),
    "as printed, p1 alone": printed(monitor=MONITORS["p1"]),
    "as printed, always on": printed(monitor=MONITORS["always"]),
    "DRY, breakers": Arm(None, dry_with_breakers),
    "repetition penalty 1.1": Arm(None, lambda tokenizer, pad: [Penalty(1.1)]),
}


class Largest(LogitsProcessor):
    """Keeps the largest probability of each step."""

    def __init__(self) -> None:
        self.steps: list[torch.Tensor] = []

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Return the scores as they are."""
        self.steps.append((scores.amax(-1) - scores.float().logsumexp(-1)).exp())
        return scores


def first_alarm(
    settings: Settings, tokenizer: Any, ids: Sequence[int], prompt: str, largest: Sequence[float] = ()
) -> tuple[int, Tail | None] | None:
    """Return the number of the token at which the monitor fires, and the repetition; None if it does not."""
    monitor = monitors(settings, tokenizer)(asked=asked_copies(prompt))
    following = [*largest[1:], *largest[-1:]]  # the last one is not known
    for number, (token, p_max) in enumerate(itertools.zip_longest(ids, following), 1):
        step = monitor.update(token, p_max)
        if step.trigger:
            return number, step.tail
    return None


@torch.no_grad()
def continued(live: Any, rows: list[list[int]], arm: Arm, new: int) -> list[Row]:
    """Continue prompts greedily under a remedy: new tokens, events and, without a remedy, largest probabilities."""
    target = target_of(live)
    ends = end_ids(target)
    pad = max(0, min(ends, default=0))
    ids, mask = padded(rows, pad, target.device)
    largest = Largest()
    processors: list[LogitsProcessor] = []
    if arm.processors is not None:
        processors = arm.processors(live.tokenizer, pad)
    elif arm.guard is None:
        processors = [largest]
    options = decoding(target, max_new_tokens=new, do_sample=False)
    options["logits_processor"] = LogitsProcessorList(processors)
    guard = None if arm.guard is None else arm.guard()
    with under(guard, target) as acting:
        output = write(acting, target.hf, ids, attention_mask=mask, pad_token_id=pad, **options)
    outputs: list[Row] = []
    probabilities: list[list[float]] = [[] for _ in rows]
    if largest.steps:
        probabilities = torch.stack(largest.steps, 1).tolist()
    for number, row in enumerate(output[:, ids.shape[1] :].tolist()):
        tokens = to_end(row, ends)
        acts: list[Row] = []
        if acting is not None:
            for event in acting.events:
                if event.row == number and event.kind == LoopGuard.KIND:
                    acts.append({key: event.data[key] for key in ("generated", "taken_back", "period", "bad")})
        rounded = [round(value, 4) for value in probabilities[number][: len(tokens)]]
        ended = bool(tokens) and tokens[-1] in ends
        outputs.append({"tokens": tokens, "ended": ended, "acts": acts, "largest": rounded})
    return outputs


def main(
    work: Path,
    *,
    model: str,
    halves: Sequence[Literal["choose", "report"]] = ("choose", "report"),
    new: int = 400,
    count: int = 12,
    only: Sequence[str] = (FULL,),
    alarmed: bool = False,
) -> None:
    """Make what the module describes.

    Args:
        work: Folder of the outputs.
        model: A name, hub id, folder or file.
        halves: Openings for choosing, and those that are reported.
        new: Number of new tokens.
        count: Openings of each kind in each half.
        only: Arms.
        alarmed: Whether a guard that exact copies alarm continues only the prompts whose output "full" raises an alarm.
    """
    live: Any = load(model, device="cpu")
    work.mkdir(parents=True, exist_ok=True)
    file = work / "runs.jsonl"
    setting: Row = {"model": Path(model).stem, "new": new}
    made: dict[tuple[str, str, int], Row] = {}

    def keep(row: Row) -> None:
        made[row["arm"], row["half"], row["number"]] = row
        with file.open("a") as out:
            out.write(json.dumps(row) + "\n")

    if file.is_file():
        for row in outputs_of([work], **setting):
            made[row["arm"], row["half"], row["number"]] = row
    places = [(half, number, *one) for half in halves for number, one in enumerate(openings_of(half, count))]
    for name in only:
        guard = ARMS[name].guard
        missing: list[tuple[str, int, str, str]] = []
        for half, number, kind, text in places:
            if (name, half, number) in made:
                continue
            if alarmed and guard is not None:
                stock = made[FULL, half, number]
                if first_alarm(guard().settings, live.tokenizer, stock["tokens"], text) is None:
                    keep({**stock, "arm": name, "largest": [], "taken": True})
                    continue
            missing.append((half, number, kind, text))
        rows = [live.tokenizer(text, verbose=False)["input_ids"] for *_, text in missing]
        outputs = continued(live, rows, ARMS[name], new) if missing else []
        for (half, number, kind, _), output in zip(missing, outputs, strict=True):
            keep({**setting, "arm": name, "half": half, "number": number, "kind": kind, **output})
        print(f"{setting['model']} {name}: {len(outputs)} outputs")


if __name__ == "__main__":
    run(main)
