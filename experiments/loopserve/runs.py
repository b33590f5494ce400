"""Dialogues of the recall model, the methods that answer them, and how far the answers are right.

What the scripts beside this one share. Every suite is a folder of `run_dialogues`: a killed run goes on, and what
another script has answered there already is not answered again.

The numbers of the suites were chosen by rules that look at no method's score: an eighth of the shortest prompt exceeds
SnapKV's window; an answer of `kept` is the one fact that the prompt's last token looks for, those of the others run on
beyond LoopServe's first 16 tokens; fixed budgets are far below the context; all runs together take less than three
quarters of an hour of one core.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import torch
from torch import Tensor

from sinkscope.bench.dialogues.form import POSITIONS, Dialogue
from sinkscope.bench.dialogues.recall import END, recall_dialogue, uneven
from sinkscope.bench.dialogues.run import run_dialogues
from sinkscope.bench.dialogues.tables import COMMAND, Near, Said
from sinkscope.bench.files import read_folder
from sinkscope.bench.methods import METHODS, MethodKind, Settings, at_settings, check_methods
from sinkscope.bench.scorers import score
from sinkscope.files.console import ProgressBar
from sinkscope.files.rate import wilson
from sinkscope.kv import Progressive, SnapKV
from sinkscope.kv.policy import At
from sinkscope.models.load import load

ALL = "all"
SHARE = 0.125
"""Of the context: what each method may read or compute, where sizes are equal."""
LONGBENCH = "window=32:kernel=7:pooling=max"
"""SnapKV's window in its own runs on LongBench; Table 7 gives a budget alone."""


@dataclass(frozen=True)
class Suite:
    """Some dialogues.

    Attributes:
        name: folder of its answers.
        count: dialogues.
        turns: of each.
        total: tokens of all turns together.
        least: tokens of the shortest turn.
        hops: facts that an answer runs through, three tokens each.
        seed: of the first dialogue.
        cache: "fresh": every turn is read anew with all before it. "grow": one cache over all turns of a dialogue.
    """

    name: str
    count: int
    turns: int
    total: int
    least: int
    hops: int
    seed: int = 0
    cache: Literal["fresh", "grow"] = "fresh"

    def dialogues(self) -> list[Dialogue]:
        """The dialogues, the same every time."""
        return [
            recall_dialogue(i, turns=self.turns, tokens=uneven(self.total, self.turns, i, self.least), hops=self.hops)
            for i in range(self.seed, self.seed + self.count)
        ]


KEPT = Suite("kept", count=8, turns=3, total=1800, least=512, hops=1)
CHAIN = Suite("chain", count=8, turns=3, total=1800, least=512, hops=8)
LONG = Suite("long", count=2, turns=1, total=4864, least=4864, hops=8)
SWEPT_KEPT = Suite("swept-kept", count=3, turns=3, total=1800, least=512, hops=1, seed=100)
SWEPT_CHAIN = Suite("swept-chain", count=3, turns=3, total=1800, least=512, hops=8, seed=100)
NINE = Suite("nine", count=2, turns=9, total=2700, least=272, hops=1, seed=200, cache="grow")
NINE_CHAIN = replace(NINE, name="nine-chain", count=3, hops=7)


@dataclass(frozen=True, kw_only=True)
class RandomKeep(SnapKV):
    """Control: the window of SnapKV, and of what came before it a random part."""

    def scores(self, at: At) -> Tensor:
        """Random numbers, the same for the same layer and length."""
        return _noise(at)


@dataclass(frozen=True, kw_only=True)
class RandomProgressive(Progressive):
    """Control: chosen anew as often as by `Progressive`, at random."""

    def scores(self, at: At) -> Tensor:
        """Random numbers, the same for the same layer and length."""
        return _noise(at)


def _noise(at: At) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * int(at.length.max()) + at.layer)
    return torch.rand(at.kv.pos.shape, generator=generator).to(at.kv.pos.device)


_HERE = __name__
METHODS.update(
    {
        "random": MethodKind(_HERE, "RandomKeep", "a random part of the prompt"),
        "random-progressive": MethodKind(
            _HERE, "RandomProgressive", "a random part, anew while decoding", {"after": 0}
        ),
    }
)


def options(name: str, doc: str | None) -> argparse.ArgumentParser:
    """Of every script that draws what the recall model answered: where answers are kept, and where figures go."""
    parser = argparse.ArgumentParser(
        prog=f"python -m experiments.loopserve.{name}", description=(doc or "").splitlines()[0]
    )
    parser.add_argument("--work", type=Path, default=Path("runs"), help="folder of the answers")
    parser.add_argument("--out", type=Path, default=Path("figures"))
    return parser


def specs(names: Sequence[str], settings: Settings = "equal") -> list[str]:
    """Methods as their records are kept: with the sizes of Table 7 ("paper"), or all at an eighth of the context."""
    return [method.spec for method in check_methods(at_settings(names, settings, SHARE))]


def answers(suite: Suite, methods: Sequence[str], work: Path) -> Sequence[Said]:
    """Everything that the methods say, from the folder or anew."""
    folder = work / suite.name
    torch.set_num_threads(1)
    with ProgressBar() as progress:
        model = load("recall", backend="hf")
        run_dialogues(model, suite.dialogues(), methods, out=folder, cache=suite.cache, progress=progress, budget=SHARE)
    return read_folder(folder, Said, COMMAND).records


def right(said: Sequence[str], wanted: Sequence[str]) -> float:
    """Share of an answer before its first mistake."""
    same = 0
    while same < min(len(said), len(wanted)) and said[same] == wanted[same]:
        same += 1
    return same / len(wanted)


def rows_of(suite: Suite, records: Sequence[Said], method: str) -> list[dict[str, Any]]:
    """Scores of a method by position of the question, and over all."""
    return [
        {"position": place, **row}
        for place in (*POSITIONS, ALL)
        if (row := _row(suite, records, method, lambda each, place=place: place in (each.position, ALL)))
    ]


def turns_of(suite: Suite, records: Sequence[Said], method: str) -> list[dict[str, Any]]:
    """Scores of a method by turn, counted from 1, over all positions."""
    return [
        {"turn": turn + 1, **row}
        for turn in range(suite.turns)
        if (row := _row(suite, records, method, lambda each, turn=turn: each.turn == turn))
    ]


def _row(suite: Suite, records: Sequence[Said], method: str, among: Callable[[Said], bool]) -> dict[str, Any]:
    """Exact answers with Wilson's 95 % interval, and how far the answers go.

    `prefix` is the mean share of an answer before its first mistake: along a chain of facts a mistake is the end of it.
    `same` is the share of answers equal to those of everything, `read` what a decoding step attends to, `cells` the
    share of the prompt's cells that are computed (None: left to the model).
    """
    by_id = {dialogue.id: dialogue for dialogue in suite.dialogues()}
    full = {each.prompt: each.tokens for each in records if each.method == "full"}
    mine = [each for each in records if each.method == method and among(each)]
    if not mine:
        return {}
    gold = [by_id[each.dialogue].turns[each.turn].answers for each in mine]
    exact = [score("exact", each.text, answers) for each, answers in zip(mine, gold, strict=True)]
    rate = wilson(sum(exact), len(exact))
    return {
        "suite": suite.name,
        "method": method,
        "questions": len(mine),
        "score": rate.share,
        "low": rate.low,
        "high": rate.high,
        "same": fmean(each.tokens == full[each.prompt] for each in mine) if full else None,
        "prefix": fmean(right(_words(each), answers[0].split()) for each, answers in zip(mine, gold, strict=True)),
        "read": _mean([each.read for each in mine]),
        "cells": _mean([each.cells for each in mine]),
        "prompt_tokens": fmean(each.prompt_tokens for each in mine),
    }


def _words(record: Said) -> list[str]:
    return [*record.text.replace(END, " ").split(), *([END] if record.ended == "eos" else [])]


def _mean(numbers: Sequence[float | None]) -> float | None:
    there = [number for number in numbers if number is not None]
    return fmean(there) if there else None


def settings_of(suites: Sequence[Suite], seconds: float) -> dict[str, Any]:
    """What the JSON says of the dialogues, and how long all answers took, also those that were there already."""
    return {
        "suites": [asdict(suite) for suite in suites],
        "model": "recall",
        "sampling": "greedy",
        "history": "gold",
        "threads": 1,
        "answering_seconds": round(seconds),
    }


def seconds_of(records: Sequence[Said | Near]) -> float:
    """Wall clock of answers that were given one at a time."""
    return sum(record.seconds for record in records)
