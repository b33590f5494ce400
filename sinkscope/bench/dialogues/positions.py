"""Where questions stand in the messages of a chat log: LoopServe's Table 5, by rules without a model."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from sinkscope.bench.dialogues.questions import Accuracy, Place, accuracy, locate
from sinkscope.bench.methods import check_whole
from sinkscope.errors import SinkscopeError
from sinkscope.rate import wilson
from sinkscope.records import read_rows, read_text, rows_of
from sinkscope.registry import Count, Option, command
from sinkscope.results import ModelInfo, Result, provenance

PAPER = {"front": 1562, "middle": 1457, "end": 3657}
"""Table 5, of LMSYS-Chat-1M."""
NON_TERMINAL = "front + middle"
EXPECTED = (
    "a chat log: JSON lines or an array with conversation (LMSYS-Chat-1M), conversations (ShareGPT) or messages "
    "(OpenAI), their .parquet, or text with a message a line"
)
_LISTS = ("conversation", "conversations", "messages")
_ROLE, _TEXT = ("role", "from"), ("content", "value")
_USERS = {"user", "human", "prompter"}
_JSON = (".json", ".jsonl", ".ndjson")
_SHOWN = 300  # characters of an example


@dataclass(frozen=True)
class Share:
    """The messages with the question at one place.

    Attributes:
        position: "front", "middle", "end", or both of the first.
        count: messages.
        share: of those with a question and more than a sentence; None: there are none.
        low: lower end of its 95 % interval (Wilson).
        high: its upper end.
        paper_count: LoopServe's Table 5.
        paper_share: the same.
    """

    position: str
    count: int
    share: float | None
    low: float | None
    high: float | None
    paper_count: int
    paper_share: float


@dataclass(frozen=True)
class Example:
    """A message.

    Attributes:
        position: place of its question.
        where: line or row of the file, and which message of the user.
        asked: sentences that were taken for the question.
        text: its beginning.
    """

    position: str
    where: str
    asked: tuple[str, ...]
    text: str


@dataclass(frozen=True, kw_only=True)
class Positions(Result):
    """Where questions stand in a chat log.

    Attributes:
        places: the three classes of Table 5, and the first two together.
        conversations: that were counted.
        messages: of users in them; those below are left out of `places`.
        single: of one sentence.
        no_question: in which nothing is asked.
        foreign: in another language than English, by the log's own field or by their letters.
        accuracy: of the rules, on the held-out part of a sample labelled by hand.
        examples: of messages, by place.
    """

    kind: ClassVar[str] = "dialogues-positions"
    drawing: ClassVar[Any] = "sinkscope.bench.drawing:draw_positions"
    percent: ClassVar[tuple[str, ...]] = ("share", "low", "high", "paper_share")

    places: tuple[Share, ...]
    conversations: int
    messages: int
    single: int
    no_question: int
    foreign: int
    accuracy: Accuracy
    examples: tuple[Example, ...]

    def summary(self) -> str:
        """What was counted, how good the rules are, and the examples."""
        a, counted = self.accuracy, sum(share.count for share in self.places[:3])
        lines = [
            f"{self.model.name}: {counted} of {_many(self.messages, 'message')} in "
            f"{_many(self.conversations, 'conversation')} with a question and more than a sentence; {self.single} of "
            f"one sentence, {self.no_question} without a question, {self.foreign} not in English.",
            f"The rules are right on {a.right} of {a.messages} held-out messages of our own ({a.share:.0%}, "
            f"{a.low:.0%} to {a.high:.0%}), on those of real users less often (docs/dialogues.md). How the paper told "
            "the classes apart it does not say.",
        ]
        for example in self.examples:
            asked = " / ".join(" ".join(sentence.split()) for sentence in example.asked)
            lines += [f"{example.position}, {example.where}: {asked}", f"    {' '.join(example.text.split())}"]
        return "\n".join(lines)


@command(group="Benchmarks", command="dialogues positions")
def question_positions(
    file: Annotated[str | Path, Option(argument=True, metavar="FILE")],
    *,
    min_turns: int = 1,
    count: int | None = None,
    examples: int = 0,
    seed: Count = 0,
) -> Positions:
    """Count where questions stand in the messages of a chat log, by rules for English text. Loads no model.

    Args:
        file: LMSYS-Chat-1M, ShareGPT or OpenAI messages (JSON, parquet), or one message a line.
        min_turns: Leave out conversations with fewer messages of the user; the paper takes 2.
        count: Draw this many conversations; the paper takes 10000. By default all.
        examples: Messages to show of each class.
        seed: Seed of the draw.

    Raises:
        SinkscopeError: no such file, nothing in it, or a line of another form (with its number).
    """
    started = time.perf_counter()
    check_whole(min_turns=min_turns, **({} if count is None else {"count": count}))
    check_whole(0, examples=examples)
    talks = [talk for talk in _conversations(Path(file).expanduser()) if len(talk.messages) >= min_turns]
    name = Path(file).name
    if not talks:
        wanted = _many(min_turns, "message")
        raise SinkscopeError(f"{name} has no conversation with {wanted} of a user: give another log, or fewer")
    if count is not None and count > len(talks):
        raise SinkscopeError(f"count={count}: {name} has {_many(len(talks), 'such conversation')}: give fewer")
    if count is not None:
        talks = random.Random(seed).sample(talks, count)
    counts: Counter[str] = Counter()
    shown: dict[Place, list[Example]] = {"front": [], "middle": [], "end": []}
    for talk in talks:
        for number, message in enumerate(talk.messages, 1):
            if talk.foreign or _other_letters(message):
                counts["foreign"] += 1
                continue
            found = locate(message)
            counts[found.place] += 1
            if found.place in shown and len(shown[found.place]) < examples:
                where = f"{talk.where}, message {number}" if len(talk.messages) > 1 else talk.where
                text = message if len(message) <= _SHOWN else message[:_SHOWN] + "..."
                shown[found.place].append(Example(found.place, where, found.asked, text))
    return Positions(
        model=ModelInfo(name, "chat log", 0, 0, 0, ""),
        settings={"file": name, "min_turns": min_turns, "count": count, "examples": examples, "seed": seed},
        provenance=provenance(started=started, device="none", dtype="none", attention="none", bos=None, seed=seed),
        places=_shares(counts),
        conversations=len(talks),
        messages=counts.total(),
        single=counts["single"],
        no_question=counts["none"],
        foreign=counts["foreign"],
        accuracy=accuracy(),
        examples=tuple(example for each in shown.values() for example in each),
    )


def _many(count: int, what: str) -> str:
    return f"{count} {what}" + "s" * (count != 1)


def _shares(counts: Counter[str]) -> tuple[Share, ...]:
    total, paper = sum(counts[place] for place in PAPER), sum(PAPER.values())
    made: list[Share] = []
    for name in (*PAPER, NON_TERMINAL):
        parts = [name] if name in PAPER else ["front", "middle"]
        count, theirs = sum(counts[part] for part in parts), sum(PAPER[part] for part in parts)
        rate = wilson(count, total) if total else None
        made.append(
            Share(name, count, rate and rate.share, rate and rate.low, rate and rate.high, theirs, theirs / paper)
        )
    return tuple(made)


@dataclass(frozen=True)
class _Talk:
    where: str
    messages: tuple[str, ...]
    foreign: bool


def _conversations(file: Path) -> Iterator[_Talk]:
    if file.suffix == ".parquet":
        rows = list(read_rows(file, EXPECTED))
    else:
        text = read_text(file, EXPECTED)
        if file.suffix == ".txt" or (text.lstrip()[0] not in "{[" and file.suffix not in _JSON):
            lines = enumerate(text.split("\n"), 1)
            yield from (_Talk(f"{file.name} line {i}", (line.strip(),), False) for i, line in lines if line.strip())
            return
        rows = list(rows_of(text, file.name, EXPECTED))
    if all(isinstance(row, dict) and any(key in row for key in _ROLE) for _, row in rows):
        rows = [(file.name, [row for _, row in rows])]  # the messages of one conversation
    for where, row in rows:
        messages = tuple(_messages(row, where))
        language = row.get("language") if isinstance(row, dict) else None
        foreign = isinstance(language, str) and language.lower() not in ("english", "en", "unknown", "")
        yield _Talk(where, messages, foreign)


def _messages(row: Any, where: str) -> Iterator[str]:
    """What the user says in one conversation."""
    said = row
    if isinstance(row, dict):
        said = next((row[name] for name in _LISTS if name in row), None)
        if said is None:
            raise SinkscopeError(f"{where} has none of {', '.join(_LISTS)}: give {EXPECTED}")
    if not isinstance(said, list):
        raise SinkscopeError(f"{where} is {json.dumps(said)!s:.40}, expected a list of messages: give {EXPECTED}")
    for number, message in enumerate(said, 1):
        each = message if isinstance(message, dict) else {}
        role = next((each[name] for name in _ROLE if name in each), None)
        text = next((each[name] for name in _TEXT if name in each), None)
        if not isinstance(role, str) or (text is None and role.lower() in _USERS):
            raise SinkscopeError(
                f"{where}, message {number} is {json.dumps(message)!s:.40}, expected role and content, or from and "
                "value: correct the line"
            )
        if role.lower() in _USERS:
            if isinstance(text, list):  # parts, some of which may be pictures
                text = "\n".join(str(p.get("text", "")) for p in text if isinstance(p, dict))
            if not isinstance(text, str):
                raise SinkscopeError(f"{where}, message {number}: {text!r:.40} is no text: correct the line")
            if text.strip():
                yield text


def _other_letters(message: str) -> bool:
    letters = [c for c in message if c.isalpha()]
    return 2 * sum(c.isascii() for c in letters) < len(letters)
