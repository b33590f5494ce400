"""The default rule of the monitor: equal copies of anything, and copies whose numbers change.

1. The exact repetition that reaches the last token is followed (`TailRepetition`), and the one that is exact if all
   numbers are taken as equal (`CounterRepetition`).
2. An exact one counts from three copies and 64 tokens beyond the first two on, one of numbers from 12 copies and 256
   tokens on, unless the prompt asked for as many copies.
3. What it repeats is prose, data or a table (`kind_of`). Data and tables may be honest: until there are 512 tokens of
   equal copies, and as long as numbers change, they are only reported. Tables count, too: theirs are not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from sinkscope.loops.text.counters import CounterRepetition
from sinkscope.loops.text.kinds import Kind, kind_of, size_of
from sinkscope.loops.text.repetition import TailRepetition
from sinkscope.loops.text.settings import MonitorSettings
from sinkscope.loops.text.signals import Tail

KIND_TOKENS = 48  # by which it is seen what a short piece is
WordsOf = Callable[[Sequence[int]], Sequence[str]]


class Found(NamedTuple):
    """A repetition that reaches the last token.

    Attributes:
        tail: The repetition.
        cut: Whether it is a loop; else it may be honest.
    """

    tail: Tail
    cut: bool


class CopyRule:
    """Finds copies; `add` takes every token.

    Args:
        settings: Settings of the rule.
        words_of: Gives the words of the last token, or of the last tokens, as `outputs.split` makes them. Without it
            all text is prose without numbers.
        asked: Number of copies that the prompt asks for, which are no loop.

    Attributes:
        looped: Whether a guard has acted on the row, which then needs none beyond the copies.
    """

    def __init__(self, settings: MonitorSettings, words_of: WordsOf | None = None, asked: int = 0) -> None:
        s = self.settings = settings
        self.words_of = words_of
        self.asked = asked
        self.looped = False
        self._tail = TailRepetition(s.tail_longest, s.tail_repeats, s.tail_shortest)
        self._counter = CounterRepetition(s.tail_longest, s.counter_copies, s.counter_tokens)
        self._seen = 0
        self._size = 0
        longest = 3 * s.tail_longest + s.tail_beyond + s.data_tokens  # what is longer needs no measuring
        self._sizes: deque[int] = deque([0], maxlen=longest)  # of the row up to each of the last tokens
        self._kind: tuple[int, bool, Kind] = (-1, False, "prose")  # of the repetition that starts there

    def is_number(self, token: int) -> bool:
        """Return whether a token is a number or a part of one."""
        words = () if self.words_of is None else self.words_of([token])
        return bool(words) and all(word.isdigit() for word in words)

    def add(self, token: int) -> Found | None:
        """Take the next token; return the repetition that reaches it and counts, if there is one."""
        self._seen += 1
        self._size += 1 if self.words_of is None else max(1, sum(map(size_of, self.words_of([token]))))
        self._sizes.append(self._size)
        exact = self._tail.add(token)
        counter: Tail | None = None
        if self.words_of is not None:
            counter = self._counter.add(token, self.is_number(token))
        found: Found | None = None
        if exact is not None:
            found = self._of_equal_copies(exact)
        if found is None and counter is not None:
            found = self._of_a_counter(counter)
        if found is not None and found.tail.repeats <= self.asked:
            return None
        return found

    def _of_equal_copies(self, tail: Tail) -> Found | None:
        s = self.settings
        covered, copy = self._size_of_last(self._seen - tail.start), self._size_of_last(tail.period)
        if covered < 2 * copy + s.tail_beyond and not self.looped:
            return None
        cut = covered >= max(s.data_tokens, 3 * copy) or self._kind_of(tail) == "prose"
        return Found(tail, cut and s.cut != "none")

    def _of_a_counter(self, tail: Tail) -> Found | None:
        kind = self._kind_of(tail)
        if kind == "table":
            return None
        return Found(tail, self.settings.cut == "all" or (self.settings.cut == "auto" and kind == "prose"))

    def _size_of_last(self, count: int) -> int:
        """Number of tokens as which the last ones count; if they are more than matter, some number above that."""
        return self._size - self._sizes[max(0, len(self._sizes) - 1 - count)]

    def _kind_of(self, tail: Tail) -> Kind:
        """What the last copies are: two, or as many as fill some lines."""
        if self.words_of is None:
            return "prose"
        start, exact, kind = self._kind
        if (start, exact) != (tail.start, tail.exact):
            count = min(max(2 * tail.period, KIND_TOKENS), self._seen - tail.start)
            kind = kind_of(self.words_of(self._tail.last(count + 2)))
            self._kind = (tail.start, tail.exact, kind)
        return kind
