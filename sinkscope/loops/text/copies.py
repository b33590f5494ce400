"""The default rule of the monitor: equal copies of anything, and copies whose numbers change.

1. The exact repetition that reaches the last token is followed (`TailRepetition`), and the one that is exact if all
   numbers are taken as equal (`CounterRepetition`).
2. An exact one counts from 64 tokens beyond its first two copies on, one of numbers from 12 copies and 256 tokens on,
   or 64 tokens in lists, whose copies are short, unless the prompt asked for as many copies. A list of equal short
   answers may be right for what was asked: it is only reported where the prompt is unknown, or may ask for as many.
3. What it repeats is prose, data or a table (`kind_of`), judged by the copies alone. Data and tables may be honest:
   until there are 512 tokens of equal copies, and as long as numbers change, they are only reported. Tables count, too,
   and so do records whose numbers follow no rule: theirs are not.
4. A guard has a limit beside these (`most_copies`), because a model that writes as many copies has lost its way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Annotated, ClassVar, Literal

from pydantic import Field, Strict, StrictFloat, StrictInt

from sinkscope.files.records import Natural, Whole, check_fields
from sinkscope.loops.text.outputs import RUN
from sinkscope.loops.text.repetition import CounterRepetition, TailRepetition
from sinkscope.loops.text.signals import WINDOW, Step, Tail

Kind = Literal["prose", "data", "table"]
BYTES = 6  # of a text as UTF-8 that count as a token, unless a word is longer
CODE = frozenset("{}[]<>=;|\\@~^/+%$&_")
CODE_SHARE, NUMBER_SHARE = 0.12, 0.3  # of words that are such signs, or numbers, in data
GOES_ON, COUNTED = 0.7, 512  # share of the numbers of a counter in data, among the last tokens
SHORT_LINE = 8  # words of a line of data that does not end as a sentence does
_ENDS = frozenset(".!?,;:…'\"”’»)。！？，、；：")
ITEM = 12  # tokens of a short item
BEFORE_NUMBER, AFTER_NUMBER = frozenset("([#"), frozenset(".):]-–")
"""Signs that belong to the number of an item, whatever its form."""
CELL_SIGNS = frozenset(",;:|")
"""Signs before a number that is a value or a cell, and no number of an item."""
LONG, REPORTED = 64, 128  # periods from which on two copies are followed, and reported
LIMIT_TOKENS = 100  # of `most_copies`
AFTER_ACT = 3  # copies that are a loop in a row in which a guard has acted
KIND_TOKENS = 48  # the kind of a short piece is judged on its last 48 tokens
WordsOf = Callable[[Sequence[int]], Sequence[str]]
CopyCount = Annotated[StrictInt | StrictFloat, Field(ge=2)]


@dataclass(frozen=True)
class MonitorSettings:
    """Settings of the default rule, which looks for copies; `PaperSettings` has those of the paper's rule.

    Attributes:
        window: Number of tokens within which a loop that goes on is reported once (W).
        warmup: First step that may trigger.
        cooldown: Number of steps after a trigger in which no other may follow.
        tail_repeats: Number of copies in a repetition whose period is below 64. Two copies may be a quotation. With
            fewer than three, some cycles are found later.
        tail_shortest: Minimum tokens of a repetition, at least 6.
        tail_longest: Largest period.
        tail_beyond: Number of tokens that a repetition needs beyond its first two copies. Short pieces, which honest
            texts repeat, then need more copies: a piece of one token 66, one of 64 tokens three. Two copies of
            128 tokens and more are reported without it.
        data_tokens: Number of tokens that equal copies need in all if they are data: tables, code, markup or logs.
        most_copies: Number of equal copies, with at least 100 tokens in all, that are a loop whatever they are; None:
            data may have any number.
        counter_copies: Number of copies of a repetition whose numbers change.
        counter_tokens: Minimum tokens of such a repetition.
        item_tokens: Minimum tokens of such a repetition whose copies are items of a list, up to 12 tokens.
    """

    rule: ClassVar[str] = "repeats"

    window: Natural = WINDOW
    warmup: Whole = 0
    cooldown: Whole = 32
    tail_repeats: CopyCount = 3
    tail_shortest: Annotated[int, Strict(), Field(ge=6)] = 48
    tail_longest: Natural = 2048
    tail_beyond: Whole = 64
    data_tokens: Natural = 512
    most_copies: Natural | None = None
    counter_copies: Annotated[int, Strict(), Field(ge=2)] = 12
    counter_tokens: Natural = 256
    item_tokens: Natural = 64

    def __post_init__(self) -> None:
        check_fields(self)

    def new_rule(self, words_of: WordsOf | None = None, asked: int = 0, asked_items: float = inf) -> CopyRule:
        """Return the rule for one row; the arguments are those of `Monitor`."""
        return CopyRule(self, words_of, asked, asked_items)


class CopyRule:
    """Finds copies; `add` takes every token.

    Args:
        settings: Settings of the rule.
        words_of: Gives the words of the last token, or of the last tokens, as `outputs.split` makes them. Without it
            all text is prose without numbers.
        asked: Number of copies that the prompt asks for, which are no loop.
        asked_items: Number of items of a list that the prompt may ask for, which are at most reported.

    Attributes:
        looped: Whether a guard has acted on the row, where three copies are then a loop.
    """

    def __init__(
        self, settings: MonitorSettings, words_of: WordsOf | None = None, asked: int = 0, asked_items: float = inf
    ) -> None:
        s = self.settings = settings
        self.words_of = words_of
        self.asked = asked
        self.asked_items = asked_items
        self.looped = False
        self._tail = TailRepetition(s.tail_longest, s.tail_repeats, s.tail_shortest, two_from=LONG)
        least = min(s.counter_tokens, s.item_tokens)
        self._counter = CounterRepetition(s.tail_longest, s.counter_copies, least)
        self._seen = 0
        self._size = 0
        longest = 3 * s.tail_longest + s.tail_beyond + s.data_tokens  # what is longer needs no measuring
        self._sizes: deque[int] = deque([0], maxlen=longest)  # of the row up to each of the last tokens
        self._list = -1, False  # the start of the last short repetition with numbers, and whether it is a list
        self._kinds: dict[bool, tuple[int, Kind]] = {}  # of the exact repetition, and of the other: its start and kind

    def is_number(self, token: int) -> bool:
        """Return whether a token is a number or a part of one."""
        words = () if self.words_of is None else self.words_of([token])
        return bool(words) and all(map(str.isdigit, words))

    def add(self, token: int, p_max: float | None = None) -> Step:
        """Take the next token; return the repetition that reaches it, if there is one that counts."""
        self._seen += 1
        words = () if self.words_of is None else self.words_of([token])
        self._size += max(1, sum(map(size_of, words)))
        self._sizes.append(self._size)
        exact = self._tail.add(token)
        counter: Tail | None = None
        if self.words_of is not None:
            counter = self._counter.add(token, self.is_number(token), words == [" "])
        step = Step()
        if exact is not None:
            step = self._of_equal_copies(exact)
        if step.tail is None and counter is not None:
            step = self._of_a_counter(counter)
        if step.tail is not None and step.tail.repeats <= self.asked:
            return Step()
        return step

    def _of_equal_copies(self, tail: Tail) -> Step:
        s = self.settings
        tokens = self._seen - tail.start
        covered, copy = self._size_of_last(tokens), self._size_of_last(tail.period)
        if s.most_copies is not None and tail.repeats >= s.most_copies and tokens >= LIMIT_TOKENS:
            return Step(tail=tail, trigger=True)
        is_enough = covered >= 2 * copy + s.tail_beyond or (self.looped and tail.repeats >= AFTER_ACT)
        if not is_enough:
            return Step(tail=tail, suspect=True) if tail.period >= REPORTED else Step()
        is_loop = covered >= max(s.data_tokens, 3 * copy) or self._kind_of(tail) == "prose"
        return Step(tail=tail, trigger=is_loop, suspect=not is_loop)

    def _of_a_counter(self, tail: Tail) -> Step:
        kind = self._kind_of(tail)
        is_short = tail.period <= ITEM
        is_list = is_short and self._has_number(tail.period) and self._is_list(tail)
        if self._seen - tail.start < self.settings.counter_tokens and not is_list:
            return Step()
        if kind == "table" and not is_list:
            return Step()
        is_loop = kind == "prose" or is_list
        if is_short and tail.repeats <= self.asked_items:
            is_loop = False
        return Step(tail=tail, trigger=is_loop, suspect=not is_loop)

    def _is_list(self, tail: Tail) -> bool:
        """Whether the last copies are items of a list, in words; it is asked once of a repetition."""
        if self._list[0] != tail.start:
            words = [] if self.words_of is None else self.words_of(self._tail.last(2 * tail.period))
            self._list = tail.start, is_item(words, copies=2)
        return self._list[1]

    def _has_number(self, count: int) -> bool:
        """Whether one of the last tokens is a number."""
        return self.words_of is not None and any(word.isdigit() for word in self.words_of(self._tail.last(count)))

    def _size_of_last(self, count: int) -> int:
        """Size of the last tokens; of more than are remembered, some size above all thresholds."""
        return self._size - self._sizes[max(0, len(self._sizes) - 1 - count)]

    def _kind_of(self, tail: Tail) -> Kind:
        """What the last copies are: two, or as many as fill some lines. It is asked once of a repetition."""
        if self.words_of is None:
            return "prose"
        start, kind = self._kinds.get(tail.exact, (-1, "prose"))
        if start != tail.start:
            tokens = self._seen - tail.start
            copies = min(max(2, -(-KIND_TOKENS // tail.period)), max(1, tokens // tail.period))
            words = self.words_of(self._tail.last(copies * tail.period))
            kind = kind_of([*words, *words[:2]])
            if kind == "data" and not tail.exact and not count_on(self.words_of(self._tail.last(min(tokens, COUNTED)))):
                kind = "table"
            self._kinds[tail.exact] = tail.start, kind
        return kind


def size_of(word: str) -> int:
    """Return the size of a word in tokens: a number counts its digits, any other word one token for each 6 bytes."""
    if word.isdigit():
        return len(word)
    return max(1, len(word.encode("utf-8", "replace")) // BYTES)


def kind_of(words: Sequence[str]) -> Kind:
    """Return what repeated words are: whole copies, which may begin anywhere, and their first two words again."""
    visible = [word for word in words if not word.isspace()]
    if not visible:
        return "prose"
    if is_tabular(words):
        return "table"
    rules = sum(len(word) >= RUN and is_rule(word) for word in visible)
    if all(map(is_rule, visible)) or 2 * rules >= len(visible):
        return "data"  # rules, boxes, empty cells, and the dots of a table of contents
    codes = numbers = 0
    for place, word in enumerate(visible):
        codes += _is_code(visible, place)
        numbers += word.isdigit() and not _is_marker(visible, place)
    if codes >= CODE_SHARE * len(visible) or numbers >= NUMBER_SHARE * len(visible):
        return "data"
    return "data" if _has_short_lines(words) else "prose"


def is_item(words: Sequence[str], copies: int) -> bool:
    """Return whether repeated words are items of a list in words: letters, one number each, and no signs of code.

    The number may have any form: "9.", "(9)", "[9]", "#9", "Q9:", "Line 9 -"; but a value or a cell is none: "A: 10",
    "A,1,free".
    """
    visible = [word for word in words if word != " "]
    rest: list[str] = []
    numbers = 0
    for place, word in enumerate(visible):
        before = visible[place - 1] if place else ""
        after = visible[place + 1] if place + 1 < len(visible) else ""
        if word.isdigit():
            numbers += 1
            is_marker = before not in CELL_SIGNS and (after in AFTER_NUMBER or after[:1].isalpha())
            if not is_marker and place + 1 < len(visible):  # the words may end within an item
                return False
            continue
        is_sign = (before.isdigit() and word in AFTER_NUMBER) or (after.isdigit() and word in BEFORE_NUMBER)
        if word != "\n" and not is_sign:
            rest.append(word)
    has_code = any(_is_code(rest, place) for place in range(len(rest)))
    return numbers <= copies and not has_code and any(word[0].isalpha() for word in rest)


def _is_code(words: Sequence[str], place: int) -> bool:
    """Whether a word has a sign of code, or ends the key of a record or opens the call of a function."""
    return not CODE.isdisjoint(words[place]) or "".join(words[place : place + 2]) in ('":', "()")


def count_on(words: Sequence[str]) -> bool:
    """Return whether most numbers of a text go on by equal steps, each beside those one and two copies before."""
    numbers = [int(word) for word in words if word.isdecimal()]  # "²" is a digit, and no number
    for apart in range(1, len(numbers) // 3):
        going_on = 0
        for place in range(2 * apart, len(numbers)):
            before, first = numbers[place - apart], numbers[place - 2 * apart]
            going_on += numbers[place] - before == before - first
        if going_on >= GOES_ON * (len(numbers) - 2 * apart):
            return True
    return False


def is_rule(word: str) -> bool:
    """Return whether a word is made of signs as rules and boxes are: no letters or digits, no emoji, no "!" or "?"."""
    return not any(
        letter.isalnum() or letter in "!?！？。" or "\u2600" <= letter <= "\u27bf" or letter >= "\U0001f000"
        for letter in word
    )


def _is_marker(words: Sequence[str], place: int) -> bool:
    """Whether a number marks an item of a list: "9. Grapefruit", "(3) lamp"."""
    next_two = [*words[place + 1 : place + 3], "", ""]
    return next_two[0] in (".", ")") and next_two[1][:1].isalpha()


def is_tabular(words: Sequence[str]) -> bool:
    """Return whether repeated words may be a table: numbers, single letters and signs, and the keys of JSON."""
    is_table = False
    for place, word in enumerate(words[:-2]):
        is_name = word[0].isalpha() and len(word) > 1
        is_sign = word[0].isascii() and len(word) < RUN and not is_name
        is_key = [*words[place + 1 : place + 3]] == ['"', ":"]
        is_cell = word.isdigit() or is_sign or word == "x"
        if word == " " or not (is_cell or is_key):
            return False
        is_table = is_table or word.isalnum() or word == "\n"
    return is_table


def _has_short_lines(words: Sequence[str]) -> bool:
    """Whether most whole lines are short and end as no sentence does; items of a numbered list are sentences."""
    lines: list[list[str]] = [[]]
    for word in words:
        if word == "\n":
            lines.append([])
        else:
            lines[-1].append(word)
    complete = [line for line in lines[1:-1] if line]
    short = 0
    for line in complete:
        is_item = line[0].isdigit() and _is_marker(line, 0)
        short += len(line) <= SHORT_LINE and line[-1][0] not in _ENDS and not is_item
    return 2 * short > len(complete)
