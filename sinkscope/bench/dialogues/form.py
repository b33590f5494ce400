"""The definition of a dialogue for every set of this package, and its file format: one dialogue per line."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, get_args

from sinkscope.errors import SinkscopeError
from sinkscope.files.output import write_atomic
from sinkscope.files.records import read_records

Position = Literal["begin", "middle", "end"]
POSITIONS: tuple[Position, ...] = get_args(Position)
NOT_COUNTED = "not counted: give a tokenizer"


@dataclass(frozen=True)
class DialogueTurn:
    """The user's message in a turn, in three variants, and the correct answers.

    Attributes:
        prompts: The text, by position of the question in it.
        answers: Correct answers, or a single empty one if none is known; a history of correct answers uses the first.
        depends: Turns (0-based, including this one) whose context the answer needs; for LongBench's questions, turns
            whose context was put into this turn.
        answerable: Whether this turn or an earlier one contains everything that the answer needs; None if unknown.
        metric: Metric that scores the answer; empty to use the metric of the set.

    Raises:
        SinkscopeError: A variant is missing or empty, or there is no answer.
    """

    prompts: dict[Position, str]
    answers: tuple[str, ...]
    depends: tuple[int, ...]
    answerable: bool | None = True
    metric: str = ""

    def __post_init__(self) -> None:
        if not all(self.prompts.get(position) for position in POSITIONS):
            raise SinkscopeError(f"prompts has {', '.join(self.prompts)}, expected texts for {', '.join(POSITIONS)}")
        if not self.answers:
            raise SinkscopeError("answers is empty, expected at least one text")


@dataclass(frozen=True)
class Dialogue:
    """A sequence of turns that belong together.

    Attributes:
        id: Unique in its set.
        task: Name of the set: "recall", or one in `sinkscope.bench.published.SETS`.
        turns: The turns in order.
        classes: For classification, the possible class names; for functions, those of the same repository.

    Raises:
        SinkscopeError: There are no turns, or one of them depends on a later one.
    """

    id: str
    task: str
    turns: tuple[DialogueTurn, ...]
    classes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.turns:
            raise SinkscopeError("turns is [], expected a list of at least one")
        for index, turn in enumerate(self.turns):
            if not all(0 <= t <= index for t in turn.depends):
                raise SinkscopeError(
                    f"turns[{index}].depends is {list(turn.depends)}, expected 0-based turns up to this one, {index}"
                )


def write_dialogues(dialogues: Sequence[Dialogue], path: str | os.PathLike[str]) -> Path:
    """Write JSON lines; the file is written completely or not at all.

    Raises:
        SinkscopeError: The file cannot be written.
    """
    return write_atomic(path, "".join(f"{line}\n" for line in map(dialogue_line, dialogues)))


def dialogue_line(dialogue: Dialogue) -> str:
    """One line of such a file, without the line end."""
    return json.dumps(asdict(dialogue), ensure_ascii=False)


def read_dialogues(path: str | os.PathLike[str]) -> tuple[Dialogue, ...]:
    """Read the dialogues of a file.

    Raises:
        SinkscopeError: The file is missing, or a line is not a dialogue, has no turns or has a damaged one (names the
            line).
    """
    return tuple(read_records(path, Dialogue, "a file that `sinkscope dialogues build` wrote", key="id"))


def split_at_middle(text: str) -> tuple[str, str]:
    """Split a text in two at the line break nearest to the middle or, if none is near, at the nearest space."""
    middle, reach = len(text) // 2, max(len(text) // 10, 1)
    for gap, far in (("\n", reach), (" ", len(text))):
        found = [i for i in (text.rfind(gap, 0, middle), text.find(gap, middle)) if i >= 0 and abs(i - middle) <= far]
        if found:
            at = min(found, key=lambda i: abs(i - middle))
            return text[:at].rstrip(), text[at:].lstrip()
    return text[:middle], text[middle:]


def sizes(made: Sequence[Dialogue], tokenizer: Any) -> dict[str, Any]:
    """The number of dialogues, turns and questions, and the mean words and tokens of a turn and of a dialogue."""
    texts = [turn.prompts["end"] for dialogue in made for turn in dialogue.turns]
    words = [len(text.split()) for text in texts]
    tokens = None if tokenizer is None else [len(tokenizer(text)["input_ids"]) for text in texts]
    return {
        "dialogues": len(made),
        "turns": len(texts) / len(made),
        "questions": len(texts),
        "words": {"turn": fmean(words), "dialogue": sum(words) / len(made)},
        "tokens": None if tokens is None else {"turn": fmean(tokens), "dialogue": sum(tokens) / len(made)},
    }
