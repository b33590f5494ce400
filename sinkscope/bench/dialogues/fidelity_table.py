"""How near methods stay to full attention: what `run_fidelity` keeps, and the table of it."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any, ClassVar

from sinkscope.bench.dialogues.form import POSITIONS, Position
from sinkscope.bench.dialogues.methods import METHODS
from sinkscope.bench.dialogues.tables import ALL, envelope, label, name_of, sized, written
from sinkscope.bench.loopbench.store import Contents, Finished, read_folder
from sinkscope.errors import SinkscopeError
from sinkscope.results import Result

COMMAND = "dialogues fidelity"
TEXT = "text"


@dataclass(frozen=True)
class Near(Finished):
    """One method along one answer; `prompt` names dialogue, position and turn.

    Attributes:
        dialogue: its id.
        position: of the question in the turns' prompts.
        turn: 0-based.
        prompt_tokens: of the conversation up to the answer, BOS included.
        kl: per token of the answer, nats.
        agree: per token of the answer.
        kept: per token of the answer after the first: mean over layers and heads.
        read: cached tokens that a decoding step attends to, mean; None: the answer is one token.
        cells: share of the prompt's causal cells that attention covers; None: the method leaves prompts to the model.
        seconds: wall clock of the batch it ran in.
    """

    dialogue: str
    position: Position
    turn: int
    prompt_tokens: int
    kl: tuple[float, ...]
    agree: tuple[bool, ...]
    kept: tuple[float, ...]
    read: float | None
    cells: float | None
    seconds: float


@dataclass(frozen=True)
class Kept:
    """One method along the answers of one task, with the question at one position.

    Attributes:
        task: name of the set, or "text".
        model: name of the model.
        along: "full": answers of the full cache; "gold": right ones.
        budget: of cached tokens, or the share of the context; 1.0 for methods that have none.
        method: its name, with the settings that were given.
        position: of the question, or "all".
        questions: answers.
        tokens: of them.
        kl: KL(full || method) in nats, mean over tokens.
        kl_error: standard error of the mean over questions, each weighed by its tokens; None: a single one.
        kl_first: mean over the first tokens, which prompts alone give.
        agree: share of tokens at which both have the same likeliest one.
        kept: attention mass kept, mean over decoding steps; None: all answers are one token.
        read: cached tokens that a decoding step attends to, mean over questions.
        cells: share of a prompt's causal cells that attention covers; None: the method leaves prompts to the model.
        prompt_tokens: mean length of the conversation when the answer begins.
    """

    task: str
    model: str
    along: str
    budget: int | float
    method: str
    position: str
    questions: int
    tokens: int
    kl: float
    kl_error: float | None
    kl_first: float
    agree: float
    kept: float | None
    read: float | None
    cells: float | None
    prompt_tokens: float


@dataclass(frozen=True, kw_only=True)
class Fidelity(Result):
    """Methods beside full attention along the same texts.

    Attributes:
        groups: by task, model, answers, method, budget and position.
    """

    kind: ClassVar[str] = "dialogues-fidelity"
    percent: ClassVar[tuple[str, ...]] = ("agree", "kept", "cells")

    groups: tuple[Kept, ...]

    def summary(self) -> str:
        """A line per task and model: divergence, agreement and mass kept of each method over all positions."""
        return "\n".join(
            f"{title(head)}: "
            + ", ".join(
                f"{label(g)} KL {g.kl:.3g}, {g.agree:.1%} agree" + ("" if g.kept is None else f", {g.kept:.1%} kept")
                for g in overall(self.groups, head)
            )
            for head in dict.fromkeys(map(head_of, self.groups))
        )


def head_of(group: Kept) -> tuple[str, str, str]:
    """What groups have to share to be compared: task, model and answers."""
    return group.task, group.model, group.along


def title(head: tuple[str, str, str]) -> str:
    """The same in words."""
    task, model, along = head
    told = "the text itself" if task == TEXT else "right answers"
    return f"{task} by {model} along " + ("answers of the full cache" if along == "full" else told)


def overall(groups: Sequence[Kept], head: tuple[str, str, str]) -> list[Kept]:
    """Over all positions: where there is only one, that of it."""
    mine = [g for g in groups if head_of(g) == head]
    return [g for g in mine if g.position == ALL] or mine


def tabulate_fidelity(folders: Sequence[str | os.PathLike[str]]) -> Fidelity:
    """Sum up what `run_fidelity` wrote.

    Args:
        folders: of runs, at least one; with other budgets or models, say.

    Raises:
        SinkscopeError: a folder is not of such a run or has no answer yet, or two hold the same.
    """
    started = time.perf_counter()
    if not folders:
        raise SinkscopeError("no folder is given: name what was given to --out of `sinkscope dialogues fidelity`")
    runs = [read_folder(folder, Near, COMMAND) for folder in folders]
    groups: dict[tuple[Any, ...], Kept] = {}
    for run in runs:
        if not run.records:
            raise SinkscopeError(f"{run.name} has no answer in it yet: run the same command again")
        for group in _groups(run):
            key = (*head_of(group), group.budget, group.method, group.position)
            if key in groups and (sized(group) or groups[key] != group):
                raise SinkscopeError(
                    f"{run.name} and another folder both hold {label(group)} on {group.task} by {group.model}: give "
                    "one of them"
                )
            groups[key] = group
    order, places = list(METHODS), (*POSITIONS, ALL)
    found = sorted(
        groups.values(),
        key=lambda g: (*head_of(g), order.index(name_of(g.method)), g.method, g.budget, places.index(g.position)),
    )
    return Fidelity(**envelope(runs, started), groups=tuple(found))


def _groups(run: Contents[Near]) -> list[Kept]:
    parts: dict[tuple[str, str, str], list[Near]] = {}
    several = len({record.position for record in run.records}) > 1
    for record in run.records:
        if record.dialogue not in run.prompts or name_of(record.method) not in METHODS:
            raise SinkscopeError(
                f"{run.name} is damaged: {record.method} answers {record.dialogue!r}, one of which is not of this run; "
                "run into another folder"
            )
        task = str(run.prompts[record.dialogue]["task"])
        for place in (record.position, *([ALL] if several else [])):
            parts.setdefault((task, record.method, place), []).append(record)
    return [_group(run, *key, records) for key, records in parts.items()]


def _group(run: Contents[Near], task: str, method: str, place: str, records: list[Near]) -> Kept:
    text, budget = written(method, run.settings["budget"])
    kl = [value for record in records for value in record.kl]
    kept = [value for record in records for value in record.kept]
    agree = [value for record in records for value in record.agree]
    reads = [record.read for record in records if record.read is not None]
    cells = [record.cells for record in records if record.cells is not None]
    mean = fmean(kl)
    # The mean over tokens is a ratio of sums over questions: its error is that of what each question adds to it.
    parts = [sum(record.kl) - mean * len(record.kl) for record in records]
    error = stdev(parts) * len(parts) ** 0.5 / len(kl) if len(parts) > 1 else None
    return Kept(
        task=task, model=str(run.settings["model"]["name"]), along=str(run.settings["along"]), budget=budget,
        method=text, position=place, questions=len(records), tokens=len(kl), kl=mean, kl_error=error,
        kl_first=fmean(record.kl[0] for record in records), agree=fmean(agree), kept=fmean(kept) if kept else None,
        read=fmean(reads) if reads else None, cells=fmean(cells) if cells else None,
        prompt_tokens=fmean(record.prompt_tokens for record in records),
    )  # fmt: skip
