"""What a dialogue is, in every set of this package, and its file: one dialogue per line."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, get_args

from sinkscope.errors import SinkscopeError
from sinkscope.output import write_atomic
from sinkscope.records import read_records

Position = Literal["begin", "middle", "end"]
POSITIONS: tuple[Position, ...] = get_args(Position)
NOT_COUNTED = "not counted: give a tokenizer"


@dataclass(frozen=True)
class DialogueTurn:
    """What the user says in a turn, in three variants, and the right answers.

    Attributes:
        prompts: the text by position of the question in it.
        answers: right answers, a single empty one if none is known; a history of right answers holds the first.
        depends: turns (0-based, this one included) whose context the answer needs; for LongBench's questions,
            turns whose context was put into this turn.
        answerable: whether everything that the answer needs was said in this turn or before; None if that is unknown.
        metric: how the answer is scored; empty: as all answers of the set are.

    Raises:
        SinkscopeError: a variant is missing or empty, or there is no answer.
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
    """Some turns that belong together.

    Attributes:
        id: unique in its set.
        task: name of the set: "recall", or one in `sinkscope.published.SETS`.
        turns: in order.
        classes: for classification, the names that an answer may be; for functions, those of the same repository.

    Raises:
        SinkscopeError: there are no turns, or one of them depends on a later one.
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
    """Write JSON lines, whole or not at all.

    Raises:
        SinkscopeError: the file cannot be written.
    """
    return write_atomic(path, "".join(f"{line}\n" for line in map(dialogue_line, dialogues)))


def dialogue_line(dialogue: Dialogue) -> str:
    """A line of such a file, without its end."""
    return json.dumps(asdict(dialogue), ensure_ascii=False)


def read_dialogues(path: str | os.PathLike[str]) -> tuple[Dialogue, ...]:
    """The dialogues of a file.

    Raises:
        SinkscopeError: no such file, or a line is no dialogue, has no turns or a damaged one (with the line).
    """
    return tuple(read_records(path, Dialogue, "a file that `sinkscope dialogues build` wrote", key="id"))


def split_at_middle(text: str) -> tuple[str, str]:
    """Two halves, divided at the line break nearest to the middle or, if none is near, at the nearest space."""
    middle, reach = len(text) // 2, max(len(text) // 10, 1)
    for gap, far in (("\n", reach), (" ", len(text))):
        found = [i for i in (text.rfind(gap, 0, middle), text.find(gap, middle)) if i >= 0 and abs(i - middle) <= far]
        if found:
            at = min(found, key=lambda i: abs(i - middle))
            return text[:at].rstrip(), text[at:].lstrip()
    return text[:middle], text[middle:]


def sizes(made: Sequence[Dialogue], tokenizer: Any) -> dict[str, Any]:
    """How many dialogues, turns and questions there are, and the mean words and tokens of a turn and of a dialogue."""
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
