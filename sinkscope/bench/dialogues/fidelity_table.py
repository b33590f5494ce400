"""How near methods stay to full attention: what `run_fidelity` keeps, and the table of it."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any, ClassVar

from sinkscope.bench.dialogues.tables import OfTurn, gathered, label, mean_known, overall, written
from sinkscope.bench.store import Contents, envelope
from sinkscope.results import Result

COMMAND = "dialogues fidelity"
TEXT = "text"


@dataclass(frozen=True)
class Near(OfTurn):
    """One method along one answer.

    Attributes:
        kl: per token of the answer, nats.
        agree: per token of the answer.
        kept: per token of the answer after the first: mean over layers and heads.
        read: cached tokens that a decoding step attends to, mean; None: the answer is one token.
        cells: share of the prompt's causal cells that attention covers; None: the method leaves prompts to the model.
        seconds: wall clock of the batch it ran in.
    """

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
        position: of the question, or, where there are several, "all".
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
    drawing: ClassVar[Any] = "sinkscope.bench.drawing:draw_fidelity"
    percent: ClassVar[tuple[str, ...]] = ("agree", "kept", "cells")

    groups: tuple[Kept, ...]

    def summary(self) -> str:
        """A line per task and model: divergence, agreement and mass kept of each method over all positions."""
        return "\n".join(
            f"{title(head)}: "
            + ", ".join(
                f"{label(g)} KL {g.kl:.3g}, {g.agree:.1%} agree" + ("" if g.kept is None else f", {g.kept:.1%} kept")
                for g in overall([g for g in self.groups if head_of(g) == head])
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


def tabulate_fidelity(folders: Sequence[str | os.PathLike[str]]) -> Fidelity:
    """Sum up what `run_fidelity` wrote.

    Args:
        folders: of runs, at least one; with other budgets or models, say.

    Raises:
        SinkscopeError: a folder is not of such a run or has no answer yet, or two hold the same.
    """
    started = time.perf_counter()
    runs, groups = gathered(folders, Near, COMMAND, _group, head_of)
    return Fidelity(**envelope(runs, started, "dialogues"), groups=groups)


def _group(run: Contents[Near], task: str, method: str, place: str, records: list[Near]) -> Kept:
    text, budget = written(method, run.settings["budget"])
    kl = [value for record in records for value in record.kl]
    kept = [value for record in records for value in record.kept]
    agree = [value for record in records for value in record.agree]
    mean = fmean(kl)
    # The mean over tokens is a ratio of sums over questions: its error is that of what each question adds to it.
    parts = [sum(record.kl) - mean * len(record.kl) for record in records]
    error = stdev(parts) * len(parts) ** 0.5 / len(kl) if len(parts) > 1 else None
    return Kept(
        task=task,
        model=str(run.settings["model"]["name"]),
        along=str(run.settings["along"]),
        budget=budget,
        method=text,
        position=place,
        questions=len(records),
        tokens=len(kl),
        kl=mean,
        kl_error=error,
        kl_first=fmean(record.kl[0] for record in records),
        agree=fmean(agree),
        kept=fmean(kept) if kept else None,
        read=mean_known(record.read for record in records),
        cells=mean_known(record.cells for record in records),
        prompt_tokens=fmean(record.prompt_tokens for record in records),
    )
