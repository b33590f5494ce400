"""Signals of repetition on plain token ids: diversity of an output, repetition at its end, and time of collapse.

Every function takes a sequence of token ids from any vocabulary and needs neither torch nor a tokenizer. Values that
are undefined, for example for an empty sequence, are NaN, which passes no threshold. Positions count from 0, steps
(tokens generated so far) from 1. LoopGuard, section 4.3, leaves some definitions open; `docs/measure/loops.md` gives
reasons.
"""

from __future__ import annotations

import math
import sys
import zlib
from array import array
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from sinkscope.errors import SinkscopeError


class Types:
    """Type-token ratio of the last `window` tokens."""

    def __init__(self, window: int) -> None:
        self.window = window
        self.tokens: deque[int] = deque()
        self._counts: dict[int, int] = {}

    def add(self, token: int) -> float:
        """Add one token and return the ratio including it."""
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
        """Add the token at `position` and return the share including it."""
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
    """For every period up to `longest`, counts how many tokens up to now equal the one a period before."""

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._recent: deque[int] = deque()
        self._where: dict[int, deque[int]] = {}  # token -> its positions among the recent ones, oldest first
        self._since: dict[int, int] = {}  # period -> first position of the run

    def add(self, token: int, position: int, repeats: int | float, shortest: int) -> tuple[int, int] | None:
        """Add the token at `position`; return period and first position of the repetition that covers most, if any."""
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


_MODULUS, _BASE = (1 << 61) - 1, 0x2545F4914F6CDD1D % ((1 << 61) - 1)  # of the hashes; every match is verified anyway


class _Run:
    """Tokens up to now that equal the one a period before, but for a few."""

    __slots__ = ("clean", "credit", "due", "first", "missed", "misses")

    def __init__(self, first: int, due: int) -> None:
        self.first = self.clean = first  # of the tokens that are compared; the first after the last mismatch
        self.due = due  # position from which they cover enough
        self.misses, self.credit = 0, Repeats.CREDIT
        self.missed: deque[tuple[int, bool]] = deque()  # mismatches of the last period; whether the token was replaced


class Repeats:
    """Finds the repetition of any period up to `longest` that reaches the last token, allowing a few replaced tokens.

    The last n tokens are looked up among earlier ones for n = 4, 6, 8, 12, 16, ..., and the distance to the nearest
    equal stretch becomes a period that is tracked from then on. Stretches of n tokens are stored at about every (n/2)th
    position, and a longer stretch is looked up only if the shorter one was found. A token therefore costs only a few
    lookups, regardless of how many came before. A cycle of P tokens differs from all its rotations in any P - 1 tokens,
    so three exact copies are found at their last token, whatever the cycle contains.

    A token that differs from the one a period before is a mismatch. It is tolerated if the share of mismatches is at
    most `noise` and the original token is back a period later. A position that changes in every copy, as in a list that
    counts up, ends the repetition.

    Args:
        longest: Largest period.
        repeats: Required number of copies, at least 3.
        shortest: Required number of tokens, at least 12.
        noise: Largest share of mismatches; 0 requires exact repetition.
    """

    CREDIT = 2.0  # mismatches that may follow each other; those of a repetition earn it back at the rate of `noise`

    def __init__(self, longest: int, repeats: int | float, shortest: int, noise: float) -> None:
        self._longest, self._repeats, self._shortest, self._noise = longest, repeats, shortest, noise
        sizes = [4]
        while sizes[-1] < longest - 1:
            sizes.append(sizes[-1] * 3 // 2 if sizes[-1].bit_count() == 1 else sizes[-1] * 4 // 3)
        # How often they are stored: a multiple of the number before, so that what is there for n is there for fewer.
        every = [1, *(1 << n.bit_length() - 2 for n in sizes[1:])]
        self._sizes = [(n, s - 1, pow(_BASE, n, _MODULUS)) for n, s in zip(sizes, every, strict=True)]
        self._keep = 3 * longest + 8
        self._ids: list[int] = []
        self._hashes = [0]  # of everything up to a token; those of stretches are differences
        self._ends: dict[int, int] = {}  # hash of a stretch -> where it ended last
        self._older: dict[int, int] = {}
        self._runs: dict[int, _Run] = {}  # by period
        self._last: tuple[int, int] | None = None  # the exact part of what was found: its period and start

    def add(self, token: int, position: int) -> tuple[int, int] | None:
        """Add the token at `position`; return period and first position of the repetition that covers most, if any."""
        ids, hashes, runs = self._ids, self._hashes, self._runs
        ids.append(token)
        hashes.append((hashes[-1] * _BASE + token + 1) % _MODULUS)
        self._look_up(position)
        found, best, clean, ended = None, position, 0, []
        for period, run in runs.items():
            if ids[~period] != token:
                if not self._tolerated(run, period, token, position):
                    ended.append(period)
            elif position >= run.due:
                start = run.first - period
                if run.misses > self._noise * (position - run.first + 1):
                    start = run.clean - period
                    if position < self._due(start, period):
                        continue
                if start < best or (start == best and found is not None and period < found[0]):
                    best, found, clean = start, (period, start), run.clean
        if found is not None and len(runs) > 1:  # periods that say nothing beside one that divides them
            ended += [p for p in runs if p > found[0] and p % found[0] == 0 and runs[p].clean >= clean]
        for period in ended:
            runs.pop(period, None)
        if len(ids) > 2 * self._keep:
            del ids[: -self._keep], hashes[: -self._keep]
        self._last = found and (found[0], clean - found[0])
        return found

    def _look_up(self, position: int) -> None:
        """Find the nearest stretches that equal the last tokens, follow their periods, and store these stretches."""
        period, covered = (0, 0) if self._last is None else (self._last[0], position - self._last[1])
        ends, older, hashes, looking = self._ends, self._older, self._hashes, True
        for n, mask, power in self._sizes:
            store = not position & mask
            if n > position + 1 or not (looking or store):
                break
            stretch = (hashes[-1] - hashes[~n] * power) % _MODULUS
            if looking and period <= n <= covered - period:  # known to recur: only longer ones say something new
                looking = covered - period < self._sizes[-1][0]
            elif looking:
                at = ends.get(stretch)
                if at is None:
                    at = older.get(stretch)
                looking = at is not None
                if at is not None and (distance := position - at) <= self._longest and distance not in self._runs:
                    known = period and distance % period == 0 and distance + n <= covered
                    if not known:
                        self._follow(distance, position)
            if store:
                ends[stretch] = position
        if position % self._longest == 0:
            self._older, self._ends = ends, {}

    def _follow(self, period: int, position: int) -> None:
        ids = self._ids
        equal, most = 0, len(ids) - period
        while equal < most and ids[~equal] == ids[~equal - period]:
            equal += 1
        if equal > 3:
            first = position - equal + 1
            self._runs[period] = _Run(first, self._due(first - period, period))

    def _due(self, start: int, period: int) -> int:
        return start + max(math.ceil(self._repeats * period), self._shortest) - 1

    def _tolerated(self, run: _Run, period: int, token: int, position: int) -> bool:
        """Note a mismatch; whether the run goes on."""
        if not self._noise:
            return False
        run.credit = min(self.CREDIT, run.credit + self._noise * (position - run.clean))
        run.clean, missed = position + 1, run.missed
        while missed and missed[0][0] < position - period:
            missed.popleft()
        again = bool(missed) and missed[0][0] == position - period
        if again and not (missed[0][1] and self._ids[~(2 * period)] == token):
            return False  # this place changes in every copy; after one replaced token it would be as it was before
        missed.append((position, not again))
        if again:
            return True
        run.misses += 1
        run.credit -= 1
        return run.credit >= 0


WINDOW = 256  # LoopGuard, section 6.1
THETA_TTR = 0.2  # LoopGuard, appendix B.1
THETA_CR = 0.12
MAX_NEW, THETA_LEN = 2500, 2480  # section 4.3


@runtime_checkable
class _Array(Protocol):
    def tolist(self) -> list[int]: ...


Ids = Sequence[int] | _Array  # arrays and tensors of one dimension are taken as well: their elements are no plain ints


def _plain(ids: Ids) -> Sequence[int]:
    return ids.tolist() if isinstance(ids, _Array) else ids


class Tail(NamedTuple):
    """A repetition that reaches the end of a sequence.

    Attributes:
        period: Number of tokens after which it repeats.
        start: Position of the first token of the first copy; all tokens from here on are part of the repetition.
        repeats: Number of copies; the last one may be incomplete: 2.5 for "ab ab a".
    """

    period: int
    start: int
    repeats: float


def type_token_ratio(ids: Ids) -> float:
    """Distinct tokens divided by tokens, in (0, 1] (LoopGuard, Eq. 5)."""
    ids = _plain(ids)
    return len(set(ids)) / len(ids) if ids else math.nan


def compression_ratio(ids: Ids | str) -> float:
    """Compressed size divided by uncompressed size (LoopGuard, Eq. 6); zlib, level 9.

    The paper names neither the compressor nor its input. Token ids are packed as 32 bits each: an id then has about the
    same size as the text of a token of a large vocabulary (four bytes or so), the paper's thresholds keep their
    meaning, and every vocabulary can reach them. A string is compressed as UTF-8.

    Raises:
        SinkscopeError: An id is negative or has more than 32 bits.
    """
    raw = ids.encode() if isinstance(ids, str) else _packed(_plain(ids))
    return len(zlib.compress(raw, 9)) / len(raw) if raw else math.nan


def _packed(ids: Sequence[int]) -> bytes:
    try:
        numbers = array("I", ids)
    except (OverflowError, TypeError):
        wrong = next((i for i in ids if not isinstance(i, int) or not 0 <= i < 1 << 32), None)
        raise SinkscopeError(f"token id {wrong!r}: expected whole numbers from 0 to 2**32 - 1") from None
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


def distinct(ids: Ids, n: int) -> float:
    """Distinct n-grams divided by n-grams (distinct-n; Li et al. 2016)."""
    ids = _plain(ids)
    grams = len(ids) - n + 1
    return len({tuple(ids[i : i + n]) for i in range(grams)}) / grams if grams > 0 else math.nan


def seq_rep(ids: Ids, n: int) -> float:
    """Share of n-grams that repeat an earlier one (seq-rep-n; Welleck et al. 2020): 1 - distinct-n."""
    return 1.0 - distinct(ids, n)


def novelty(ids: Ids, *, window: int = WINDOW, n: int = 4, span: int = 64) -> float:
    """Share of the last `span` tokens that completed an n-gram that was new to the window.

    At position i the window is the last `window` tokens up to i; the n-gram ending at i is new unless the same window
    contains it earlier. The first n - 1 tokens complete no n-gram and count as new.
    """
    state, share = Novelty(window, n, span), math.nan
    for position, token in enumerate(_plain(ids)):
        share = state.add(token, position)
    return share


def tail_period(ids: Ids, *, repeats: int | float = 3, shortest: int = 0, longest: int | None = None) -> Tail | None:
    """The repetition at the end of `ids`, or None; linear time.

    Among all periods P whose repetition covers at least `repeats` * P and at least `shortest` tokens at the end, the
    one that covers the most tokens is chosen; ties go to the smallest: "x y a a a x y a a a x y a a a" has period 5,
    not 1.

    Args:
        ids: Token ids.
        repeats: Required number of copies, at least 2.
        shortest: Required number of tokens.
        longest: Largest period.

    Raises:
        SinkscopeError: `repeats` is below 2.
    """
    if repeats < 2:
        raise SinkscopeError(f"repeats is {repeats!r}: a repetition has at least 2 copies")
    ids = _plain(ids)
    size = len(ids)
    best, found = 0, None
    for period, equal in _self_overlaps(ids, size // 2 if longest is None else longest):
        covered = equal + period
        if covered >= max(repeats * period, shortest) and covered > best:
            best, found = covered, Tail(period, size - covered, covered / period)
    return found


def _self_overlaps(ids: Sequence[int], longest: int) -> list[tuple[int, int]]:
    """(P, tokens at the end that equal the one P before them) for P up to `longest`: Z of the reversed sequence."""
    back = list(reversed(ids))
    size = len(back)
    overlaps = [0] * size
    left = right = 0
    for i in range(1, min(longest, size - 1) + 1):
        length = min(right - i, overlaps[i - left]) if i < right else 0
        while i + length < size and back[length] == back[i + length]:
            length += 1
        overlaps[i] = length
        if i + length > right:
            left, right = i, i + length
    return [(i, overlaps[i]) for i in range(1, min(longest, size - 1) + 1)]


def is_loop(
    ids: Ids,
    max_new: int | None = MAX_NEW,
    *,
    theta_ttr: float = THETA_TTR,
    theta_cr: float = THETA_CR,
    theta_len: int | None = None,
) -> bool:
    """The loop rule: low diversity, high redundancy, and an output nearly as long as allowed (LoopGuard, Eq. 7).

    Args:
        ids: Generated tokens.
        max_new: Maximum number of new tokens; None ignores the length.
        theta_ttr: Largest type-token ratio of a loop.
        theta_cr: Largest compression ratio of a loop.
        theta_len: Minimum length of a loop; by default 2,480 of 2,500, and the same share of any other `max_new`.
    """
    ids = _plain(ids)
    if theta_len is None:
        theta_len = 0 if max_new is None else max_new * THETA_LEN // MAX_NEW
    return len(ids) >= theta_len and type_token_ratio(ids) <= theta_ttr and compression_ratio(ids) <= theta_cr


def ends_in_loop(ids: Ids, last: int = WINDOW, *, theta_ttr: float = THETA_TTR, theta_cr: float = THETA_CR) -> bool:
    """The loop rule without the length, on the last tokens, so that early and late stops are judged alike."""
    return is_loop(_plain(ids)[-last:], None, theta_ttr=theta_ttr, theta_cr=theta_cr)


def diversity(ids: Ids, window: int = WINDOW) -> list[float]:
    """Type-token ratio of the last `window` tokens at every step (LoopGuard, Fig. 2 a); shorter windows at first."""
    types = Types(window)
    return [types.add(token) for token in _plain(ids)]


def collapse_point(ids: Ids, window: int = WINDOW, *, theta: float = THETA_TTR) -> int | None:
    """First step from which the windowed type-token ratio stays below `theta` to the end; None if there is none.

    Only full windows count, so it is at least `window`; the repetition itself began up to `window` tokens earlier.
    """
    values = diversity(ids, window)
    diverse = (step for step in range(len(values), window - 1, -1) if values[step - 1] >= theta)
    point = next(diverse, window - 1) + 1
    return point if window <= point <= len(values) else None


def survival(points: Sequence[int | None], steps: Sequence[int]) -> list[float]:
    """Share of runs that have not collapsed by each step (LoopGuard, Fig. 2 b).

    Args:
        points: `collapse_point` of each run; None counts as surviving, even if the run ended early.
        steps: Steps at which to evaluate.
    """
    if not points:
        return [math.nan] * len(steps)
    return [sum(p is None or p > step for p in points) / len(points) for step in steps]
