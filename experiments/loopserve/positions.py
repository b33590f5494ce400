"""Where questions stand in a chat log, by rules for English and without a model: the labels of LoopServe's Table 5.

    python -m experiments.loopserve.positions sharegpt.json --examples 3 [--json positions.json]
    python -m experiments.loopserve.positions sharegpt.json --labels labels.jsonl
    python -m experiments.loopserve.positions labels.jsonl --labelled

The first counts by the rules below; the second also writes the label of every message; the third counts messages that
a person or a model labelled (JSON lines with conversation and place, and asked and text for examples).

A message is divided into sentences. Code, quotations, tables, transcripts and pasted texts are material, which asks
nothing of the reader. Of the other sentences, those that ask or tell the reader to do something are the questions.
Greetings and thanks at either end do not count.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import tomllib
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import dropwhile, pairwise
from pathlib import Path
from typing import Any, Literal, get_args

from sinkscope.errors import SinkscopeError
from sinkscope.files.console import note
from sinkscope.files.output import read_text, write_atomic
from sinkscope.files.rate import wilson
from sinkscope.files.records import read_records, read_rows, rows_of
from sinkscope.files.store import lines

Place = Literal["front", "middle", "end", "single", "none"]
PLACES: tuple[Place, ...] = get_args(Place)
PAPER = {"front": 1562, "middle": 1457, "end": 3657}
"""Messages of LMSYS-Chat-1M by position of the question: LoopServe's Table 5."""
NEAR = 0.1  # of a message's words: less text before or after the question is ignored
LONG = 60  # words of a paragraph that counts as a pasted text

_NEAR = 300  # characters that are looked at around a stop or before a colon, so that time is linear


def _rules() -> dict[str, re.Pattern[str]]:
    read = tomllib.loads(Path(__file__).with_name("question_rules.toml").read_text(encoding="utf-8"))
    parts = {**read["parts"], "verb": f"(?:{'|'.join(read['parts']['verb'].split())})"}
    for name, part in parts.items():
        read["patterns"] = {key: text.replace(f"{{{name}}}", part) for key, text in read["patterns"].items()}
    return {key: re.compile(text) for key, text in read["patterns"].items()}


_RULES = _rules()


@dataclass
class _Unit:
    text: str  # with the marks in quotations covered
    shown: str
    line: int
    block: int
    material: bool = False
    soft: bool = False  # material by nothing but an announcement

    @property
    def words(self) -> int:
        return len(self.shown.split())

    @property
    def asks(self) -> bool:
        return _asks(self.text)

    @property
    def labelled(self) -> bool:
        return bool(_RULES["label"].match(self.text)) and not _asks(self.text.split(":")[0])

    @property
    def polite(self) -> bool:
        return bool(_RULES["courtesy"].fullmatch(self.text)) and not self.asks


@dataclass(frozen=True)
class Located:
    """What is asked in a message, and where.

    Attributes:
        place: "front", "middle" or "end" of the message, "single" (it is one sentence) or "none" (nothing is asked).
        asked: the sentences that ask, word for word.
    """

    place: Place
    asked: tuple[str, ...]


def locate(message: str) -> Located:
    """Where the question of a message stands.

    "end": at most a tenth of the words follow the last question. Otherwise "front": at most a tenth precede the first.
    Otherwise "middle".
    """
    units = list(dropwhile(lambda unit: unit.polite, _units(message)))
    while units and units[-1].polite:
        units.pop()
    if len(units) < 2:
        return Located("single", ())
    _mark(units)
    asking = _asking(units)
    if not asking:
        return Located("none", ())
    total, before, after = (sum(u.words for u in part) for part in (units, units[: asking[0]], units[asking[-1] + 1 :]))
    place: Place = "end" if after <= NEAR * total else "front" if before <= NEAR * total else "middle"
    return Located(place, tuple(units[i].shown for i in asking))


def _asking(units: Sequence[_Unit]) -> list[int]:
    """Which units ask."""
    own = [i for i, unit in enumerate(units) if not unit.material]
    asking = (
        [i for i in own if units[i].asks]
        or [i for i in own if _RULES["hint"].search(units[i].text)]
        or [i for i, unit in enumerate(units) if unit.soft and unit.asks][-1:]
    )
    # If something is asked elsewhere, a question in a long paragraph belongs to the pasted text.
    sizes: Counter[int] = Counter()
    for unit in units:
        sizes[unit.block] += unit.words
    outside = [i for i in asking if sizes[units[i].block] <= LONG]
    if not outside:
        return asking
    edges = {edge for block in sizes for edge in _edges(units, block)}
    return [i for i in asking if i in outside or (i in edges and _tells(units[i].text))]


def _edges(units: Sequence[_Unit], block: int) -> tuple[int, int]:
    mine = [i for i, unit in enumerate(units) if unit.block == block]
    return mine[0], mine[-1]


def _asks(text: str) -> bool:
    text = re.sub(r"^[^\w\"“«]*(?:[\d_]+\W*)?", "", text)
    label = _RULES["question_label"].match(text)
    text = text[label.end() :] if label else text
    if _RULES["noun"].fullmatch(text):
        return False
    return bool(label) or text.rstrip("\"')]* ").endswith("?") or _tells(text) or bool(_RULES["asking"].match(text))


def _tells(text: str) -> bool:
    return bool(_RULES["imperative"].match(text) or _RULES["wish"].search(text))


def _units(message: str) -> list[_Unit]:
    """Sentences, and lines of code, in order."""
    units: list[_Unit] = []
    block = line = at = 0
    for fence in [*_RULES["fence"].finditer(message), None]:
        for row in _joined(message[at : fence.start() if fence else len(message)]):
            line += 1
            if not row.strip():
                block += 1
            else:
                units += [_Unit(*sentence, line, block) for sentence in _sentences(row)]
        if fence:
            at, line, block = fence.end(), line + 1, block + 1
            units.append(_Unit("", fence.group(), line, block, True))
            block += 1
    for unit in units:
        unit.material = unit.material or _is_code(unit.text) or unit.text.startswith((">", "|"))
    return units


def _joined(text: str) -> list[str]:
    """Lines; lines that were broken within a sentence are joined."""
    rows: list[str] = []
    for row in text.split("\n"):
        last = rows[-1] if rows else ""
        if last and re.search(r"[a-z,]$", last) and re.match(r"[a-z]", row) and not _is_code(last) and len(last) > 50:
            rows[-1] = f"{last} {row}"
        else:
            rows.append(row.rstrip())
    return rows


def _sentences(row: str) -> list[tuple[str, str]]:
    """A line's sentences, covered and word for word; a request is separated from what follows its colon."""
    covered = _RULES["quoted"].sub(lambda found: re.sub(r"(?<=.)\S(?=.)", "_", found.group()), row.replace("’", "'"))
    if _is_code(covered):
        return [(covered.strip(), row.strip())]
    cuts, start = [0], 0
    for stop in _RULES["stop"].finditer(covered):
        before = covered[max(start, stop.start() - _NEAR) : stop.start()].rstrip("\"')] ")
        after = covered[stop.end() : stop.end() + _NEAR]
        if before.endswith("...") and after[:1].islower():
            continue
        if not _RULES["short"].search(before) or (re.search(r"[A-Z]\.$", before) and _asks(after)):
            start = stop.end()
            cuts.append(start)
    for mark in re.finditer(r": +(?=\S)", covered):
        at = bisect_right(cuts, mark.start())
        begin = cuts[at - 1]
        asked = covered[begin : mark.start()]
        if len(asked) <= _NEAR and _asks(asked) and not _RULES["question_label"].match(covered, begin):
            cuts.insert(at, mark.end())
    cuts = sorted({*cuts, len(row)})
    parts = [(covered[a:b].strip(), row[a:b].strip()) for a, b in pairwise(cuts)]
    return [part for part in parts if part[0]]


def _is_code(text: str) -> bool:
    """Whether a line looks like code, and not like a request that ends in some."""
    text = text.strip()
    return bool(_RULES["code"].match(text)) and not (_asks(text) and re.match(r"(?:[A-Za-z',-]+ ){4}", text))


def _mark(units: Sequence[_Unit]) -> None:
    """Mark every unit that is material."""
    final = [unit.block for unit in units].index(units[-1].block)  # where the last block begins
    rest = letter = label = announced = -1  # from which unit, or in which block or line, there is material
    for i, unit in enumerate(units):
        question = _RULES["question_label"].match(unit.text)
        label = -1 if question else unit.line if unit.labelled else label
        if _RULES["letter"].match(unit.text):
            letter = unit.block
        if i == final and unit.asks and rest < 0:
            announced = -1  # a question after the material
        if not unit.material and not question:
            unit.soft = -1 < announced < unit.block
            unit.material = 0 <= rest <= i or unit.line == label or unit.block == letter
            unit.soft = unit.soft and not unit.material
            unit.material |= unit.soft
        if not unit.material:
            if unit.text.endswith(":") and rest < 0 and not question and unit.asks:
                rest = i + 1
            announced = unit.block if _RULES["announced"].search(unit.text) else announced


@dataclass(frozen=True)
class LabelledMessage:
    """A user's message and the position of its question.

    Attributes:
        conversation: Name of its conversation; messages of one conversation are consecutive.
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
        share: right / messages; `low` to `high` is its 95 % interval (Wilson).
        confusion: Counts by label and by what the rules say.
    """

    messages: int
    right: int
    share: float
    low: float
    high: float
    confusion: dict[str, dict[str, int]]


def accuracy() -> Accuracy:
    """The rules against the labels of the held-out sample, as `questions.py` measured them."""
    (found,) = read_records(Path(__file__).with_name("question_accuracy.json"), Accuracy, "the file beside this one")
    return found


def count_places(
    messages: Sequence[LabelledMessage], *, min_turns: int = 1, count: int | None = None, seed: int = 0
) -> dict[str, Any]:
    """Count the positions of questions.

    Args:
        messages: User messages with their labels.
        min_turns: Minimum number of user messages per conversation; the paper takes 2.
        count: Number of conversations to draw; the paper takes 10,000. None uses all.
        seed: Seed of the draw.

    Returns:
        Counts by label, and the share of each position of Table 5 with its 95 % interval and the paper's.

    Raises:
        SinkscopeError: There are fewer conversations than requested.
    """
    talks: dict[str, list[LabelledMessage]] = {}
    for message in messages:
        talks.setdefault(message.conversation, []).append(message)
    long_enough = [talk for talk in talks.values() if len(talk) >= min_turns]
    if not long_enough or len(long_enough) < (count or 0):
        raise SinkscopeError(
            f"the log has {len(long_enough)} conversations of {min_turns} or more messages: give fewer"
        )
    if count is not None:
        long_enough = random.Random(seed).sample(long_enough, count)
    counts = Counter(message.place for talk in long_enough for message in talk)
    total = sum(counts[place] for place in PAPER)
    places: list[dict[str, Any]] = []
    for parts in (("front",), ("middle",), ("end",), ("front", "middle")):
        number = sum(counts[part] for part in parts)
        row: dict[str, Any] = {"position": " + ".join(parts), "count": number}
        if total:
            row |= asdict(wilson(number, total))
        paper = sum(PAPER[part] for part in parts)
        places.append({**row, "paper_count": paper, "paper_share": paper / sum(PAPER.values())})
    return {"conversations": len(long_enough), "counts": dict(counts), "places": places}


EXPECTED = (
    "a chat log: JSON lines or an array with conversation (LMSYS-Chat-1M), conversations (ShareGPT) or messages "
    "(OpenAI), their .parquet, or text with a message a line"
)
_LISTS = ("conversation", "conversations", "messages")
_ROLE, _TEXT = ("role", "from"), ("content", "value")
_USERS = {"user", "human", "prompter"}
_JSON = (".json", ".jsonl", ".ndjson")


def labelled(file: Path) -> Iterator[LabelledMessage]:
    """Every message of a user in a chat log, with its label.

    Raises:
        SinkscopeError: no such file, nothing in it, or a line of another form (with its number).
    """
    for talk in _conversations(file):
        for message in talk.messages:
            if talk.foreign or _other_letters(message):
                yield LabelledMessage(talk.where, "foreign", text=message)
            else:
                found = locate(message)
                yield LabelledMessage(talk.where, found.place, found.asked, message)


@dataclass(frozen=True)
class _Talk:
    where: str
    messages: tuple[str, ...]
    foreign: bool


def _conversations(file: Path) -> Iterator[_Talk]:
    if file.suffix == ".parquet":
        rows = list(read_rows(file, EXPECTED))
    else:
        text = read_text(file, f"give {EXPECTED}")
        if file.suffix == ".txt" or (text.lstrip()[:1] not in "{[" and file.suffix not in _JSON):
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


def main(argv: Sequence[str] | None = None) -> int:
    """Count from the command line.

    Returns:
        0 done, 2 bad input.
    """
    parser = argparse.ArgumentParser(
        prog="python -m experiments.loopserve.positions", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("file", type=Path, help="LMSYS-Chat-1M, ShareGPT or OpenAI messages, or one message a line")
    parser.add_argument("--min-turns", type=int, default=1, help="leave out conversations with fewer user messages")
    parser.add_argument("--count", type=int, help="draw this many conversations")
    parser.add_argument("--examples", type=int, default=0, help="messages to show of each class")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--labels", type=Path, help="write every message with its label")
    parser.add_argument("--labelled", action="store_true", help="the file holds labelled messages")
    parser.add_argument("--json", type=Path, help="write the counts")
    args = parser.parse_args(argv)
    try:
        if args.labelled:
            messages = read_records(args.file, LabelledMessage, "labelled messages, JSON lines")
        else:
            messages = list(labelled(args.file.expanduser()))
        result = count_places(messages, min_turns=args.min_turns, count=args.count, seed=args.seed)
    except SinkscopeError as error:
        note(f"error: {error}")
        return 2
    if args.labels is not None:
        write_atomic(args.labels, lines(messages))
    if args.json is not None:
        write_atomic(args.json, json.dumps(result, indent=1) + "\n")
    print(f"{result['conversations']} conversations, messages by label: {result['counts']}")
    for row in result["places"]:
        share = f"{row['share']:.1%} ({row['low']:.0%} to {row['high']:.0%})" if "share" in row else "-"
        print(f"{row['position']:<15} {row['count']:>6} {share:<24} paper {row['paper_share']:.1%}")
    for place in PAPER:
        for message in [each for each in messages if each.place == place][: args.examples]:
            text = " ".join(message.text.split())[:300]
            print(f"{place}, {message.conversation}: {' / '.join(message.asked)}\n    {text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
