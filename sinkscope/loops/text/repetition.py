"""Online trackers of repetition: which stretch of any period reaches the last token, in constant time per token."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from sinkscope.loops.text.signals import Tail

_MODULUS = (1 << 29) - 3  # of the hashes: a prime, and small numbers are fast; every match is verified anyway
_BASE = 0x2545F4914F6CDD1D % _MODULUS
_CREDIT = 2.0  # mismatches that may follow each other; those of a repetition earn it back at the rate of `noise`


@dataclass(slots=True)
class _Run:
    """Tokens up to now that equal the one a period before, but for a few.

    Attributes:
        first: First position that is compared.
        clean: First position after the last mismatch.
        mismatches: Their number.
        credit: How many may still follow each other.
        recent_mismatches: Position of each mismatch of the last period, and whether the token was replaced there.
    """

    first: int
    clean: int
    mismatches: int = 0
    credit: float = _CREDIT
    recent_mismatches: deque[tuple[int, bool]] = field(default_factory=deque)


class _Level(NamedTuple):
    """Stretches of one length that are looked up.

    Attributes:
        length: Tokens of a stretch.
        mask: A stretch is stored at positions that have none of these bits.
        power: Factor of its first token in the hash.
    """

    length: int
    mask: int
    power: int


def _levels(longest: int) -> list[_Level]:
    """Lengths 4, 6, 8, 12, 16, ...; each is stored at a multiple of the positions at which the one before is."""
    length, every = 4, 1
    levels: list[_Level] = []
    while not levels or levels[-1].length < longest - 1:
        levels.append(_Level(length, every - 1, pow(_BASE, length, _MODULUS)))
        length += 1 << length.bit_length() - 2
        every = 1 << length.bit_length() - 2
    return levels


class NearRepetition:
    """Finds the repetition of any period up to `longest` that reaches the last token, allowing a few replaced tokens.

    The last n tokens are looked up among earlier ones for n = 4, 6, 8, 12, 16, ..., and the distance to the nearest
    equal stretch becomes a period that is tracked from then on. Stretches of n tokens are stored at about every (n/2)th
    position, and a longer stretch is looked up only if the shorter one was found. A token therefore costs only a few
    lookups, regardless of how many came before. A cycle of P tokens differs from all its rotations in any P - 1 tokens,
    so three exact copies are found at their last token, whatever the cycle contains.

    A token that differs from the one a period before is a mismatch. It is tolerated if the share of mismatches is at
    most `noise` and the original token is back a period later. A position that changes in every copy, as in a list that
    counts up, ends the repetition unless `counting`.

    Args:
        longest: Largest period.
        repeats: Required number of copies, at least 3, or 2 without noise.
        shortest: Required number of tokens, at least 12, or 8 without noise.
        noise: Largest share of mismatches; 0 requires exact repetition.
        exact: Required number of copies if they are exact, at least 2. With fewer than 3, a cycle
            that resembles a shifted copy of itself may be found later, but at the third copy at the latest.
        counting: Whether a position may change in every copy.
    """

    def __init__(
        self,
        longest: int,
        repeats: int | float,
        shortest: int,
        noise: float,
        exact: int | float = 3,
        counting: bool = False,
    ) -> None:
        self._counting = counting
        self._longest = longest
        self._repeats = repeats
        self._exact_repeats = exact
        self._shortest = shortest
        self._noise = noise
        self._levels = _levels(longest)
        self._history = 3 * longest + 8  # tokens that are kept
        self._ids: list[int] = []
        self._hashes = [0]  # of everything up to a token; those of stretches are differences
        self._ends: dict[int, int] = {}  # hash of a stretch -> where it ended last
        self._older_ends: dict[int, int] = {}
        self._runs: dict[int, _Run] = {}  # by period
        self._exact_period = 0  # of the repetition that reached the last token; 0: none did
        self._exact_start = 0  # of its exact part

    def add(self, token: int, position: int) -> Tail | None:
        """Add the token at `position`; return the repetition that covers most, if any."""
        ids, hashes = self._ids, self._hashes
        ids.append(token)
        hashes.append((hashes[-1] * _BASE + token + 1) % _MODULUS)
        self._look_up(position)
        tail: Tail | None = None
        if self._runs:
            tail = self._longest_run(token, position)
        else:
            self._exact_period = 0
        if len(ids) > 2 * self._history:
            del ids[: -self._history]
            del hashes[: -self._history]
        return tail

    def _longest_run(self, token: int, position: int) -> Tail | None:
        """Prolong the runs or end them; of those that are long enough, the repetition that covers most."""
        tail: Tail | None = None
        ended: list[int] = []
        for period, run in self._runs.items():
            if self._ids[~period] != token:
                if not self._tolerated(run, period, token, position):
                    ended.append(period)
                continue
            start = self._start(run, period, position)
            if start is not None and (tail is None or (start, period) < (tail.start, tail.period)):
                tail = Tail(period, start, (position + 1 - start) / period)
        self._exact_period = 0
        if tail is not None:
            clean = self._runs[tail.period].clean
            self._exact_period = tail.period
            self._exact_start = clean - tail.period
            for period, run in self._runs.items():  # a multiple of the period says nothing beside it
                if period > tail.period and period % tail.period == 0 and run.clean >= clean:
                    ended.append(period)
        for period in ended:
            self._runs.pop(period, None)
        return tail

    def _start(self, run: _Run, period: int, position: int) -> int | None:
        """Where the repetition of a run begins; None while it does not cover enough."""
        compared = position - run.first + 1
        near = run.mismatches <= self._noise * compared
        if near and compared + period >= max(self._repeats * period, self._shortest):
            return run.first - period
        start = run.clean - period
        if position - start + 1 >= max(self._exact_repeats * period, self._shortest):
            return start
        return None

    def _look_up(self, position: int) -> None:
        """Find the nearest stretches that equal the last tokens, follow their periods, and store these stretches."""
        period = self._exact_period
        covered = 0
        if period:
            covered = position - self._exact_start
        hashes, ends = self._hashes, self._ends
        last = hashes[-1]
        looking = True
        for length, mask, power in self._levels:
            store = not position & mask
            if length > position + 1 or not (looking or store):
                break
            stretch = (last - hashes[~length] * power) % _MODULUS
            if looking and period <= length <= covered - period:  # it recurs: only longer ones say something new
                looking = covered - period < self._levels[-1].length
            elif looking:
                end = ends.get(stretch)
                if end is None:
                    end = self._older_ends.get(stretch)
                looking = end is not None
                if end is not None:
                    distance = position - end
                    in_exact = period and distance % period == 0 and distance + length <= covered
                    if distance <= self._longest and distance not in self._runs and not in_exact:
                        self._follow(distance, position)
            if store:
                ends[stretch] = position
        if position % self._longest == 0:
            self._older_ends = ends
            self._ends = {}

    def _follow(self, period: int, position: int) -> None:
        ids = self._ids
        equal = 0
        most = len(ids) - period
        while equal < most and ids[~equal] == ids[~equal - period]:
            equal += 1
        if equal > 3:
            first = position - equal + 1
            self._runs[period] = _Run(first, first)

    def _tolerated(self, run: _Run, period: int, token: int, position: int) -> bool:
        """Note a mismatch; whether the run goes on."""
        if not self._noise:
            return False
        run.credit = min(_CREDIT, run.credit + self._noise * (position - run.clean))
        run.clean = position + 1
        recent = run.recent_mismatches
        while recent and recent[0][0] < position - period:
            recent.popleft()
        same_place = bool(recent) and recent[0][0] == position - period
        if same_place and not self._counting:
            was_replaced = recent[0][1]
            original_is_back = self._ids[~(2 * period)] == token
            recent.append((position, False))
            return was_replaced and original_is_back  # otherwise this place changes in every copy
        recent.append((position, True))
        run.mismatches += 1
        run.credit -= 1
        return run.credit >= 0
