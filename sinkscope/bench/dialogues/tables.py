"""Tables of dialogues: scores by method and position of the question, and fidelity to full attention."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from sinkscope.bench.dialogues.form import POSITIONS, Position
from sinkscope.bench.files import Contents, Finished, envelope, read_folder, written_by
from sinkscope.bench.methods import METHODS, name_of, order_of, split_spec
from sinkscope.bench.published import set_of
from sinkscope.bench.scorers import score
from sinkscope.errors import SinkscopeError
from sinkscope.files.options import Option, command
from sinkscope.files.plain import parse_json
from sinkscope.files.rate import mean_known, wilson
from sinkscope.files.records import Budget
from sinkscope.files.result import Result

COMMAND, FIDELITY = "dialogues", "dialogues fidelity"
TEXT = "text"
ALL = "all"


@dataclass(frozen=True)
class OfTurn(Finished):
    """Fields at the beginning of every line of a run on dialogues; `prompt` names dialogue, position and turn.

    Attributes:
        dialogue: Id of the dialogue.
        position: Position of the question in the turns' prompts.
        turn: Number of the turn, 0-based.
        prompt_tokens: Length of the conversation up to the answer, including BOS.
        read: Cached tokens that a decoding step attends to, including its own, mean over the answer's tokens after the
            first, layers and kv heads. None if the answer is one token, which is computed from the whole prompt.
        cells: Share of the prompt's causal cells that attention covers (only the turn's own queries if the cache
            grows), mean over layers and heads; None if the method does not change prompts.
        seconds: Wall-clock time of the batch it ran in.
    """

    dialogue: str
    position: Position
    turn: int
    prompt_tokens: int
    read: float | None
    cells: float | None
    seconds: float


R = TypeVar("R", bound=OfTurn)
C = TypeVar("C", bound="Comparison")


@dataclass(frozen=True)
class Said(OfTurn):
    """One method's answer in one turn.

    Attributes:
        tokens: Ids of the answer, up to and including the end of sequence if it occurred.
        text: The decoded answer.
        ended: Why it ended: by the end of sequence, or at the maximum of new tokens.
    """

    tokens: tuple[int, ...]
    text: str
    ended: Literal["eos", "cap"]


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One method on the dialogues of one task, with the question at one position.

    Attributes:
        task: Name of the set, or "text".
        model: Name of the model.
        budget: Number of cached tokens, or the share of the context; 1.0 for methods without a budget.
        method: Name of the method, with the settings that were given.
        position: Position of the question; "all" for several positions together.
        questions: Number of turns whose correct answer is known.
        prompt_tokens: Mean length of the conversation when the answer begins.
        read: Cached tokens that a decoding step attends to, mean over questions; None if all answers were one token.
        cells: Share of a prompt's causal cells that attention covers, mean over questions; None if the method does not
            change prompts.
    """

    task: str
    model: str
    budget: int | float
    method: str
    position: str
    questions: int
    prompt_tokens: float
    read: float | None
    cells: float | None

    @property
    def sized(self) -> bool:
        """Whether it has a budget."""
        kind = METHODS.get(name_of(self.method))
        return kind is None or kind.sized or self.budget != 1.0

    @property
    def label(self) -> str:
        """Method and budget."""
        return f"{self.method} {self.budget}" if self.sized else self.method


@dataclass(frozen=True, kw_only=True)
class Answered(Compared):
    """All turns of one task with the question at one position, answered by one method.

    Attributes:
        history: "gold": turns follow correct answers; "model": turns follow the method's own.
        cache: "fresh": every turn rereads the conversation; "grow": one cache over the turns.
        dialogues: Number of dialogues.
        unanswerable: Number of questions whose answer was never stated.
        score: Mean score by the task's metric, 0 to 1; for the recall model, the share of exact answers.
        low: Lower end of the 95 % interval (Wilson) of the score, treating questions as independent.
        high: Upper end of that interval.
        same: Share of answers that equal those of "full" token for token; None if "full" was not run.
        length: Mean answer length in tokens.
    """

    history: str
    cache: str
    dialogues: int
    unanswerable: int
    score: float
    low: float
    high: float
    same: float | None
    length: float

    @property
    def head(self) -> tuple[str, ...]:
        """What groups must have in common to be compared."""
        return self.task, self.model, self.history, self.cache

    @property
    def title(self) -> str:
        """The same in words."""
        own = " after its own answers" if self.history == "model" else ""
        return f"{self.task} by {self.model}{own}" + (" on one cache" if self.cache == "grow" else "")

    @property
    def loss(self) -> float:
        """A value to minimize."""
        return -self.score

    @property
    def found(self) -> str:
        """The score with its interval, as the end of a sentence."""
        return f"scores {self.score:.1%} on {self.questions} questions (95 %: {self.low:.0%} to {self.high:.0%})"

    @property
    def short(self) -> str:
        """The label and score, for a list."""
        return f"{self.label} {self.score:.1%}"


@dataclass(frozen=True)
class Near(OfTurn):
    """One method compared with full attention along one answer.

    Attributes:
        kl: Divergence in nats, per token of the answer.
        agree: Whether the top predictions agree, per token of the answer.
        kept: Attention mass kept, per token of the answer after the first: mean over layers and heads.
    """

    kl: tuple[float, ...]
    agree: tuple[bool, ...]
    kept: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Kept(Compared):
    """One method along the answers of one task, with the question at one position.

    Attributes:
        along: "full": answers of the full cache; "gold": the correct answers.
        tokens: Number of tokens in these answers.
        kl: KL(full || method) in nats, mean over tokens.
        kl_error: Standard error of the mean over questions, weighted by their tokens; None for a single question.
        kl_first: Mean over the first tokens, which depend on the prompts alone.
        agree: Share of tokens for which both have the same top prediction.
        kept: Attention mass kept, mean over decoding steps; None if all answers are one token.
    """

    along: str
    tokens: int
    kl: float
    kl_error: float | None
    kl_first: float
    agree: float
    kept: float | None

    @property
    def head(self) -> tuple[str, ...]:
        """What groups must have in common to be compared."""
        return self.task, self.model, self.along

    @property
    def title(self) -> str:
        """The same in words."""
        told = "the text itself" if self.task == TEXT else "right answers"
        return f"{self.task} by {self.model} along " + ("answers of the full cache" if self.along == "full" else told)

    @property
    def loss(self) -> float:
        """A value to minimize."""
        return self.kl

    @property
    def found(self) -> str:
        """Divergence and agreement, as the end of a sentence."""
        return f"has KL {self.kl:.3g} nats a token and the same likeliest token in {self.agree:.1%} of {self.tokens}"

    @property
    def short(self) -> str:
        """Label, divergence, agreement and mass kept, for a list."""
        kept = "" if self.kept is None else f", {self.kept:.1%} kept"
        return f"{self.label} KL {self.kl:.3g}, {self.agree:.1%} agree{kept}"


@dataclass(frozen=True, kw_only=True)
class Comparison(Result):
    """Several methods on the same dialogues; `full`, the full cache, is the control."""

    columns: ClassVar[tuple[str, ...]] = (
        *("method", "budget", "position", "score", "low", "high", "kl", "kl_error", "agree"),
        *("questions", "same", "kept", "read", "cells", "task", "model", "history", "cache", "along"),
    )
    page: ClassVar[str] = "dialogues"

    groups: tuple[Any, ...]

    def rows(self) -> list[dict[str, Any]]:
        """One row per group; the budget is empty for a method without one."""
        return [
            {"method": g.method, "budget": None, **vars(g), **({} if g.sized else {"budget": None})}
            for g in self.groups
        ]

    def parts(self) -> list[list[Any]]:
        """Groups that can be compared with each other."""
        return [[g for g in self.groups if g.head == head] for head in dict.fromkeys(g.head for g in self.groups)]

    def conclusion(self) -> str:
        """The best and the worst method over all positions, compared with the full cache."""
        for mine in map(overall, self.parts()):
            full = next((g for g in mine if g.method == "full"), None)
            control = f"the full cache {full.found}" if full else "the full cache, which is the control, was not run"
            others = sorted((g for g in mine if g is not full), key=lambda g: g.loss)
            said = [f"{g.label} {g.found}" for g in (others[:1] + others[1:][-1:])]
            many = f" (the farthest of {len(others)})" if len(said) > 1 else ""
            told = f"{' and '.join(said)}{many}; {control}" if said else f"{control}; no other method was run"
            return f"On {mine[0].title}, {told}."
        return "Nothing was answered."

    def details(self) -> list[str]:
        """One line per comparison: each method over all positions."""
        return [f"{mine[0].title}: " + ", ".join(g.short for g in overall(mine)) for mine in self.parts()]


@dataclass(frozen=True, kw_only=True)
class Dialogues(Comparison):
    """Dialogues answered by several methods.

    Attributes:
        groups: Results by task, model, history, method, budget and position.
    """

    kind: ClassVar[str] = "dialogues"
    drawing: ClassVar[Any] = "sinkscope.bench.drawing:draw_dialogues"
    percent: ClassVar[tuple[str, ...]] = ("score", "low", "high", "same", "cells")

    groups: tuple[Answered, ...]


@dataclass(frozen=True, kw_only=True)
class Fidelity(Comparison):
    """Methods compared with full attention along the same texts.

    Attributes:
        groups: Results by task, model, answers, method, budget and position.
    """

    kind: ClassVar[str] = "dialogues-fidelity"
    drawing: ClassVar[Any] = "sinkscope.bench.drawing:draw_fidelity"
    percent: ClassVar[tuple[str, ...]] = ("agree", "kept", "cells")

    groups: tuple[Kept, ...]


def written(method: str, usual: Budget) -> tuple[str, Budget]:
    """Split a record's method into text and budget; without a budget of its own, the run's budget applies."""
    text, own = split_spec(method)
    kind = METHODS.get(name_of(method))
    return text, own if own is not None else usual if kind is None or kind.sized else 1.0


def overall(groups: Sequence[Any]) -> list[Any]:
    """For each method, the group over all positions or, if it has only one position, the group at that position."""
    several = {g.label for g in groups if g.position == ALL}
    return [g for g in groups if g.position == ALL or g.label not in several]


@command(group="Dialogues", command="dialogues table")
def dialogues_table(
    folders: Annotated[Sequence[Path], Option(argument=True, metavar="DIR...")],
) -> Dialogues | Fidelity:
    """Show scores by method and position of the question, with intervals and tokens read; or fidelity.

    Args:
        folders: Folders of runs, or of fidelity runs.

    Example:
        sinkscope dialogues table runs --json table.json
    """
    try:
        settings = parse_json((folders[0] / "settings.json").read_bytes())
    except (OSError, ValueError):  # the reader of the folder reports what is wrong
        settings = None
    fidelity = isinstance(settings, dict) and settings.get("command") == FIDELITY
    return tabulate_fidelity(folders) if fidelity else tabulate_dialogues(folders)


def tabulate_dialogues(folders: Sequence[str | os.PathLike[str]]) -> Dialogues:
    """Score what `run_dialogues` wrote.

    Args:
        folders: Folders of runs, at least one; for example with different budgets or models.

    Raises:
        SinkscopeError: A folder is not of a run or has no answer yet, two hold the same, or Rouge-L has no library.
    """
    return _gathered(Dialogues, folders, Said, COMMAND, _answered)


def tabulate_fidelity(folders: Sequence[str | os.PathLike[str]]) -> Fidelity:
    """Summarize what `run_fidelity` wrote.

    Args:
        folders: Folders of runs, at least one; for example with different budgets or models.

    Raises:
        SinkscopeError: A folder is not of such a run or has no answer yet, or two hold the same.
    """
    return _gathered(Fidelity, folders, Near, FIDELITY, _kept)


def _gathered(
    made: type[C],
    folders: Sequence[str | os.PathLike[str]],
    kind: type[R],
    command: str,
    group: Callable[[Contents[R], str, list[R], dict[str, Any]], Any],
) -> C:
    """Read folders of runs and group their records by task, method and position, and over the positions.

    Args:
        made: Class of the result.
        folders: Folders, at least one.
        kind: Class of their records.
        command: Command that wrote them, see `read_folder`.
        group: Builds a group from (folder, task, records, fields that all groups have).
    """
    started = time.perf_counter()
    if not folders:
        raise SinkscopeError(f"no folder is given: name what was given to --out of `sinkscope {written_by(command)}`")
    runs = [read_folder(folder, kind, command) for folder in folders]
    found: dict[tuple[Any, ...], Any] = {}
    for run in runs:
        if not run.records:
            raise SinkscopeError(f"{run.name} has no answer in it yet: run the same command again")
        for (task, method, place), records in _parts(run).items():
            g = group(run, task, records, _shared(run, task, method, place, records))
            key = (*g.head, g.budget, g.method, g.position)
            both = f"{run.name} and another folder both hold {g.label} on {task} by {g.model}"
            if key in found and g.sized:
                raise SinkscopeError(f"{both}: give one of them")
            if found.setdefault(key, g) != g:
                raise SinkscopeError(f"{both}, but not the same: of other dialogues, or unfinished; give one of them")
    places = (*POSITIONS, ALL)

    def place_of(g: Any) -> tuple[Any, ...]:
        return *g.head, *order_of(g.method), g.budget, places.index(g.position)

    return made(**envelope(runs, started, "dialogues"), groups=tuple(sorted(found.values(), key=place_of)))


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


def _shared(run: Contents[R], task: str, method: str, place: str, records: Sequence[Any]) -> dict[str, Any]:
    """Fields of `Compared`, but for the number of questions."""
    text, budget = written(method, run.settings["budget"])
    return {
        "task": task,
        "model": str(run.settings["model"]["name"]),
        "budget": budget,
        "method": text,
        "position": place,
        "prompt_tokens": fmean(record.prompt_tokens for record in records),
        "read": mean_known(record.read for record in records),
        "cells": mean_known(record.cells for record in records),
    }


def _answered(run: Contents[Said], task: str, records: list[Said], shared: dict[str, Any]) -> Answered:
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
    return Answered(
        **shared,
        questions=len(scores),
        history=str(run.settings["history"]),
        cache=str(run.settings.get("cache", "fresh")),
        dialogues=len({record.dialogue for record in records}),
        unanswerable=unanswerable,
        score=rate.share,
        low=rate.low,
        high=rate.high,
        same=mean_known(record.tokens == full[record.prompt] for record in records if record.prompt in full),
        length=fmean(len(record.tokens) for record in records),
    )


def _kept(run: Contents[Near], task: str, records: list[Near], shared: dict[str, Any]) -> Kept:
    kl, kept, agree = ([v for record in records for v in getattr(record, n)] for n in ("kl", "kept", "agree"))
    mean = fmean(kl)
    # The mean over tokens is a ratio of sums over questions; its error comes from each question's contribution.
    parts = [sum(record.kl) - mean * len(record.kl) for record in records]
    return Kept(
        **shared,
        questions=len(records),
        along=str(run.settings["along"]),
        tokens=len(kl),
        kl=mean,
        kl_error=stdev(parts) * len(parts) ** 0.5 / len(kl) if len(parts) > 1 else None,
        kl_first=fmean(record.kl[0] for record in records),
        agree=fmean(agree),
        kept=mean_known(kept),
    )
