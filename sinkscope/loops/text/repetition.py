"""An online tracker of exact repetition: which stretch of any period reaches the last token."""

from __future__ import annotations

from sinkscope.loops.text.signals import Tail

_MODULUS = (1 << 29) - 3  # of the hashes: a prime, and small numbers are fast; every match is verified anyway
_BASE = 0x2545F4914F6CDD1D % _MODULUS


class TailRepetition:
    """Finds the exact repetition of any period up to `longest` that reaches the last token.

    The last tokens, half as many as the shortest repetition has, are looked up by their hash among the earlier ones.
    The distance to the nearest equal stretch becomes a period, which is followed until a token differs. Three copies
    are found at the last token that they need if some stretch of that length occurs once in a copy. This is so for
    every period up to `shortest` + 1, because a cycle has more different stretches the longer they are (Morse and
    Hedlund).

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
        self._power = pow(_BASE, self._length, _MODULUS)
        self._ids: list[int] = []
        self._hashes: list[int] = []  # of the stretch that ends at each token
        self._hash = 0
        self._position = -1
        self._ends: dict[int, int] = {}  # hash of a stretch -> where it ended last
        self._starts: dict[int, int] = {}  # period -> first position of the first copy

    def add(self, token: int) -> Tail | None:
        """Add a token; return the repetition that covers most, if any, and of equals the shortest."""
        ids, length = self._ids, self._length
        self._position += 1
        position = self._position
        rolled = self._hash * _BASE + token + 1
        if position >= length:
            rolled -= (ids[-length] + 1) * self._power
        self._hash = rolled % _MODULUS
        ids.append(token)
        self._hashes.append(self._hash)
        if self._starts:
            for period in list(self._starts):
                if ids[~period] != token:
                    del self._starts[period]
        self._look_up(position)
        best: Tail | None = None
        for period, start in self._starts.items():
            covered = position + 1 - start
            if covered < self._shortest or covered < self._repeats * period:
                continue
            if best is None or (start, period) < (best.start, best.period):
                best = Tail(period, start, covered / period)
        if len(ids) > 4 * self._longest + 2 * length:
            del ids[: -2 * self._longest - length]
            del self._hashes[: -2 * self._longest - length]
        return best

    def last(self, count: int) -> list[int]:
        """The last tokens."""
        return self._ids[-count:]

    def _look_up(self, position: int) -> None:
        """Find the nearest stretch that equals the last tokens, and follow its period."""
        if position + 1 < self._length:
            return
        end = self._ends.get(self._hash)
        self._ends[self._hash] = position
        if position > self._longest:  # what is too far back is forgotten
            old = self._hashes[-self._longest - 2]
            if self._ends.get(old) == position - self._longest - 1:
                del self._ends[old]
        if end is None or position - end > self._longest or position - end in self._starts:
            return
        period = position - end
        ids = self._ids
        equal = 0
        most = len(ids) - period
        while equal < most and ids[~equal] == ids[~equal - period]:
            equal += 1
        if equal >= self._length:
            self._starts[period] = position - equal + 1 - period
