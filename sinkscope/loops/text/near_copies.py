"""Near copies, which may be honest: sentences and rows that resemble earlier ones but for a few words or numbers."""

from __future__ import annotations

from collections import deque

SIMILAR = 0.8  # shared words of two sentences, as a share of the words of both
LAST, ECHOES = 12, 11  # of so many sentences, so many resemble earlier ones
BACK, TIMES = 48, 2  # an echo resembles that many of so many sentences before it
LEAST_WORDS, MOST_WORDS = 3, 200  # of a sentence
CHANGING = 0.2  # values of an echo that are others, as a share of what it says; one is always allowed
_ENDS = ".!?"


class Echoes:
    """Says when nearly all sentences resemble earlier ones, whatever the order of their words.

    A sentence or row is an echo if it shares 80 % of its words with two of the 48 before it, and nearly all of its
    values (numbers, times, dates and ids) are the same. Records that people and programs write differ in words or
    several values.

    Attributes:
        onset: Position of the first word of the echoes; None until there are any.
    """

    def __init__(self) -> None:
        self.onset: int | None = None
        self._earlier: deque[tuple[frozenset[str], frozenset[str]]] = deque(maxlen=BACK)
        self._recent: deque[tuple[int, bool]] = deque(maxlen=LAST)  # of each sentence: its place, whether it is an echo
        self._words: list[str] = []
        self._ended = False  # by a full stop, unless a digit follows

    def add(self, word: str, place: int) -> bool:
        """Take the word at a position, as `outputs.split` makes it; whether the last sentences are echoes now."""
        found = False
        if self._ended and not word[0].isdigit():
            found = self._end_sentence(place)
        self._ended = word[0] in _ENDS
        if word in "\n。！？" or len(self._words) >= MOST_WORDS:
            return self._end_sentence(place) or found
        self._words.append(word)
        return found

    def _end_sentence(self, place: int) -> bool:
        """Compare the sentence with those before it."""
        begin = place - len(self._words)
        words: set[str] = set()
        values: set[str] = set()
        for part in map(str.lower, self._words):
            if any(map(str.isdigit, part)):
                if len(part) > 1:
                    values.add(part)
            elif part[0].isalpha() and (len(part) > 1 or part >= "\u3000"):
                words.add(part)
        self._words = []
        self._ended = False
        if len(words) + len(values) < LEAST_WORDS:
            return False
        sentence = (frozenset(words), frozenset(values))
        self._recent.append((begin, self._similarity(*sentence) >= SIMILAR))
        self._earlier.append(sentence)
        if sum(is_echo for _, is_echo in self._recent) < ECHOES:
            return False
        self.onset = self._recent[0][0]
        return True

    def _similarity(self, words: frozenset[str], values: frozenset[str]) -> float:
        """What is shared, as a share of what both say, with the second of those that are most similar."""
        similar = [0.0] * TIMES
        changes = max(1, CHANGING * (len(words) + len(values)))
        for other_words, other_values in self._earlier:
            same = len(values & other_values)
            shared = len(words & other_words) + same
            if max(len(values), len(other_values)) - same <= changes and shared >= LEAST_WORDS - 1:
                similar.append(shared / (len(words) + len(other_words) + 2 * same - shared))
        return sorted(similar)[-TIMES]
