"""Tables of dialogues: scores by method and position of the question, and how near methods stay to full attention."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any, ClassVar, Literal, TypeVar

from sinkscope.bench.dialogues.form import POSITIONS, Position
from sinkscope.bench.files import Contents, Finished, envelope, read_folder, written_by
from sinkscope.bench.methods import METHODS, Budget, name_of, order_of, split_spec
from sinkscope.bench.scorers import score
from sinkscope.errors import SinkscopeError
from sinkscope.published import set_of
from sinkscope.rate import wilson
from sinkscope.results import Result

COMMAND, FIDELITY = "dialogues", "dialogues fidelity"
TEXT = "text"
ALL = "all"


@dataclass(frozen=True)
class OfTurn(Finished):
    """What every line of a run on dialogues says first; `prompt` names dialogue, position and turn.

    Attributes:
        dialogue: its id.
        position: of the question in the turns' prompts.
        turn: 0-based.
        prompt_tokens: of the conversation up to the answer, BOS included.
    """

    dialogue: str
    position: Position
    turn: int
    prompt_tokens: int


R = TypeVar("R", bound=OfTurn)
G = TypeVar("G")


@dataclass(frozen=True)
class Said(OfTurn):
    """What one method said in one turn.

    Attributes:
        tokens: ids of the answer, up to and with the end of sequence if it came.
        text: the same decoded.
        ended: by the end of sequence, or at the cap of new tokens.
        read: cached tokens that a decoding step attends to, its own included, mean over the answer's tokens after the
            first, layers and kv heads; None: the answer is one token, which the whole prompt gives.
        cells: share of the prompt's causal cells that attention covers (of a turn's own queries where the cache
            grows), mean over layers and heads; None: the method leaves prompts to the model.
        seconds: wall clock of the batch it ran in.
    """

    tokens: tuple[int, ...]
    text: str
    ended: Literal["eos", "cap"]
    read: float | None
    cells: float | None
    seconds: float


@dataclass(frozen=True)
class Answered:
    """The turns of one task with the question at one position, by one method.

    Attributes:
        task: name of the set.
        model: name of the model.
        history: "gold": turns come after right answers; "model": after the method's own.
        cache: "fresh": every turn reads everything anew; "grow": one cache over the turns.
        budget: of cached tokens, or the share of the context; 1.0 for methods that have none.
        method: its name, with the settings that were given.
        position: of the question, or, where there are several, "all".
        dialogues: how many.
        questions: turns in them whose right answer is known.
        unanswerable: questions whose answer was nowhere said.
        score: mean score by the task's metric, 0 to 1; of the recall model the share of exact answers.
        low: lower end of its 95 % interval (Wilson), as if questions were independent.
        high: its upper end.
        same: share of answers that equal those of "full" token for token; None: "full" was not run.
        prompt_tokens: mean length of the conversation when the answer begins.
        read: cached tokens that a decoding step attends to, mean over questions; None: all answers were one token.
        cells: share of a prompt's causal cells that attention covers, mean over questions; None: the method leaves
            prompts to the model.
        length: mean tokens of an answer.
    """

    task: str
    model: str
    history: str
    cache: str
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
    cells: float | None
    length: float


@dataclass(frozen=True, kw_only=True)
class Dialogues(Result):
    """Dialogues answered by several methods.

    Attributes:
        groups: by task, model, history, method, budget and position.
    """

    page: ClassVar[str] = "dialogues"
    kind: ClassVar[str] = "dialogues"
    drawing: ClassVar[Any] = "sinkscope.bench.drawing:draw_dialogues"
    percent: ClassVar[tuple[str, ...]] = ("score", "low", "high", "same", "cells")

    groups: tuple[Answered, ...]

    def summary(self) -> str:
        """A line per task, model and budget: the score of each method over all positions."""
        return "\n".join(
            f"{title(head)}: "
            + ", ".join(label(g) + f" {g.score:.1%}" for g in overall([g for g in self.groups if head_of(g) == head]))
            for head in dict.fromkeys(map(head_of, self.groups))
        )


def head_of(group: Answered) -> tuple[str, str, str, str]:
    """What groups have to share to be compared: task, model, history and cache."""
    return group.task, group.model, group.history, group.cache


def title(head: tuple[str, str, str, str]) -> str:
    """The same in words."""
    task, model, history, cache = head
    own = " after its own answers" if history == "model" else ""
    return f"{task} by {model}{own}" + (" on one cache" if cache == "grow" else "")


def label(group: Any) -> str:
    """Method and budget."""
    return f"{group.method} {group.budget}" if sized(group) else group.method


def sized(group: Any) -> bool:
    """It has a budget."""
    kind = METHODS.get(name_of(group.method))
    return kind is None or kind.sized or group.budget != 1.0


def written(method: str, usual: Budget) -> tuple[str, Budget]:
    """Of a method in a record: its text without the budget, and the budget, the run's where it has none of its own."""
    text, own = split_spec(method)
    if own is None:
        kind = METHODS.get(name_of(method))
        own = usual if kind is None or kind.sized else 1.0
    return text, own


def overall(groups: Sequence[G]) -> list[G]:
    """Of groups with the same head: each method over all positions or, where it has only one, at that."""
    every: Sequence[Any] = groups
    several = {label(g) for g in every if g.position == ALL}
    return [g for g in every if g.position == ALL or label(g) not in several]


def tabulate_dialogues(folders: Sequence[str | os.PathLike[str]]) -> Dialogues:
    """Score what `run_dialogues` wrote.

    Args:
        folders: of runs, at least one; with other budgets or models, say.

    Raises:
        SinkscopeError: a folder is not of a run or has no answer yet, two hold the same, or Rouge-L has no library.
    """
    started = time.perf_counter()
    runs, groups = gathered(folders, Said, COMMAND, _group, head_of)
    return Dialogues(**envelope(runs, started, "dialogues"), groups=groups)


def gathered(
    folders: Sequence[str | os.PathLike[str]],
    kind: type[R],
    command: str,
    group: Callable[[Contents[R], str, str, str, list[R]], G],
    head_of: Callable[[G], tuple[str, ...]],
) -> tuple[list[Contents[R]], tuple[G, ...]]:
    """Folders of runs, and their records in groups: by task, method and position, and over the positions.

    Args:
        folders: at least one.
        kind: class of their records.
        command: that wrote them, see `read_folder`.
        group: of (folder, task, method, position or "all", records).
        head_of: what groups have to share to be compared.

    Raises:
        SinkscopeError: a folder is of something else or has no answer yet, or two hold the same.
    """
    if not folders:
        raise SinkscopeError(f"no folder is given: name what was given to --out of `sinkscope {written_by(command)}`")
    runs = [read_folder(folder, kind, command) for folder in folders]
    found: dict[tuple[Any, ...], Any] = {}
    for run in runs:
        if not run.records:
            raise SinkscopeError(f"{run.name} has no answer in it yet: run the same command again")
        for (task, method, place), records in _parts(run).items():
            made: Any = group(run, task, method, place, records)
            key = (*head_of(made), made.budget, made.method, made.position)
            both = f"{run.name} and another folder both hold {label(made)} on {task} by {made.model}"
            if key in found and sized(made):
                raise SinkscopeError(f"{both}: give one of them")
            if found.setdefault(key, made) != made:
                raise SinkscopeError(f"{both}, but not the same: of other dialogues, or unfinished; give one of them")
    places = (*POSITIONS, ALL)

    def place_of(g: Any) -> tuple[Any, ...]:
        return *head_of(g), *order_of(g.method), g.budget, places.index(g.position)

    return runs, tuple(sorted(found.values(), key=place_of))


def _parts(run: Contents[R]) -> dict[tuple[str, str, str], list[R]]:
    """Records by task, method and position, and over all positions where there are several."""
    parts: dict[tuple[str, str, str], list[R]] = {}
    for record in run.records:
        if record.dialogue not in run.prompts or ((name := name_of(record.method)) not in METHODS and ":" not in name):
            raise SinkscopeError(
                f"{run.name} is damaged: {record.method} answers {record.dialogue!r}, one of which is not of this run; "
                "run into another folder"
            )
        task = str(run.prompts[record.dialogue]["task"])
        for place in (record.position, ALL):
            parts.setdefault((task, record.method, place), []).append(record)
    several = {part[:2] for part, records in parts.items() if len({record.position for record in records}) > 1}
    return {part: records for part, records in parts.items() if part[2] != ALL or part[:2] in several}


def mean_known(values: Iterable[float | None]) -> float | None:
    """Mean of those that are there; None: none is."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _group(run: Contents[Said], task: str, method: str, place: str, records: list[Said]) -> Answered:
    full = {record.prompt: record.tokens for record in run.records if record.method == "full"}
    scores, unanswerable = list[float](), 0
    for record in records:
        dialogue = run.prompts[record.dialogue]
        turn = dialogue["turns"][record.turn]
        metric = turn.get("metric") or set_of(task).metric
        if any(turn["answers"]):
            scores.append(score(metric, record.text, turn["answers"], classes=dialogue["classes"], task=task))
        unanswerable += turn["answerable"] is False
    if not scores:
        raise SinkscopeError(f"{run.name} has no answer yet to a question of {task} whose right answer is known: go on")
    rate = wilson(sum(scores), len(scores))
    same = [record.tokens == full[record.prompt] for record in records if record.prompt in full]
    text, budget = written(method, run.settings["budget"])
    return Answered(
        task=task,
        model=str(run.settings["model"]["name"]),
        history=str(run.settings["history"]),
        cache=str(run.settings.get("cache", "fresh")),
        budget=budget,
        method=text,
        position=place,
        dialogues=len({record.dialogue for record in records}),
        questions=len(scores),
        unanswerable=unanswerable,
        score=rate.share,
        low=rate.low,
        high=rate.high,
        same=fmean(same) if same else None,
        prompt_tokens=fmean(record.prompt_tokens for record in records),
        read=mean_known(record.read for record in records),
        cells=mean_known(record.cells for record in records),
        length=fmean(len(record.tokens) for record in records),
    )


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

    page: ClassVar[str] = "dialogues"
    kind: ClassVar[str] = "dialogues-fidelity"
    drawing: ClassVar[Any] = "sinkscope.bench.drawing:draw_fidelity"
    percent: ClassVar[tuple[str, ...]] = ("agree", "kept", "cells")

    groups: tuple[Kept, ...]

    def summary(self) -> str:
        """A line per task and model: divergence, agreement and mass kept of each method over all positions."""
        return "\n".join(
            f"{near_title(head)}: "
            + ", ".join(
                f"{label(g)} KL {g.kl:.3g}, {g.agree:.1%} agree" + ("" if g.kept is None else f", {g.kept:.1%} kept")
                for g in overall([g for g in self.groups if near_head_of(g) == head])
            )
            for head in dict.fromkeys(map(near_head_of, self.groups))
        )


def near_head_of(group: Kept) -> tuple[str, str, str]:
    """What groups have to share to be compared: task, model and answers."""
    return group.task, group.model, group.along


def near_title(head: tuple[str, str, str]) -> str:
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
    runs, groups = gathered(folders, Near, FIDELITY, _near_group, near_head_of)
    return Fidelity(**envelope(runs, started, "dialogues"), groups=groups)


def _near_group(run: Contents[Near], task: str, method: str, place: str, records: list[Near]) -> Kept:
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
