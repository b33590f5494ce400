"""Accuracy by method and position of the question, with what decoding read of the cache."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, ClassVar

from sinkscope._rate import wilson
from sinkscope.bench.dialogues.form import POSITIONS
from sinkscope.bench.dialogues.methods import METHODS
from sinkscope.bench.dialogues.metrics import score
from sinkscope.bench.dialogues.run import COMMAND, Said, metric_of
from sinkscope.bench.loopbench.store import Contents, read_folder
from sinkscope.errors import SinkscopeError
from sinkscope.results import ModelInfo, Result, provenance

ALL = "all"


@dataclass(frozen=True)
class Answered:
    """The turns of one task with the question at one position, by one method.

    Attributes:
        task: name of the set.
        model: name of the model.
        budget: of cached tokens; 1.0 for "full".
        method: its name.
        position: of the question, or "all".
        dialogues: how many.
        questions: turns in them.
        unanswerable: questions whose answer was nowhere said.
        score: mean score by the task's metric, 0 to 1; of the recall model the share of exact answers.
        low: lower end of its 95 % interval (Wilson), as if questions were independent.
        high: its upper end.
        same: share of answers that equal those of "full" token for token; None: "full" was not run.
        prompt_tokens: mean length of the conversation when the answer begins.
        read: cached tokens that a decoding step attends to, mean over questions; None: all answers were one token.
        length: mean tokens of an answer.
    """

    task: str
    model: str
    budget: int | float
    method: str
    position: str
    dialogues: int
    questions: int
    unanswerable: int
    score: float
    low: float
    high: float
    same: float | None
    prompt_tokens: float
    read: float | None
    length: float


@dataclass(frozen=True, kw_only=True)
class Dialogues(Result):
    """Dialogues answered by several methods.

    Attributes:
        groups: by task, model, budget, method and position.
    """

    kind: ClassVar[str] = "dialogues"
    percent: ClassVar[tuple[str, ...]] = ("score", "low", "high", "same")

    groups: tuple[Answered, ...]

    def summary(self) -> str:
        """A line per task, model and budget: the score of each method over all positions."""
        heads = dict.fromkeys((g.task, g.model) for g in self.groups)
        return "\n".join(
            f"{task} by {model}: "
            + ", ".join(
                label(g) + f" {g.score:.1%}" for g in self.groups if (g.task, g.model, g.position) == (task, model, ALL)
            )
            for task, model in heads
        )


def label(group: Answered) -> str:
    """Method and budget."""
    return group.method if group.method == "full" else f"{group.method} {group.budget}"


def tabulate_dialogues(folders: Sequence[str | os.PathLike[str]]) -> Dialogues:
    """Score what `run_dialogues` wrote.

    Args:
        folders: of runs, at least one; with other budgets or models, say.

    Raises:
        SinkscopeError: a folder is not of a run or has no answer yet, two hold the same, or Rouge-L has no library.
    """
    started = time.perf_counter()
    if not folders:
        raise SinkscopeError("no folder is given: name what was given to --out of `sinkscope dialogues run`")
    runs = [read_folder(folder, Said, COMMAND) for folder in folders]
    groups: dict[tuple[Any, ...], Answered] = {}
    for run in runs:
        if not run.records:
            raise SinkscopeError(f"{run.name} has no answer in it yet: run the same command again")
        for group in _groups(run):
            key = (group.task, group.model, group.budget, group.method, group.position)
            if key in groups and (group.method != "full" or groups[key] != group):
                raise SinkscopeError(
                    f"{run.name} and another folder both hold {label(group)} on {group.task} by {group.model}: give "
                    "one of them"
                )
            groups[key] = group
    order, places = list(METHODS), (*POSITIONS, ALL)
    found = sorted(
        groups.values(),
        key=lambda g: (g.task, g.model, order.index(g.method), g.budget, places.index(g.position)),
    )
    settings = [run.settings for run in runs]
    models = {each["model"]["fingerprint"]: each["model"] for each in settings}
    names = ", ".join(dict.fromkeys(str(each["name"]) for each in models.values()))
    model = (
        ModelInfo(**settings[0]["model"])
        if len(models) == 1
        else ModelInfo(names, "several", 0, 0, 0, " ".join(models))
    )

    def common(key: str) -> str:
        return ", ".join(dict.fromkeys(str(each.get(key)) for each in settings))

    return Dialogues(
        model=model,
        settings={"runs": [{"folder": run.name, **run.settings, "dialogues": len(run.prompts)} for run in runs]},
        provenance=provenance(
            started=started, device=common("device"), dtype=common("dtype"), attention=common("attention"), bos=None,
            seed=0,
        ),
        groups=tuple(found),
    )  # fmt: skip


def _groups(run: Contents[Said]) -> list[Answered]:
    full = {record.prompt: record.tokens for record in run.records if record.method == "full"}
    parts: dict[tuple[str, str, str], list[Said]] = {}
    for record in run.records:
        if record.dialogue not in run.prompts or record.method not in METHODS:
            raise SinkscopeError(
                f"{run.name} is damaged: {record.method} answers {record.dialogue!r}, one of which is not of this run; "
                "run into another folder"
            )
        task = str(run.prompts[record.dialogue]["task"])
        for place in (record.position, ALL):
            parts.setdefault((task, record.method, place), []).append(record)
    return [_group(run, full, *key, records) for key, records in parts.items()]


def _group(
    run: Contents[Said], full: dict[str, tuple[int, ...]], task: str, method: str, place: str, records: list[Said]
) -> Answered:
    scores, unanswerable = list[float](), 0
    for record in records:
        dialogue = run.prompts[record.dialogue]
        turn = dialogue["turns"][record.turn]
        scores.append(score(metric_of(task), record.text, turn["answers"], classes=dialogue["classes"], task=task))
        unanswerable += turn["answerable"] is False
    rate = wilson(sum(scores), len(scores))
    same = [record.tokens == full[record.prompt] for record in records if record.prompt in full]
    reads = [record.read for record in records if record.read is not None]
    return Answered(
        task=task, model=str(run.settings["model"]["name"]),
        budget=1.0 if method == "full" else run.settings["budget"], method=method, position=place,
        dialogues=len({record.dialogue for record in records}), questions=len(records), unanswerable=unanswerable,
        score=rate.share, low=rate.low, high=rate.high, same=fmean(same) if same else None,
        prompt_tokens=fmean(record.prompt_tokens for record in records), read=fmean(reads) if reads else None,
        length=fmean(len(record.tokens) for record in records),
    )  # fmt: skip
