"""Dialogues of the recall model, and the methods that read them.

What the scripts beside this one share. Every suite is a folder of `run_bench`: a killed run goes on, and what another
script has answered there already is not answered again.

The numbers of the suites were chosen by rules that look at no method's score: an eighth of the shortest prompt exceeds
SnapKV's window; an answer of `kept` is the one fact that the prompt's last token looks for, those of the others run on
beyond LoopServe's first 16 tokens; fixed budgets are far below the context; all runs together take less than an hour
and a half of one core.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.record import Row
from sinkscope.bench.answer import Batch, cells_of, mean_known, row_events
from sinkscope.bench.benchmark import run as run_bench
from sinkscope.bench.methods import make_method, read_method
from sinkscope.bench.record import Answer, BenchRecord, BenchRun
from sinkscope.bench.task import Size, Task
from sinkscope.bench.tasks.recall import Recall
from sinkscope.files.records import Natural, Whole
from sinkscope.generation.conversation import Conversation
from sinkscope.generation.decode import to_end
from sinkscope.kv import SnapKV
from sinkscope.kv.policy import LayerMoment
from sinkscope.measure.margin import SCORES, interval_of
from sinkscope.models.inputs import end_ids
from sinkscope.models.target import Target, tokenizer_of
from sinkscope.opening.load import load
from sinkscope.results.console import ProgressBar

ALL = "all"
SHARE = 0.125
"""Of the context: what each method may read or compute, where sizes are equal."""
FIXED = 128
"""Budget that is far below the context."""
LONGBENCH = "window=32:kernel=7:pooling=max"
"""SnapKV's window in its own runs on LongBench; Table 7 gives a budget alone."""
TABLE7 = {
    "full": "full",
    "h2o": "h2o:1024:recent=0.5",
    "snapkv": "snapkv:1024",
    "adakv": "adakv:1024",
    "streaming": "streaming:4096",
    "a-shape": "a-shape:first=128:local=4096",
    "tri-shape": "tri-shape:first=128:local=4096:dense_rows=128",
    "minference": "minference:vertical=1000:slash=6096",
    "loopserve": "loopserve:1024:interval=16",
}
"""The sizes of LoopServe's Table 7; of MInference, which it leaves open, the numbers of lines of its code."""


@dataclass(frozen=True, kw_only=True)
class OneCache(Task):
    """Dialogues on one cache that grows over the turns; the history answers each turn after the method has."""

    def answers(self, target: Target, batch: Batch) -> list[BenchRecord]:
        """Answer all turns of the prompts, prompt after prompt."""
        records: list[BenchRecord] = []
        for prompt in batch.prompts:
            talk = Conversation(target, make_method(batch.methods[0]), tokenizer=target.tokenizer)
            for number, turn in enumerate(prompt.turns):
                text = f"\n\n{turn.text}" if number else turn.text
                asked = copy(talk).ask(text, max_new_tokens=batch.new)
                tokens = to_end(list(asked.ids), end_ids(target))
                ended = "eos" if tokens[-1] in end_ids(target) else "cap"
                costs = {
                    "prompt_tokens": asked.prompt_tokens,
                    "length": len(tokens),
                    "read": asked.read,
                    "cells": cells_of(asked.events, 0),
                    "cached_peak": asked.prompt_tokens + len(tokens) - 1.0,
                    "seconds": 0.0,
                }
                written = tokenizer_of(target).decode(tokens, skip_special_tokens=True)
                events = row_events(asked.events, 0, len(tokens))
                answer = Answer(tokens=tuple(tokens), text=written, ended=ended, metrics=costs, events=events)
                metrics = self.score(target, batch, turn, answer)
                records.append(batch.record(batch.methods[0], prompt, number, answer, metrics))
                if number + 1 < len(prompt.turns):
                    talk.ask(text, answer=turn.answers[0])
        return records


@dataclass(frozen=True, kw_only=True)
class NineTurns(OneCache, Recall):
    """Dialogues of nine turns for the recall model."""

    turns: Natural = 9
    lengths: tuple[Size, ...] = (2700,)
    least: Natural = 272
    seed: Whole = 200


@dataclass(frozen=True)
class Suite:
    """What the recall model answers under the name of the folder of the answers."""

    name: str
    task: Task


KEPT = Suite("kept", Recall(samples=8, turns=3, lengths=(1800,), least=512, hops=1))
CHAIN = Suite("chain", Recall(samples=8, turns=3, lengths=(1800,), least=512, hops=8))
LONG = Suite("long", Recall(samples=2, turns=1, lengths=(4864,), least=4864, hops=8))
NINE = Suite("nine", NineTurns(samples=2, hops=1))
NINE_CHAIN = Suite("nine-chain", NineTurns(samples=3, hops=7))


@dataclass(frozen=True, kw_only=True)
class RandomKeep(SnapKV):
    """Control: the window of SnapKV, and of what came before it a random part."""

    def scores(self, at: LayerMoment) -> Tensor:
        """Random numbers, the same for the same layer and length."""
        generator = torch.Generator().manual_seed(1000 * int(at.length.max()) + at.layer)
        return torch.rand(at.kv.pos.shape, generator=generator).to(at.kv.pos.device)


def specs(names: Sequence[str]) -> list[str]:
    """Methods as their records are kept, at an eighth of the context; the name of the control is written out."""
    own = f"{__name__}:RandomKeep:"
    return [read_method(re.sub("^random:", own, name), SHARE) for name in names]


def answers(suite: Suite, methods: Sequence[str], work: Path) -> BenchRun:
    """Everything that the methods say, from the folder or anew."""
    torch.set_num_threads(1)
    with ProgressBar() as progress:
        return run_bench(load("recall"), suite.task, methods, out=work / suite.name, progress=progress)


def rows_of(records: Sequence[BenchRecord], method: str, by_turn: bool = False) -> list[Row]:
    """Scores of a method over all answers, and by position of the question or by turn, counted from 1 ("at").

    By position, `cells` are those that outputs attend to, without the rows from which lines are chosen.
    """
    groups: dict[Any, list[BenchRecord]] = {ALL: []}
    for one in records:
        if one.method == method:
            groups[ALL].append(one)
            groups.setdefault(one.turn + 1 if by_turn else one.part, []).append(one)
    return [{"at": at, "method": method, "answers": len(group), **_scores(group)} for at, group in groups.items()]


def _scores(records: Sequence[BenchRecord]) -> Row:
    """Means over answers, and around the first of them a 95 % interval.

    `prefix` is the mean share of an answer before its first mistake: along a chain of facts a mistake is the end of it.
    `read` is what a decoding step attends to, `cells` the share of the prompt's cells that outputs attend to (None:
    left to the model).
    """
    kept = ("score", "prefix", "agree", "read", "cells", "prompt_tokens")
    found: Row = {name: mean_known(one.metrics.get(name) for one in records) for name in kept}
    rate = interval_of(np.array([one.metrics["score"] for one in records]), SCORES)
    low, high = (None, None) if rate is None else (rate.low, rate.high)  # of two answers, there is none
    return found | {"low": low, "high": high}
