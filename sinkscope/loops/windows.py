"""What the signals keep of the last tokens so that a new one costs the same however many came before."""

from __future__ import annotations

from collections import deque


class Types:
    """Type-token ratio of the last `window` tokens."""

    def __init__(self, window: int) -> None:
        self.window = window
        self.tokens: deque[int] = deque()
        self._counts: dict[int, int] = {}

    def add(self, token: int) -> float:
        """Take one token; the ratio with it."""
        counts, tokens = self._counts, self.tokens
        tokens.append(token)
        counts[token] = counts.get(token, 0) + 1
        if len(tokens) > self.window:
            gone = tokens.popleft()
            if counts[gone] == 1:
                del counts[gone]
            else:
                counts[gone] -= 1
        return len(counts) / len(tokens)


class Novelty:
    """Share of the last `span` tokens whose n-gram was new to the window (see `signals.novelty`)."""

    def __init__(self, window: int, n: int, span: int) -> None:
        self._reach, self._n, self._span = window - n, n, span  # an n-gram fits window - n times before the last one
        self._gram: deque[int] = deque(maxlen=n)
        self._last: dict[tuple[int, ...], int] = {}  # n-gram -> where it ended last
        self._ends: deque[tuple[int, ...]] = deque()  # those of the last `reach` positions, oldest first
        self._flags: deque[bool] = deque()
        self._new = 0

    def add(self, token: int, position: int) -> float:
        """Take the token at `position`; the share with it."""
        self._gram.append(token)
        new = True
        if len(self._gram) == self._n:
            new = self._seen(tuple(self._gram), position)
        self._flags.append(new)
        self._new += new
        if len(self._flags) > self._span:
            self._new -= self._flags.popleft()
        return self._new / len(self._flags)

    def _seen(self, gram: tuple[int, ...], position: int) -> bool:
        new = gram not in self._last
        self._last[gram] = position
        self._ends.append(gram)
        if len(self._ends) > self._reach:
            oldest = self._ends.popleft()
            if self._last[oldest] == position - self._reach:
                del self._last[oldest]
        return new


class Runs:
    """For every period up to `longest`: how many tokens up to now equal the one a period before."""

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._recent: deque[int] = deque()
        self._where: dict[int, deque[int]] = {}  # token -> its positions among the recent ones, oldest first
        self._since: dict[int, int] = {}  # period -> first position of the run

    def add(self, token: int, position: int, repeats: int | float, shortest: int) -> tuple[int, int] | None:
        """Take the token at `position`; period and first position of the repetition that covers most, if any does."""
        where = self._where.get(token)
        since: dict[int, int] = {}
        best, found = 0, None
        if where:
            for earlier in reversed(where):  # smallest period first; a period without this token has ended
                period = position - earlier
                first = since[period] = self._since.get(period, position)
                covered = position - first + 1 + period
                if covered > best and covered >= repeats * period and covered >= shortest:
                    best, found = covered, (period, first - period)
            where.append(position)
        else:
            self._where[token] = deque((position,))
        self._since = since
        self._recent.append(token)
        if len(self._recent) > self._longest:
            gone = self._where[oldest := self._recent.popleft()]
            gone.popleft()
            if not gone:
                del self._where[oldest]
        return found
