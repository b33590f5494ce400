"""Near copies that no rule on exact copies can prove: counters, changed ids and dates, shuffled or edited sentences."""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Sequence

from sinkscope.loops.text.outputs import number, split
from sinkscope.loops.text.repetition import NearRepetition

SIMILAR, REWORDED = 0.8, 0.55  # shared words of two sentences, as a share of the words of both
LAST, ECHOES = 12, 11  # of so many sentences, so many resemble earlier ones
BACK, TIMES = 48, 2  # an echo resembles that many of so many sentences before it
LEAST_WORDS = 3  # of a sentence that is compared
CHANGING = 0.2  # numbers, dates and ids of an echo, as a share of its words; one is always allowed
GRAM, WINDOW, RECYCLED = 5, 250, 0.7  # of so many words, that share lies in n-grams that were there twice before
ROWS, ROW_TOKENS = 6, 96  # copies and tokens of rows that differ in a number only
SAME = 0.9  # share of their tokens that are the same in the row before

_SENTENCE = re.compile(r"[^\n.!?。！？]*(?:[.!?](?=\S)[^\n.!?。！？]*)*(?:[.!?。！？]+|\n|$)")
_VALUE = re.compile(r"\w*\d\w*(?:[-:./,]\w+)*")  # a number, a time, a date, an id


def echoes(text: str) -> tuple[int, int] | None:
    """Where nearly all sentences begin to resemble earlier ones, whatever the order of their words.

    A sentence or line with at least 3 words is an echo if it shares 80 % of its words with two of the 48 before it and
    has few numbers, dates and ids. 55 % are enough where 70 % of the last 250 words lie in n-grams of 5 words that were
    there twice before. Records that people and programs write differ in words or in several values.

    Returns:
        The first character of the echoes and the character at which 11 of the last 12 sentences were echoes; None if
        this never happens.
    """
    earlier: deque[frozenset[str]] = deque(maxlen=BACK)
    begins: deque[tuple[int, float]] = deque(maxlen=LAST)  # of each sentence: its place, and how similar it is
    recycled = _Recycled()
    for match in _SENTENCE.finditer(text):
        sentence, values = _VALUE.subn(" 0 ", match[0])
        tokens = [word.lower() for word in split(sentence) if word[0].isalnum()]
        recycled.add(tokens)
        words = frozenset(word for word in tokens if _is_word(word))
        if len(words) < LEAST_WORDS:
            continue
        similar = 0.0
        if values <= max(1, CHANGING * len(words)):
            similar = _similarity(words, earlier)
        earlier.append(words)
        begins.append((match.start(), similar))
        alike = sum(similar >= SIMILAR for _, similar in begins)
        if recycled.share >= RECYCLED:
            alike = sum(similar >= REWORDED for _, similar in begins)
        if alike >= ECHOES:
            return begins[0][0], match.end()
    return None


class _Recycled:
    """The share of the last words that lie in n-grams which were there twice before."""

    def __init__(self) -> None:
        self._gram: deque[str] = deque(maxlen=GRAM)
        self._seen: Counter[tuple[str, ...]] = Counter()
        self._covered: deque[bool] = deque(maxlen=WINDOW)

    def add(self, words: Sequence[str]) -> None:
        """Add the words of a sentence."""
        for word in words:
            self._gram.append(word)
            self._covered.append(False)
            gram = tuple(self._gram)
            if self._seen[gram] >= TIMES:
                for place in range(1, min(len(gram), len(self._covered)) + 1):
                    self._covered[-place] = True
            self._seen[gram] += 1

    @property
    def share(self) -> float:
        """The share; 0 before there are enough words."""
        if len(self._covered) < WINDOW:
            return 0.0
        return sum(self._covered) / WINDOW


def _is_word(word: str) -> bool:
    """Whether a token is a word of two letters or a character of a script with many."""
    return (len(word) > 1 and word[0].isalpha()) or word[0] >= "\u3000"


def _similarity(words: frozenset[str], earlier: Sequence[frozenset[str]]) -> float:
    """The shared words, as a share of the words of both, of the second of those that are most similar."""
    most: list[float] = [0.0] * TIMES
    for other in earlier:
        if min(len(words), len(other)) < REWORDED * max(len(words), len(other)):
            continue
        shared = len(words & other)
        similarity = shared / (len(words) + len(other) - shared)
        if similarity > most[0]:
            most = sorted([*most[1:], similarity])
    return most[0]


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
