"""An online tracker of exact repetition: which stretch of any period reaches the last token."""

from __future__ import annotations

from sinkscope.loops.text.signals import Tail


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
