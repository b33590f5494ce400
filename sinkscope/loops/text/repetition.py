"""Trackers of the repetition up to the last token, exact or with changing numbers; and what a prompt asks for."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from math import inf

from sinkscope.loops.text.signals import Tail

NUMBER = -1  # stands for one or several tokens of numbers in a row
_WORDS = "two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen".split()
_NUMBERS = {
    **{word: number for number, word in enumerate(_WORDS, 2)},
    **{"dozen": 12, "twenty": 20, "thirty": 30, "forty": 40, "fifty": 50, "hundred": 100, "thousand": 1000},
}
_THINGS = "copies|lines|rows|repetitions|repeats|verses|cells|entries|zeros|ones|bars"
_WHICH = "(?:(?:identical|equal|more|empty|blank|short|long|new|the same) )?"  # "12 identical lines"
_GIVEN = "the|these|those|my|our|your|its|all|has|have|had|was|were|contains|every|each"  # what exists
_WRITTEN = r"words?|sentences?|phrases?|lines?|letters?|texts?|names?|strings?|following|same|numbers?(?!\s+of)"
_UNITS = "second|minute|hour|day|night|week|month|year"
_COMPARED = (  # what makes "10 times" a comparison or a frequency: "10 times the price", not "10 times the word"
    r"(?!(?:under|after|over|her|another|together)\b)\w+er|more|less|worse|what|an?|as\s+(?!(?:an?|if)\b)\w+|daily|weekly"
    rf"|the\s+(?!(?:{_WRITTEN})\b)\w+|that\s+(?:of|much|many|number|amount|size|value)|that(?=[.,;?!]|$)"
    rf"|(?:per|each|every)\s+(?:{_UNITS})"
)
_REQUEST = re.compile(
    rf"(?:\b(?P<given>{_GIVEN})\s+)?\b(?P<number>\d{{1,3}}(?:,\d{{3}})+|\d{{1,6}}|{'|'.join(_NUMBERS)})\s+{_WHICH}"
    rf"(?:times\b(?!\s+(?:{_COMPARED})\b)|(?:{_THINGS})\b)",
    re.IGNORECASE,
)
_NUMBER = re.compile(rf"\b(?:\d,\d{{3}}|\d{{1,4}}|{'|'.join(_NUMBERS)})\b", re.IGNORECASE)


class TailRepetition:
    """Finds the exact repetition of any period up to `longest` that reaches the last token.

    The last tokens, half as many as the shortest repetition has, are looked up among the earlier ones. The distance to
    the nearest equal stretch becomes a period, which is followed until a token differs. Three copies are found at the
    last token that they need if some stretch of that length occurs once in a copy. This is so for every period up to
    `shortest` + 1, because a cycle has more different stretches the longer they are (Morse and Hedlund).

    Args:
        longest: Largest period.
        repeats: Required number of copies, at least 2.
        shortest: Required number of tokens, at least 4.
        two_from: Period from which on two copies are enough.
    """

    def __init__(self, longest: int, repeats: int | float, shortest: int, two_from: float = inf) -> None:
        self._longest = longest
        self._repeats = repeats
        self._two_from = two_from
        self._shortest = shortest
        self._length = shortest // 2
        self._seen = 0
        self._ids: list[int] = []  # the last ones
        self._ends: dict[int, int] = {}  # hash of a stretch -> tokens up to its last end, the oldest first
        self._starts: dict[int, int] = {}  # period -> first position of the first copy

    def add(self, token: int) -> Tail | None:
        """Add a token; return the repetition that covers most, if any, and of equals the shortest."""
        ids = self._ids
        ids.append(token)
        self._seen += 1
        if self._starts:
            for period in list(self._starts):
                if ids[~period] != token:
                    del self._starts[period]
        self._look_up()
        if len(ids) > 4 * self._longest + 2 * self._length:
            del ids[: -2 * self._longest - self._length]
        best: Tail | None = None
        for period, start in self._starts.items():
            covered = self._seen - start
            repeats = self._repeats if period < self._two_from else 2
            if covered < self._shortest or covered < repeats * period:
                continue
            if best is None or (start, period) < (best.start, best.period):
                best = Tail(period, start, covered / period)
        return best

    def last(self, count: int) -> list[int]:
        """Return the last tokens."""
        return self._ids[-count:]

    def _look_up(self) -> None:
        """Find the nearest stretch that equals the last tokens, and follow its period."""
        ids, n_seen = self._ids, self._seen
        if n_seen < self._length:
            return
        stretch = hash(tuple(ids[-self._length :]))
        end = self._ends.pop(stretch, None)
        self._ends[stretch] = n_seen
        if len(self._ends) > self._longest:  # the oldest one is too far back
            del self._ends[next(iter(self._ends))]
        if end is None or n_seen - end > self._longest or n_seen - end in self._starts:
            return
        period = n_seen - end
        equal = copy_length(ids, len(ids) - period, len(ids))  # exact, also if only the hash is equal
        self._starts[period] = n_seen - equal - period


class CounterRepetition:
    """Finds the repetition that reaches the last token if all numbers are taken as equal.

    Args:
        longest: Largest period, in tokens where a number is one.
        copies: Required number of copies, at least 2.
        tokens: Required number of tokens, with all tokens of the numbers.
    """

    def __init__(self, longest: int, copies: int, tokens: int) -> None:
        self._tokens = tokens
        self._masked = TailRepetition(longest, copies, 2 * copies)
        self._places: deque[int] = deque(maxlen=4 * longest)  # of the last masked tokens
        self._count = 0
        self._seen = 0
        self._last = 0
        self._begun = -1, -1  # the masked and the real position of the first token of the latest repetition

    def add(self, token: int, is_number: bool, is_gap: bool = False) -> Tail | None:
        """Add a token; return the repetition, if there is one. Indentation, which may grow, is no part of it."""
        place = self._seen
        self._seen += 1
        if is_gap:
            return None
        masked = NUMBER if is_number else token
        if masked == NUMBER == self._last:
            return None
        self._last = masked
        self._places.append(place)
        self._count += 1
        tail = self._masked.add(masked)
        if tail is None:
            return None
        if tail.start != self._begun[0]:
            self._begun = tail.start, self._places[max(0, tail.start - self._count + len(self._places))]
        start = self._begun[1]
        if self._seen - start < self._tokens or tail.period >= len(self._places):
            return None
        return Tail(place - self._places[-1 - tail.period], start, tail.repeats, exact=False)


def asked_copies(prompt: str) -> int:
    """Return the largest number of repetitions that an English prompt asks for, such as "40 times"; else 0.

    Comparisons ("1000 times faster"), frequencies ("3 times a day") and what exists ("the 500 lines") ask for none.
    """
    most = 0
    for request in _REQUEST.finditer(prompt):
        if request["given"] is None:
            number = request["number"]
            most = max(most, _NUMBERS.get(number.lower()) or int(number.replace(",", "")))
    return most


def asked_items(prompt: str) -> float:
    """Return how many items of a list a prompt may ask for: its largest number below 10,000, or its number of lines.

    "Classify these 60 reviews" asks for 60, and so do 60 lines. A prompt that is empty is unknown, and may ask for any.
    """
    if not prompt.strip():
        return inf
    most = sum(not line.isspace() for line in prompt.splitlines())
    for match in _NUMBER.finditer(prompt):
        most = max(most, _NUMBERS.get(match[0].lower()) or int(match[0].replace(",", "")))
    return most


class EarlierCopies:
    """Finds where the last tokens of a row stand earlier; a token costs the work of these copies, and not of the row.

    Args:
        shortest: Tokens of the shortest copy.
        is_number: Says which tokens are numbers, if these count as equal.
    """

    def __init__(self, shortest: int, is_number: Callable[[int], bool] | None = None) -> None:
        self._shortest = shortest
        self._is_number = is_number
        self._row: list[int] = []
        self._places: dict[tuple[int, ...], list[int]] = {}  # last tokens -> places behind them, ascending
        self._lengths: dict[int, int] = {}  # place behind a copy -> its length, when the row had `_measured` tokens
        self._measured = 0

    def follow(self, ids: Sequence[int]) -> None:
        """Read what is new at the end of a row."""
        for token in ids[len(self._row) :]:
            is_number = self._is_number is not None and self._is_number(token)
            self._row.append(NUMBER if is_number else token)
            self._places_of_end().append(len(self._row))

    def take_back(self, length: int) -> None:
        """Forget all but the first tokens."""
        while len(self._row) > length:
            self._places_of_end().pop()
            self._row.pop()
        self._measured = 0

    def of_end(self, longest: int) -> Iterator[tuple[int, int]]:
        """Yield the place behind each earlier copy of the last tokens, and its length, which counts to `longest`."""
        if self._measured != len(self._row):
            self._measure()
        for place, length in self._lengths.items():
            yield place, min(length, longest)

    def _measure(self) -> None:
        """Find the lengths of all copies of the end; one token after the last time, each is that of before plus one."""
        places = self._places_of_end()[:-1]
        lengths: dict[int, int] = {}
        if self._measured == len(self._row) - 1:
            for place in places:
                lengths[place] = self._lengths.get(place - 1, self._shortest - 1) + 1
        elif places:
            common = common_beginnings(self._row[::-1])
            for place in places:
                lengths[place] = common[len(self._row) - place]
        self._lengths, self._measured = lengths, len(self._row)

    def _places_of_end(self) -> list[int]:
        """The places behind the last tokens; at the beginning of a row these are fewer, and equal no others."""
        return self._places.setdefault(tuple(self._row[-self._shortest :]), [])


def common_beginnings(ids: Sequence[int]) -> list[int]:
    """Return how many ids from each place on equal those from the first on: Z-values, in one pass.

    Of the place 0, which is the beginning itself, it is 0.
    """
    common = [0] * len(ids)
    begin, end = 0, 0  # of the found copy of the beginning that reaches furthest
    for place in range(1, len(ids)):
        length = 0
        if place < end:
            length = min(end - place, common[place - begin])
        while place + length < len(ids) and ids[length] == ids[place + length]:
            length += 1
        common[place] = length
        if place + length > end:
            begin, end = place, place + length
    return common


def copy_length(ids: Sequence[int], place: int, longest: int) -> int:
    """Return how many of the last ids stand before an earlier place as well, up to `longest`."""
    most = min(place, longest)
    length = 0
    while length < most and ids[place - 1 - length] == ids[~length]:
        length += 1
    return length
