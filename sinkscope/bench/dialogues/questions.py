"""Where in a message the question stands: rules for English, without a model.

A message is divided into sentences. Code, quotations, tables, transcripts and pasted texts are material, which asks
nothing of the reader. Of the other sentences, those that ask or tell the reader to do something are the questions.
Greetings and thanks at either end do not count.
"""

from __future__ import annotations

import re
import tomllib
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import dropwhile, pairwise
from pathlib import Path
from typing import Literal, get_args

from sinkscope.records import read_records

Place = Literal["front", "middle", "end", "single", "none"]
PLACES: tuple[Place, ...] = get_args(Place)
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
class Accuracy:
    """How often the rules give the label that was given by hand, on a sample of our own writing.

    Attributes:
        messages: of this part of the sample.
        right: of them.
        share: right / messages.
        low: lower end of its 95 % interval (Wilson).
        high: its upper end.
        confusion: by label and by what the rules say.
    """

    messages: int
    right: int
    share: float
    low: float
    high: float
    confusion: dict[str, dict[str, int]]


def accuracy() -> Accuracy:
    """The rules against the labels of the held-out sample, as `experiments/loopserve/questions.py` measured them."""
    (found,) = read_records(Path(__file__).with_name("question_accuracy.json"), Accuracy, "the file that ships")
    return found
