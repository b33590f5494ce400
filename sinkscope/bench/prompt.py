"""Prompts of a benchmark: their turns, correct answers, and the file of JSON lines that a user can give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from sinkscope.errors import SinkscopeError
from sinkscope.files.output import PathName
from sinkscope.files.records import Wording, checked_value, read_rows

PROMPT_FILE = 'JSON lines with "prompt" (or "turns", each with a "prompt") and "answers"'


@dataclass(frozen=True)
class Turn:
    """One question of a prompt.

    Attributes:
        text: What the user says.
        answers: Correct answers. The first one is the history of later turns.
        metric: Name of the score of `sinkscope.bench.scores`; empty for the task's own.
        control: Correct answers of another prompt, against which the answer is scored as a control.
    """

    text: str
    answers: tuple[str, ...] = ()
    metric: str = ""
    control: tuple[str, ...] = ()


@dataclass(frozen=True)
class Prompt:
    """What a model is asked: one turn, or several that follow one another.

    Attributes:
        id: Unique in its task.
        turns: The turns in order.
        set: Set that the prompt belongs to; tables have separate rows for each set.
        part: Part of the set, such as a position of the question; tables have a column for each part.
        about: Further properties by which a table can group.
    """

    id: str
    turns: tuple[Turn, ...]
    set: str
    part: str = ""
    about: dict[str, Any] = field(default_factory=dict)


def with_controls(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return the prompts with controls.

    Each turn also gets the correct answers of the previous prompt, for the score expected by chance.
    """
    controlled: list[Prompt] = []
    for index, prompt in enumerate(prompts):
        other = prompts[index - 1]
        turns: list[Turn] = []
        for number, turn in enumerate(prompt.turns):
            control = other.turns[min(number, len(other.turns) - 1)].answers
            if control == turn.answers:
                control = ()
            turns.append(replace(turn, control=control))
        controlled.append(replace(prompt, turns=tuple(turns)))
    return controlled


class TurnRow(TypedDict):
    """A turn as a file has it; other fields are ignored here."""

    prompt: Annotated[str, Field(pattern=r"\S"), Wording("a text")]
    answers: NotRequired[tuple[str, ...]]
    metric: NotRequired[str]


def read_prompts(path: PathName) -> list[Prompt]:
    """Read prompts from JSON lines.

    A line has `prompt` and `answers`, or `turns`, each of which has them. It may have `id`, `set`, `part` and `metric`;
    all other fields become properties of the prompt.

    Raises:
        SinkscopeError: The file cannot be read, or a line has no prompt (names the line).
    """
    prompts: list[Prompt] = []
    for where, row in read_rows(path, PROMPT_FILE):
        if not isinstance(row, dict):
            raise SinkscopeError(f"{where} is no object: give {PROMPT_FILE}")
        turns: list[Turn] = []
        for turn in checked_value(list[TurnRow], row.get("turns", [row]), where, then=f": give {PROMPT_FILE}"):
            metric = str(turn.get("metric", row.get("metric", "")))
            turns.append(Turn(turn["prompt"], turn.get("answers", ()), metric))
        for name in ("turns", "prompt", "answers", "metric"):
            row.pop(name, None)
        id = str(row.pop("id", len(prompts)))
        set = str(row.pop("set", "file"))
        part = str(row.pop("part", ""))
        prompts.append(Prompt(id, tuple(turns), set, part, about=row))
    return prompts
