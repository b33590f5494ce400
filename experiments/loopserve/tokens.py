"""Observation 4 and Fig. 4 of the LoopServe paper: which queries find the tokens that an answer attends to.

Every prompt is answered greedily with its question before the context, in the middle of it, and after it. A token's
importance is the attention that it receives from a set of queries, summed over these queries, all heads and layers.
`experiments.loopserve.longeval` measures this on LongEval's files and on ordinary text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from experiments.record import Row
from sinkscope.errors import SinkscopeError
from sinkscope.files.records import read_rows
from sinkscope.hooks.edit.decode import decode
from sinkscope.lines.attention import Scores
from sinkscope.lines.sums import line_sums, scores_of
from sinkscope.measure import Setup
from sinkscope.models.target import Target
from sinkscope.models.text import text_rows

ASKED = "\n\nQuestion: What is this text about?\n\nAnswer:"  # about ordinary text
ENDS = ("Now the record ends.", "Now the record is over.")  # of the context, in LongEval's topics and lines
POSITIONS = ("begin", "middle", "end")
BEFORE = 8  # blocks of the prompt's end
BUDGETS = (0.05, 0.1, 0.15)  # shares of a prompt's tokens that count as important


@dataclass(frozen=True)
class Question:
    """Ids of a prompt in parts, without BOS, so that the question can be placed anywhere in the context."""

    start: list[int]
    context: list[int]
    question: list[int]

    def placed(self, position: str) -> list[int]:
        """The prompt with the question at "begin", "middle" or "end"."""
        at = {"begin": 0, "middle": len(self.context) // 2, "end": len(self.context)}[position]
        return [*self.start, *self.context[:at], *self.question, *self.context[at:]]


def split_prompt(prompt: str) -> tuple[str, str]:
    """Context and question of a prompt of LongEval; the cue that ends the context belongs to the topics' context."""
    for end, with_context in zip(ENDS, (True, False), strict=True):
        before, cue, after = prompt.partition(end)
        if cue and with_context:
            return f"{before}{cue} ", after.strip()
        if cue:
            return before, f"{cue}{after}".strip()
    raise SinkscopeError(f"the prompt has neither {ENDS[0]!r} nor {ENDS[1]!r}: give a file of LongEval")


def prompts_of(file: Path, count: int) -> list[tuple[str, str]]:
    """Context and question of the first prompts of a file of LongEval."""
    rows = []
    for _, row in read_rows(file, "LongEval's JSON lines"):
        rows.append(split_prompt(row["prompt"]))
    return rows[:count]


def questions(setup: Setup, prompts: Sequence[tuple[str, str]], count: int, length: int, new: int) -> list[Question]:
    """Prompts of at most `length` tokens, which leave room for an answer of `new`; without any, ordinary text."""

    def ids_of(text: str) -> list[int]:
        ids = setup.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids[int(ids[:1] == [setup.bos]) :]  # some tokenizers add it all the same

    start = [setup.bos]
    if setup.bos is None:
        start = []
    named = [(ids_of(context), ids_of(question)) for context, question in prompts]
    if not prompts:
        for piece in text_rows(setup.tokenizer, setup.text, count, length, setup.bos)[:, len(start) :].tolist():
            named.append((piece, ids_of(ASKED)))
    limit = min(length, (setup.target.max_positions or length + new) - new)
    asked: list[Question] = []
    for context, question in named:
        most = limit - len(start) - len(question)
        if len(context) > most:  # the middle is cut, as in LongBench
            context = [*context[: most - most // 2], *context[len(context) - most // 2 :]]
        asked.append(Question(start, context, question))
    return asked


def importance(
    target: Target, ids: Tensor, prompt: int, ranges: Sequence[tuple[int, int]]
) -> list[Float[Tensor, " key"]]:
    """Attention that each of the first `prompt` tokens receives from the queries of each range."""
    totals = []
    for _ in ranges:
        totals.append(torch.zeros(prompt))

    def add(_: int, scores: Scores) -> None:
        for total, (start, stop) in zip(totals, ranges, strict=True):
            received = line_sums(scores.part(start, stop))[:, 0].sum(0).cpu()[:prompt]
            total[: len(received)] += received

    with scores_of(target, add, list(range(target.n_layers))):
        target.forward(ids[None])
    return totals


def top_tokens(received: Float[Tensor, " key"]) -> Bool[Tensor, "budget key"]:
    """The tokens of largest importance, for each share of the tokens."""
    chosen = torch.zeros(len(BUDGETS), len(received), dtype=torch.bool)
    for row, budget in zip(chosen, BUDGETS, strict=True):
        row[received.topk(max(1, round(budget * len(received)))).indices] = True
    return chosen


def means(series: Sequence[Sequence[float]]) -> list[float]:
    """Element-wise mean of several series of equal length."""
    return torch.tensor(series, dtype=torch.float64).mean(0).tolist()


def token_overlap(target: Target, asked: Sequence[Question], new: int, window: int) -> Row:
    """Answer every prompt and compare which tokens queries attend to.

    Returns:
        For the budgets: "positions", the share of the answer's important tokens that the last `window` queries of the
        prompt find; "blocks", the share that blocks of queries before (negative) and in the answer find, with the
        question at the end ("apart": without the block's own queries); "distances", what blocks of an answer share.
    """
    shares: dict[str, dict[Any, list[list[float]]]] = {"positions": {}, "blocks": {}, "apart": {}, "distances": {}}

    def note(name: str, at: Any, found: Bool[Tensor, "budget key"], truth: Bool[Tensor, "budget key"]) -> None:
        shares[name].setdefault(at, []).append(((found & truth).sum(1) / truth.sum(1)).tolist())

    for question in asked:
        for position in POSITIONS:
            ids = question.placed(position)
            answer = decode(target, torch.tensor([ids]), new)[0][0]
            n = len(ids)
            places: list[int] = []
            if position == "end":
                places = [*range(-1, -1 - min(BEFORE, n // window), -1), *range(len(answer) // window)]
            ranges = [(max(0, n - window), n), (n, n + len(answer))]
            for place in places:
                ranges.append((n + place * window, n + (place + 1) * window))
            last, output, *parts = importance(target, torch.tensor([*ids, *answer]), n, ranges)
            truth = top_tokens(output)
            note("positions", position, top_tokens(last), truth)
            tops = {place: top_tokens(part) for place, part in zip(places, parts, strict=True)}
            for place, part in zip(places, parts, strict=True):
                note("blocks", place, tops[place], truth)
                if place < 0:
                    note("apart", place, tops[place], truth)
                elif len(answer) != window:  # an answer of one block has no other queries
                    note("apart", place, tops[place], top_tokens(output - part))
                for other in range(place):
                    note("distances", place - other, tops[other], tops[place])
    blocks: list[Row] = []
    for place, values in sorted(shares["blocks"].items()):
        alone = None
        if place in shares["apart"]:
            alone = means(shares["apart"][place])
        blocks.append({"block": place, "overlap": means(values), "apart": alone})
    positions = [{"position": name, "overlap": means(values)} for name, values in shares["positions"].items()]
    distances: list[Row] = []
    for apart, values in sorted(shares["distances"].items()):
        distances.append({"blocks": apart, "overlap": means(values)})
    return {
        "budgets": list(BUDGETS),
        "window": window,
        "positions": positions,
        "blocks": blocks,
        "distances": distances,
    }
