"""Signals of repetition on plain token ids: diversity and redundancy of an output, and repetition at its end.

Every function takes a sequence of token ids from any vocabulary and needs neither torch nor a tokenizer. Values that
are undefined, for example for an empty sequence, are NaN, which passes no threshold. Positions count from 0, steps
(tokens generated so far) from 1. LoopGuard, section 4.3, leaves some definitions open; `docs/measure/loops.md` gives
reasons.
"""

from __future__ import annotations

import math
import zlib
from array import array
from collections import deque
from collections.abc import Sequence
from operator import index
from typing import Any, NamedTuple

from sinkscope.errors import SinkscopeError

WINDOW = 256  # LoopGuard, section 6.1
THETA_TTR = 0.2  # LoopGuard, appendix B.1
THETA_CR = 0.12
LOOP_TOKENS = 24  # minimum tokens of a loop at the end of a text
MAX_NEW, THETA_LEN = 2500, 2480  # section 4.3
IDS = 1 << 32  # a token's id is below it


Ids = Sequence[int] | Any  # arrays and tensors of one dimension are taken as well: their elements are no plain ints


def id_list(ids: Any) -> Sequence[int]:
    """Return arrays and tensors as lists, and anything else unchanged."""
    return ids.tolist() if hasattr(ids, "tolist") else ids


class Tail(NamedTuple):
    """A repetition that reaches the end of a sequence.

    Attributes:
        period: Number of tokens after which it repeats.
        start: Position of the first token of the first copy; all tokens from here on are part of the repetition.
        repeats: Number of copies; the last one may be incomplete: 2.5 for "ab ab a".
        exact: Whether the copies are equal; else their numbers differ, and the period is that of the last copy.
    """

    period: int
    start: int
    repeats: float
    exact: bool = True


class Step(NamedTuple):
    """What a monitor says after a token.

    Attributes:
        step: Number of tokens so far, including this one (t).
        ttr: Type-token ratio of the window; NaN under the default rule, which does not need it.
        cr: Compression ratio of the window when it was last computed; NaN before the first time, and under the default
            rule.
        tail: Repetition that reaches this token, if there is one; its positions count from the first token (0).
        trigger: Whether to intervene now.
        suspect: Whether the repetition is only reported, because it may be honest.
    """

    step: int = 0
    ttr: float = math.nan
    cr: float = math.nan
    tail: Tail | None = None
    trigger: bool = False
    suspect: bool = False


class WindowNovelty:
    """Share of the last `span` tokens that completed an n-gram that was new to the window.

    At position i the window is the last `window` tokens up to i; the n-gram ending at i is new unless the same window
    contains it earlier. The first n - 1 tokens complete no n-gram and count as new.
    """

    def __init__(self, window: int, n: int, span: int) -> None:
        self._gram: deque[int] = deque(maxlen=n)
        self._reach = window - n  # an n-gram fits window - n times before the last one
        self._ends: dict[tuple[int, ...], int] = {}  # n-gram -> step at which it ended last, the oldest first
        self._step = 0
        self._new: deque[bool] = deque(maxlen=span)  # of each of the last tokens: whether its n-gram was new

    def add(self, token: int) -> float:
        """Add a token and return the share including it."""
        self._step += 1
        self._gram.append(token)
        gram = tuple(self._gram)  # the first n - 1 are shorter than n-grams and equal none
        end = self._ends.pop(gram, None)
        self._ends[gram] = self._step
        if len(self._ends) > self._reach:
            del self._ends[next(iter(self._ends))]
        self._new.append(end is None or self._step - end > self._reach)
        return sum(self._new) / len(self._new)


def end_loop(ids: Sequence[int]) -> Tail | None:
    """Return the loop in which token ids end, three copies of anything; it may begin inside the prompt."""
    return tail_period(ids, shortest=LOOP_TOKENS)


def type_token_ratio(ids: Ids) -> float:
    """Return the number of distinct tokens divided by that of all tokens, in (0, 1] (LoopGuard, Eq. 5)."""
    ids = id_list(ids)
    if not ids:
        return math.nan
    return len(set(ids)) / len(ids)


def compression_ratio(ids: Ids) -> float:
    """Return the compressed size divided by the uncompressed size (LoopGuard, Eq. 6); zlib, level 9.

    The paper names neither the compressor nor its input. Token ids are packed as 32 bits each: an id then has about the
    same size as the text of a token of a large vocabulary (four bytes or so), the paper's thresholds keep their
    meaning, and every vocabulary can reach them.

    Raises:
        SinkscopeError: An id is negative or has more than 32 bits.
    """
    ids = id_list(ids)
    if not ids:
        return math.nan
    packed = array("I", map(checked_id, ids)).tobytes()
    return len(zlib.compress(packed, 9)) / len(packed)


def checked_id(token: Any) -> int:
    """Return a token id, which may be a number of numpy or of torch, as an int.

    Raises:
        SinkscopeError: It is no whole number from 0 to 2**32 - 1.
    """
    try:
        number = index(token)
    except TypeError:
        number = -1
    if not 0 <= number < IDS:
        raise SinkscopeError(f"the token is {token!r}: expected a whole number from 0 to 2**32 - 1")
    return number


def tail_period(ids: Ids, *, repeats: int | float = 3, shortest: int = 0, longest: int | None = None) -> Tail | None:
    """Return the repetition at the end of `ids`, or None.

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
    ids = id_list(ids)
    size = len(ids)
    best: Tail | None = None
    covered = 0
    for period in range(1, min(size - 1, size // 2 if longest is None else longest) + 1):
        if best is not None and period <= covered and period % best.period == 0:
            continue  # it covers the same tokens
        equal = 0
        while equal < size - period and ids[~equal] == ids[~equal - period]:
            equal += 1
        if equal + period >= max(repeats * period, shortest, covered + 1):
            covered = equal + period
            best = Tail(period, size - covered, covered / period)
    return best


def is_loop(ids: Ids, max_new: int | None = MAX_NEW) -> bool:
    """Return the loop rule: low diversity, high redundancy, and an output nearly as long as allowed (LoopGuard, Eq. 7).

    Args:
        ids: Generated tokens.
        max_new: Maximum number of new tokens; a loop has at least 99.2 % of them. None ignores the length.
    """
    shortest = 0
    if max_new is not None:
        shortest = max_new * THETA_LEN // MAX_NEW
    return len(ids) >= shortest and type_token_ratio(ids) <= THETA_TTR and compression_ratio(ids) <= THETA_CR
