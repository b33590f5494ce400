"""Positions of questions in the messages of a chat log: LoopServe's Table 5, counted from labelled messages.

The labels can come from a person, a model, or rules. `experiments/loopserve/positions.py` contains rules for English
and writes the labels of a chat log.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from sinkscope.errors import SinkscopeError
from sinkscope.files.options import Count, Option, command
from sinkscope.files.rate import wilson
from sinkscope.files.records import Natural, Whole, check_values, read_records
from sinkscope.files.result import ModelInfo, Result, provenance

PAPER = {"front": 1562, "middle": 1457, "end": 3657}
"""Table 5, of LMSYS-Chat-1M."""
NON_TERMINAL = "front + middle"
EXPECTED = (
    "labelled messages, a JSON object a line with conversation and place, and asked and text for examples; "
    "experiments/loopserve/positions.py writes those of a chat log"
)
_SHOWN = 300  # characters of an example


@dataclass(frozen=True)
class LabelledMessage:
    """A user's message and the position of its question.

    Attributes:
        conversation: Name of its conversation, such as "chat.jsonl line 3"; messages of one conversation are
            consecutive.
        place: Position of the question; "single": one sentence only, "none": nothing is asked, "foreign": not in
            English.
        asked: The sentences that ask, word for word.
        text: Text of the message.
    """

    conversation: str
    place: Literal["front", "middle", "end", "single", "none", "foreign"]
    asked: tuple[str, ...] = ()
    text: str = ""


@dataclass(frozen=True)
class Accuracy:
    """How often rules agree with labels given by hand.

    Attributes:
        messages: Number of messages in this part of the sample.
        right: Number of messages that the rules label correctly.
        share: right / messages.
        low: Lower end of its 95 % interval (Wilson).
        high: Upper end of that interval.
        confusion: Counts by label and by what the rules say.
    """

    messages: int
    right: int
    share: float
    low: float
    high: float
    confusion: dict[str, dict[str, int]]


@dataclass(frozen=True)
class Share:
    """The messages with the question at one position.

    Attributes:
        position: "front", "middle", "end", or the first two together.
        count: Number of messages with the question there.
        share: Share of the messages that contain a question and more than one sentence; None if there are none.
        low: Lower end of the 95 % interval (Wilson) of the share.
        high: Upper end of that interval.
        paper_count: Number of messages in LoopServe's Table 5.
        paper_share: Share of the messages in that table.
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
    """An example message.

    Attributes:
        position: Position of its question.
        where: Line or row of the file, and number of the user's message.
        asked: Sentences that were identified as the question.
        text: Beginning of the message.
    """

    position: str
    where: str
    asked: tuple[str, ...]
    text: str


@dataclass(frozen=True, kw_only=True)
class Positions(Result):
    """Positions of questions in a chat log.

    Attributes:
        places: The three classes of Table 5, and the first two together.
        conversations: Number of conversations that were counted.
        messages: Number of user messages in them; the three groups below are left out of `places`.
        single: Messages of one sentence.
        no_question: Messages in which nothing is asked.
        foreign: Messages in languages other than English, by the log's own field or by their letters.
        accuracy: Accuracy of the rules that gave the labels, on a sample labelled by hand; None if unknown.
        examples: Example messages by position.
    """

    page: ClassVar[str] = "dialogues"
    kind: ClassVar[str] = "dialogues-positions"
    drawing: ClassVar[Any] = "sinkscope.bench.drawing:draw_positions"
    percent: ClassVar[tuple[str, ...]] = ("share", "low", "high", "paper_share")

    places: tuple[Share, ...]
    conversations: int
    messages: int
    single: int
    no_question: int
    foreign: int
    accuracy: Accuracy | None
    examples: tuple[Example, ...]

    def conclusion(self) -> str:
        """How often the question does not come last, compared with the paper's log."""
        found = self.places[-1]
        if found.share is None:
            return f"No message of {self.model.name} has a question and more than a sentence."
        return (
            f"In {found.share:.1%} of the messages of {self.model.name} the question stands in front or in the middle "
            f"(95 %: {found.low:.0%} to {found.high:.0%}); in LMSYS-Chat-1M, by the paper, {found.paper_share:.1%}."
        )

    def details(self) -> list[str]:
        """What was counted, how accurate the rules are, and the examples."""
        a, counted = self.accuracy, sum(share.count for share in self.places[:3])
        lines = [
            f"{self.model.name}: {counted} of {_many(self.messages, 'message')} in "
            f"{_many(self.conversations, 'conversation')} with a question and more than a sentence; {self.single} of "
            f"one sentence, {self.no_question} without a question, {self.foreign} not in English.",
        ]
        if a is not None:
            lines.append(
                f"The rules are right on {a.right} of {a.messages} held-out messages of our own ({a.share:.0%}, "
                f"{a.low:.0%} to {a.high:.0%}), on those of real users less often (docs/dialogues.md). How the paper "
                "told the classes apart it does not say."
            )
        for example in self.examples:
            asked = " / ".join(" ".join(sentence.split()) for sentence in example.asked)
            lines += [f"{example.position}, {example.where}: {asked}", f"    {' '.join(example.text.split())}"]
        return lines


@command(group="Dialogues", command="dialogues positions")
def question_positions(
    file: Annotated[str | Path, Option(argument=True, metavar="FILE")],
    *,
    min_turns: int = 1,
    count: int | None = None,
    examples: int = 0,
    seed: Count = 0,
) -> Positions:
    """Count the positions of questions in the labelled messages of a chat log. Loads no model.

    Args:
        file: JSON lines with conversation and place, as experiments/loopserve/positions.py writes them.
        min_turns: Skip conversations with fewer user messages; the paper uses 2.
        count: Number of conversations to draw; the paper uses 10000. By default all.
        examples: Number of messages to show per class.
        seed: Seed of the draw.

    Raises:
        SinkscopeError: The file is missing or empty, or a line has an unexpected format (names the line).

    Example:
        sinkscope dialogues positions labels.jsonl --examples 3
    """
    messages = read_records(file, LabelledMessage, EXPECTED)
    return count_positions(messages, Path(file).name, min_turns=min_turns, count=count, examples=examples, seed=seed)


def count_positions(
    messages: Sequence[LabelledMessage],
    name: str,
    *,
    min_turns: int = 1,
    count: int | None = None,
    examples: int = 0,
    seed: int = 0,
    accuracy: Accuracy | None = None,
) -> Positions:
    """Count the positions of questions in messages; the numbers are those of `question_positions`.

    Args:
        messages: User messages with their labels.
        name: Name of the log.
        min_turns: Minimum number of user messages per conversation.
        count: Number of conversations to draw; None uses all.
        examples: Number of examples per class.
        seed: Seed of the draw.
        accuracy: Accuracy of the labels' source.

    Raises:
        SinkscopeError: A number is invalid, or there are fewer conversations than requested.
    """
    started = time.perf_counter()
    check_values(Natural | None, min_turns=min_turns, count=count)
    check_values(Whole, examples=examples)
    every: dict[str, list[LabelledMessage]] = {}
    for message in messages:
        every.setdefault(message.conversation, []).append(message)
    talks = [talk for talk in every.values() if len(talk) >= min_turns]
    if not talks:
        wanted = _many(min_turns, "message")
        raise SinkscopeError(f"{name} has no conversation with {wanted} of a user: give another log, or fewer")
    if count is not None and count > len(talks):
        raise SinkscopeError(f"count={count}: {name} has {_many(len(talks), 'such conversation')}: give fewer")
    if count is not None:
        talks = random.Random(seed).sample(talks, count)
    counts: Counter[str] = Counter()
    shown: dict[str, list[Example]] = {place: [] for place in PAPER}
    for talk in talks:
        for number, message in enumerate(talk, 1):
            counts[message.place] += 1
            if len(shown.get(message.place, range(examples))) < examples:
                where = f"{message.conversation}, message {number}" if len(talk) > 1 else message.conversation
                text = message.text if len(message.text) <= _SHOWN else message.text[:_SHOWN] + "..."
                shown[message.place].append(Example(message.place, where, message.asked, text))
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
        accuracy=accuracy,
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
