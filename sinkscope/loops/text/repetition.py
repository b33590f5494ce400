"""Trackers of the repetition up to the last token, exact or with changing numbers; and what a prompt asks for."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Sequence

from sinkscope.loops.text.signals import Tail

NUMBER = -1  # stands for one or several tokens of numbers in a row
_WORDS = "two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen".split()
_NUMBERS = {
    **{word: number for number, word in enumerate(_WORDS, 2)},
    **{"dozen": 12, "twenty": 20, "thirty": 30, "forty": 40, "fifty": 50, "hundred": 100},
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
    rf"(?:\b(?P<given>{_GIVEN})\s+)?\b(?P<number>\d{{1,4}}|{'|'.join(_NUMBERS)})\s+{_WHICH}"
    rf"(?:times\b(?!\s+(?:{_COMPARED})\b)|(?:{_THINGS})\b)",
    re.IGNORECASE,
)


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
    """

    def __init__(self, longest: int, repeats: int | float, shortest: int) -> None:
        self._longest = longest
        self._repeats = repeats
        self._shortest = shortest
        self._length = shortest // 2
        self._seen = 0
        self._ids: list[int] = []  # the last ones
        self._ends: dict[tuple[int, ...], int] = {}  # stretch -> number of tokens up to its last end, the oldest first
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
            if covered < self._shortest or covered < self._repeats * period:
                continue
            if best is None or (start, period) < (best.start, best.period):
                best = Tail(period, start, covered / period)
        return best

    def last(self, count: int) -> list[int]:
        """Return the last tokens."""
        return self._ids[-count:]

    def _look_up(self) -> None:
        """Find the nearest stretch that equals the last tokens, and follow its period."""
        ids, seen = self._ids, self._seen
        if seen < self._length:
            return
        stretch = tuple(ids[-self._length :])
        end = self._ends.pop(stretch, None)
        self._ends[stretch] = seen
        if len(self._ends) > self._longest:  # the oldest one is too far back
            del self._ends[next(iter(self._ends))]
        if end is None or seen - end > self._longest or seen - end in self._starts:
            return
        period = seen - end
        equal = 0
        most = len(ids) - period
        while equal < most and ids[~equal] == ids[~equal - period]:
            equal += 1
        self._starts[period] = seen - equal - period


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

    def add(self, token: int, is_number: bool) -> Tail | None:
        """Add a token; return the repetition, if there is one."""
        place = self._seen
        self._seen += 1
        masked = NUMBER if is_number else token
        if masked == NUMBER == self._last:
            return None
        self._last = masked
        self._places.append(place)
        self._count += 1
        tail = self._masked.add(masked)
        if tail is None:
            return None
        start = self._places[max(0, tail.start - self._count + len(self._places))]
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
            most = max(most, _NUMBERS.get(number.lower()) or int(number))
    return most


def earlier_copies(ids: Sequence[int], longest: int) -> Iterator[tuple[int, int]]:
    """Yield the place behind each earlier copy of the last ids, and the length of the copy, at most `longest`.

    Args:
        ids: The ids.
        longest: Largest length, from which on a copy is not compared.
    """
    for end, token in enumerate(ids[:-1]):
        if token != ids[-1]:
            continue
        length = 0
        while length < min(end + 1, longest) and ids[end - length] == ids[-1 - length]:
            length += 1
        if length:
            yield end + 1, length
