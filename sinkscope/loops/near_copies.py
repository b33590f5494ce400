"""Near copies that no rule on exact copies can prove: counters, changed ids and dates, shuffled and edited sentences."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence

from sinkscope.loops.outputs import number, split
from sinkscope.loops.repetition import NearRepetition

SIMILAR = 0.8  # shared words of two sentences, as a share of the words of both
LAST, ECHOES = 12, 11  # of so many sentences, so many resemble earlier ones
BACK, TIMES = 48, 2  # an echo resembles that many of so many sentences before it
LEAST_WORDS = 3  # of a sentence that is compared
CHANGING = 0.2  # numbers, dates and ids of an echo, as a share of its words; one is always allowed
ROWS, ROW_TOKENS = 6, 96  # copies and tokens of rows that differ in a number only
SAME = 0.9  # share of their tokens that are the same in the row before

_SENTENCE = re.compile(r"[^\n.!?。！？]*(?:[.!?](?=\S)[^\n.!?。！？]*)*(?:[.!?。！？]+|\n|$)")
_VALUE = re.compile(r"\w*\d\w*(?:[-:./,]\w+)*")  # a number, a time, a date, an id


def echoes(text: str) -> tuple[int, int] | None:
    """Where nearly all sentences begin to resemble earlier ones, whatever the order of their words.

    A sentence or line with at least 3 words is an echo if it shares 80 % of its words with two of the 48 before it and
    has few numbers, dates and ids. Records that people and programs write differ in words or in several values.

    Returns:
        The first character of the echoes and the character at which 11 of the last 12 sentences were echoes; None if
        this never happens.
    """
    earlier: deque[frozenset[str]] = deque(maxlen=BACK)
    begins: deque[tuple[int, bool]] = deque(maxlen=LAST)
    for match in _SENTENCE.finditer(text):
        sentence = match[0]
        words = frozenset(word.lower() for word in split(_VALUE.sub(" ", sentence)) if _is_word(word))
        if len(words) < LEAST_WORDS:
            continue
        values = sum(1 for _ in _VALUE.finditer(sentence))
        similar = 0
        if values <= max(1, CHANGING * len(words)):
            similar = _similar(words, earlier)
        earlier.append(words)
        begins.append((match.start(), similar >= TIMES))
        if sum(echo for _, echo in begins) >= ECHOES:
            return begins[0][0], match.end()
    return None


def _is_word(word: str) -> bool:
    """Whether a token is a word of two letters or a character of a script with many."""
    return (len(word) > 1 and word[0].isalpha()) or word[0] >= "\u3000"


def _similar(words: frozenset[str], earlier: Sequence[frozenset[str]]) -> int:
    """How many of the sets, up to `TIMES`, resemble this one."""
    count = 0
    for other in earlier:
        if min(len(words), len(other)) < SIMILAR * max(len(words), len(other)):
            continue
        shared = len(words & other)
        if shared >= SIMILAR * (len(words) + len(other) - shared):
            count += 1
            if count == TIMES:
                break
    return count


def counting_rows(words: Sequence[str]) -> tuple[int, int] | None:
    """Where rows repeat exactly but for a few numbers, such as those of the rows.

    Args:
        words: The words of a text.

    Returns:
        The first word of the rows and the number of words at which they were found; None if there are none.
    """
    masked = number("0" if any(map(str.isdigit, word)) else word for word in words)
    rows = NearRepetition(2048, ROWS, ROW_TOKENS, 0.0, ROWS)
    for position, token in enumerate(masked):
        tail = rows.add(token, position)
        if tail is None:
            continue
        first = max(tail.start + tail.period, position + 1 - max(ROW_TOKENS, tail.period))
        same = 0
        for place in range(first, position + 1):
            same += words[place] == words[place - tail.period]
        if same >= SAME * (position + 1 - first):
            return tail.start, position + 1
    return None
