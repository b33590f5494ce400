"""What a dialogue is, in every set of this package, and its file: one dialogue per line."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeGuard, get_args

from sinkscope.errors import SinkscopeError
from sinkscope.output import write_atomic

Position = Literal["begin", "middle", "end"]
POSITIONS: tuple[Position, ...] = get_args(Position)


@dataclass(frozen=True)
class Turn:
    """What the user says in a turn, in three variants, and the right answers.

    Attributes:
        prompts: the text by position of the question in it.
        answers: right answers; what a history of right answers holds is the first.
        depends: turns (0-based, this one included) whose context the answer needs; of LongBench's questions, whose
            context was put into this turn.
        answerable: what is needed for the answer was said in this turn or before; None where that is not known.
    """

    prompts: dict[Position, str]
    answers: tuple[str, ...]
    depends: tuple[int, ...]
    answerable: bool | None = True


@dataclass(frozen=True)
class Dialogue:
    """Some turns that belong together.

    Attributes:
        id: unique in its set.
        task: name of the set: "recall", or a task of LongBench or SCBench.
        turns: in order.
        classes: names that the answer is one of, for classification.
    """

    id: str
    task: str
    turns: tuple[Turn, ...]
    classes: tuple[str, ...] = ()


def write_dialogues(dialogues: Sequence[Dialogue], path: str | os.PathLike[str]) -> Path:
    """Write JSON lines, whole or not at all.

    Raises:
        SinkscopeError: the file cannot be written.
    """
    return write_atomic(path, "".join(json.dumps(asdict(d), ensure_ascii=False) + "\n" for d in dialogues))


def read_dialogues(path: str | os.PathLike[str]) -> tuple[Dialogue, ...]:
    """The dialogues of a file.

    Raises:
        SinkscopeError: no such file, or a line is no dialogue, has no turns or a damaged one (with the line).
    """
    file = Path(path).expanduser()
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        reason = (error.strerror or "it cannot be read").lower()
        raise SinkscopeError(
            f"{os.fspath(path)!r}: {reason}; give a file that `sinkscope dialogues build` wrote"
        ) from None
    found: list[Dialogue] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        if line.strip():
            dialogue = _dialogue(line, f"{file.name} line {number}")
            if dialogue.id in seen:
                raise SinkscopeError(
                    f"{file.name} line {number}: id {dialogue.id!r} is that of line {seen[dialogue.id]} too; "
                    "build the file again"
                )
            seen[dialogue.id] = number
            found.append(dialogue)
    if not found:
        raise SinkscopeError(f"{file.name} has no dialogues in it: build it again")
    return tuple(found)


def _dialogue(line: bytes, where: str) -> Dialogue:
    try:
        content: Any = json.loads(line.decode("utf-8"))
    except ValueError:
        raise SinkscopeError(f"{where} is not JSON: build the file again") from None
    if not isinstance(content, dict):
        raise SinkscopeError(f"{where} is {type(content).__name__}, expected an object: build the file again")
    for name in ("id", "task"):
        if not isinstance(content.get(name), str):
            raise SinkscopeError(f"{where}: {name} is {content.get(name)!r:.40}, expected a text: build the file again")
    turns = content.get("turns")
    if not isinstance(turns, list) or not turns:
        raise SinkscopeError(f"{where}: turns is {turns!r:.40}, expected a list of at least one: build the file again")
    classes = content.get("classes", [])
    if not _texts(classes):
        raise SinkscopeError(f"{where}: classes is {classes!r:.40}, expected a list of texts: build the file again")
    read = tuple(_turn(turn, i, where) for i, turn in enumerate(turns))
    return Dialogue(content["id"], content["task"], read, tuple(classes))


def _turn(content: Any, index: int, where: str) -> Turn:
    where = f"{where}, turn {index + 1}"
    again = "build the file again"
    if not isinstance(content, dict):
        raise SinkscopeError(f"{where} is {content!r:.40}, expected an object: {again}")
    prompts = content.get("prompts")
    if not isinstance(prompts, dict) or not all(isinstance(prompts.get(p), str) and prompts[p] for p in POSITIONS):
        raise SinkscopeError(f"{where}: prompts is {prompts!r:.40}, expected texts for {', '.join(POSITIONS)}: {again}")
    answers, depends = content.get("answers"), content.get("depends")
    if not _texts(answers) or not answers:
        raise SinkscopeError(f"{where}: answers is {answers!r:.40}, expected a list of at least one text: {again}")
    if not isinstance(depends, list) or not all(type(t) is int and 0 <= t <= index for t in depends):
        raise SinkscopeError(
            f"{where}: depends is {depends!r:.40}, expected 0-based turns up to this one, {index}: {again}"
        )
    answerable = content.get("answerable", True)
    if answerable is not None and not isinstance(answerable, bool):
        raise SinkscopeError(f"{where}: answerable is {answerable!r:.40}, expected true, false or null: {again}")
    return Turn({p: prompts[p] for p in POSITIONS}, tuple(answers), tuple(depends), answerable)


def _texts(content: Any) -> TypeGuard[list[str]]:
    return isinstance(content, list) and all(isinstance(text, str) for text in content)
