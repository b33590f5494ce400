"""Where in a message the question stands: rules for English, without a model.

A message is cut into sentences. Code, quotations, tables, transcripts and texts that it brings along are material, in
which nothing is asked of the reader; of the rest, sentences that ask, or tell the reader to do something, are the
questions. Greetings and thanks at either end do not count.
"""

from __future__ import annotations

import re
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
NEAR = 0.1  # of a message's words: as little text before or after the question is none
LONG = 60  # words of a paragraph that reads like a text brought along

_NEAR = 300  # characters that are looked at around a stop or before a colon, so that time is linear

_VERBS = """act add advise analyse analyze apply arrange assess brainstorm build calculate categorize change check
choose classify code combine compare complete compose compute construct convert correct count create critique debug
decide define demonstrate derive describe design detect determine develop discuss draft draw edit elaborate estimate
evaluate examine expand explain extract fill find finish fix format formulate generate give guess help highlight
identify imagine implement improve infer interpret introduce invent list match modify name optimize outline
paraphrase pick plan predict prepare pretend produce proofread propose prove provide put rank rate recommend
refactor remove rephrase replace reply respond review rewrite say search select shorten show simplify simulate
sketch solve sort suggest summarise summarize teach tell transform translate turn verify write""".split()
_VERB = f"(?:{'|'.join(_VERBS)})"
_LEAD = (
    r"(?:(?:also|and|but|so|now|then|next|ok|okay|well|hi|hello|hey|first|finally|btw|by the way|please|pls|kindly"
    r"|just)\b[ ,:]*)*"
)
_CLAUSE = r"(?:(?:in|using|with|for|as|given|based on|considering|from|without|by|to) [^?!]{1,90}?, (?:please )?)?"
_IMPERATIVE = re.compile(
    rf"{_LEAD}{_CLAUSE}(?:{_VERB}\b(?! (?:me )?your (?:reasoning|work|steps))"
    r"|make (?!sure)|continue\b(?= \w)|come up with|think of|look up|answer (?:the|this|these|my|all|each)\b"
    r"|let me know|do the same)",
    re.I,
)
_WISH = re.compile(
    r"(?:can|could|would|will) (?:you|u|someone|anyone)\b|please " + _VERB + r"\b"
    r"|\bi(?:'d| would)? (?:want|need|like) you to\b|\bi(?:'d| would) (?:like to know|appreciate)\b|\bi want to know\b"
    r"|\bi(?:'m| am| was)? wonder(?:ing)? (?:if|how|what|why|whether|which|who|where|when)\b"
    r"|\bi need (?:an? |some |your |the )?(?:\w+ )?(?:function|script|program|code|query|regex|formula|list|letter"
    r"|e-?mail|poem|story|essay|summary|title|name|slogan|ideas?|plan|recipe|help|advice|suggestions?)\b",
    re.I,
)
_HINT = re.compile(  # a question where nothing else is
    r"\b(?:i|we)(?:'d| would) like\b|\b(?:i|we) (?:(?:also|just|only|really) )?(?:want|need|wanna)\b|\bplease\b"
    r"|\b(?:i'm|i am|we're|we are) (?:looking|trying)\b|\b(?:goal|task|topic|job|question|problem) is\b|\blet'?s\b"
    rf"|\b(?:show|give|tell|help|teach) (?:me|us)\b|^using .* to {_VERB}\b|: {_VERB}\b",
    re.I,
)
_ASKING = re.compile(
    _LEAD
    + r"(?:(?:how|what|why|who|where|when|which)(?:'s| is| are| was| were| do| does| did| don't| doesn't| can| can't"
    r"| could| should| would| will| has| have)\b|how (?:to|many|much|long|far|old|often|come)\b"
    r"|what (?:kind|sort|type|happens|about)\b|which (?:one|of)\b|who \w+(?:ed|s|n)\b"
    r"|(?:is|are|was|were|do|does|did|can|could|should|would|will|has|may|am) "
    r"(?:i|you|he|she|it|we|they|this|that|these|those|there|the|my|your|his|her|our|a|an|[a-z])\b)",
    re.I,
)
_NOUN = re.compile(  # a verb above that, alone before a colon, names what follows
    r"(?:change|code|design|draft|fill|fix|format|guess|list|match|name|outline|plan|prepare|put|rank|rate|reply|review"
    r"|select|show|sketch|sort|turn)\s*:?",
    re.I,
)
_QUESTION_LABEL = re.compile(r"(?:question|q|task|instructions?|prompt|problem)\s*\d*\s*[:.)] *", re.I)
_LABEL = re.compile(r"(?:[A-Z][\w'-]*(?: [\w'-]+){0,2}|[A-Za-z]|\w+ sentence) ?: +\S|[A-Z]\) ")
_COURTESY = re.compile(
    r"(?:hi|hello|hey|good (?:morning|afternoon|evening|day)|thanks|thank you|thx|many thanks|cheers|please"
    r"|(?:kind |best )?regards|(?:i )?hope you(?:'re| are))\b(?:[ ,]+(?!i\b)\w+){0,5}[\s!.,)]*",
    re.I,
)
_ANNOUNCED = re.compile(
    r"\b(?:below|(?:the|this) following|following|attached|here(?:'s| is| are)|this is (?:my|an?|the))\b", re.I
)
_CODE = re.compile(
    r"(?:(?:def|class|import|from|return|for|while|if|elif|try|except|with|print|var|let|const|function|public|private"
    r"|static|int|void|SELECT|FROM|WHERE|JOIN|INSERT|UPDATE|GROUP BY|ORDER BY)\b.*[:;({)\]\w]\s*$(?<![.?!\w])"
    r"|(?:return|import|from|SELECT|FROM|JOIN|WHERE) \S+.*(?<![.?!])$"
    r"|.*[{};]\s*$|</?\w+[^>]*>|#include|//|/\*|>>>|\$ |\||Traceback \(|File \"|[\w.\[\]\"']+ ?[-+*/]?= ?\S.*(?<![.?])$"
    r"|[\w.]+\(.*\)\s*$|\w+(?:Error|Exception)\b|[^\s,]+(?:,[^\s,]+)+\s*$)"
)
_FENCE = re.compile(r"^[ \t]*(```|~~~).*?(?:^[ \t]*\1[ \t]*$|\Z)", re.M | re.S)
_QUOTED = re.compile(r"\"[^\"\n]{2,}\"|“[^”]{2,}”|«[^»]{2,}»")
_STOP = re.compile(r"(?<=[.!?])[\"')\]]*\s+")
_LETTER = re.compile(r"(?:my )?dear(?:est)? |to whom ", re.I)
_SHORT = re.compile(r"(?:\b(?:mr|mrs|ms|dr|prof|st|vs|etc|e\.g|i\.e|no|fig|approx|inc|jr|sr)|\b[A-Z]|^\W*\d+)\.$", re.I)


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
    def polite(self) -> bool:
        return bool(_COURTESY.fullmatch(self.text)) and not self.asks


@dataclass(frozen=True)
class Located:
    """What is asked in a message, and where.

    Attributes:
        place: "front", "middle" or "end" of the message, "single" (it is one sentence) or "none" (nothing is asked).
        asked: the sentences that ask, as they stand.
    """

    place: Place
    asked: tuple[str, ...]


def locate(message: str) -> Located:
    """Where the question of a message stands.

    At the end: after the last question come no more than a tenth of the words. Else at the front: before the first come
    no more than a tenth. Else in the middle.
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
        or [i for i in own if _HINT.search(units[i].text)]
        or [i for i, unit in enumerate(units) if unit.soft and unit.asks][-1:]
    )
    # A question in a long paragraph is the text's own if something is asked outside of it.
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
    label = _QUESTION_LABEL.match(text)
    text = text[label.end() :] if label else text
    if _NOUN.fullmatch(text):
        return False
    return bool(label) or text.rstrip("\"')]* ").endswith("?") or _tells(text) or bool(_ASKING.match(text))


def _tells(text: str) -> bool:
    return bool(_IMPERATIVE.match(text) or _WISH.search(text))


def _units(message: str) -> list[_Unit]:
    """Sentences, and lines of code, in order."""
    units: list[_Unit] = []
    block = line = at = 0
    for fence in [*_FENCE.finditer(message), None]:
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
    """Lines; one that was broken within a sentence is whole."""
    rows: list[str] = []
    for row in text.split("\n"):
        last = rows[-1] if rows else ""
        if last and re.search(r"[a-z,]$", last) and re.match(r"[a-z]", row) and not _is_code(last) and len(last) > 50:
            rows[-1] = f"{last} {row}"
        else:
            rows.append(row.rstrip())
    return rows


def _sentences(row: str) -> list[tuple[str, str]]:
    """A line's sentences, covered and as they stand; a request is parted from what follows its colon."""
    covered = _QUOTED.sub(lambda found: re.sub(r"(?<=.)\S(?=.)", "_", found.group()), row.replace("’", "'"))
    if _is_code(covered):
        return [(covered.strip(), row.strip())]
    cuts, start = [0], 0
    for stop in _STOP.finditer(covered):
        before = covered[max(start, stop.start() - _NEAR) : stop.start()].rstrip("\"')] ")
        after = covered[stop.end() : stop.end() + _NEAR]
        if before.endswith("...") and after[:1].islower():
            continue
        if not _SHORT.search(before) or (re.search(r"[A-Z]\.$", before) and _asks(after)):
            start = stop.end()
            cuts.append(start)
    for mark in re.finditer(r": +(?=\S)", covered):
        at = bisect_right(cuts, mark.start())
        begin = cuts[at - 1]
        asked = covered[begin : mark.start()]
        if len(asked) <= _NEAR and _asks(asked) and not _QUESTION_LABEL.match(covered, begin):
            cuts.insert(at, mark.end())
    cuts = sorted({*cuts, len(row)})
    parts = [(covered[a:b].strip(), row[a:b].strip()) for a, b in pairwise(cuts)]
    return [part for part in parts if part[0]]


def _is_code(text: str) -> bool:
    """Whether a line looks like code, and not like a request that ends in some."""
    text = text.strip()
    return bool(_CODE.match(text)) and not (_asks(text) and re.match(r"(?:[A-Za-z',-]+ ){4}", text))


def _mark(units: Sequence[_Unit]) -> None:
    """Say of every unit whether it is material."""
    last = units[-1].block
    rest = letter = label = announced = -1  # from which unit, or in which block or line, there is material
    for i, unit in enumerate(units):
        question = _QUESTION_LABEL.match(unit.text)
        if question:
            label = -1
        elif _LABEL.match(unit.text) and not _asks(unit.text.split(":")[0]):
            label = unit.line
        if _LETTER.match(unit.text):
            letter = unit.block
        if (i == 0 or units[i - 1].block != unit.block) and unit.block == last and unit.asks and rest < 0:
            announced = -1  # what is asked after the material
        if not unit.material and not question:
            unit.soft = -1 < announced < unit.block
            unit.material = 0 <= rest <= i or unit.line == label or unit.block == letter
            unit.soft = unit.soft and not unit.material
            unit.material = unit.material or unit.soft
        if not unit.material:
            if unit.text.endswith(":") and rest < 0 and not question and unit.asks:
                rest = i + 1
            announced = unit.block if _ANNOUNCED.search(unit.text) else announced


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
