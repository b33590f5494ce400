"""Near copies, which may be honest: few different words, sentences that were there before, and ladders of branches.

Scripts that are written without spaces have no words here, but a character each: three in a row stand for a word. Thai
and kana have too few characters for less: ordinary texts use them all within some lines.
"""

from __future__ import annotations

import re
from collections import Counter, deque

from sinkscope.loops.text.outputs import is_lone

FEW = ((24, 1), (100, 12), (400, 48))
"""Numbers of last words, and how many different ones among them are few."""
IN_A_ROW = 3  # characters without spaces that stand for a word
FEW_LONE = ((24, 1), (200, 12), (800, 120))
"""The same for characters without spaces, each with the two before it; of which at least half of the text is made."""
EQUAL, RECALLED, TIMES = 24, 22, 2  # 22 of the last 24 sentences or lines equal two earlier ones, anywhere
SENTENCE_WORDS = 200  # at most, of a sentence
LINES, BRANCHES = 96, 48  # of the last lines, those that begin a further branch of one condition
_BRANCH = re.compile(r"(?:} )?(?:elif|elseif|elsif|else if)\b")


class FewWords:
    """Says when the last words of a text are few different ones.

    Numbers are words, but an eighth must be words of letters.

    Args:
        words: Number of last words.
        different: How many different ones are few.

    Attributes:
        words: Number of last words.
        copies: Number of times that a word is there, at least, where they are few.
    """

    def __init__(self, words: int, different: int) -> None:
        self.copies = words // different
        self.words = words
        self._few = different
        self._last: deque[tuple[int, str]] = deque()  # the last words and their places
        self._times = Counter[str]()  # how often each is among them

    def add(self, word: str, place: int) -> int | None:
        """Take the word at a position; return the position of the first of the last words if these are few."""
        self._last.append((place, word))
        self._times[word] += 1
        if len(self._last) > self.words:
            _, first = self._last.popleft()
            self._times[first] -= 1
            if not self._times[first]:
                del self._times[first]
        if len(self._last) < self.words or len(self._times) > self._few:
            return None
        letters = sum(times for word, times in self._times.items() if len(word) > 1 and word[0].isalpha())
        return self._last[0][0] if 8 * letters >= self.words else None


class Echoes:
    """Says when a text has near copies, whatever the order of their words.

    1. Its last words are few different ones: 12 % of 100 or of 400, or one word 24 times. Without spaces, 12 of 200
       runs of three characters, or 120 of 800.
    2. Of its last 24 sentences or lines of any length, such as "OK.", 22 equal two earlier ones, however far back.
    3. Of its last 96 lines 48 begin with `elif` or `else if`, whatever is asked in them.

    Attributes:
        onset: Position of the first word of the echoes; None until there are any.
        copies: Number of copies, to hold beside what was asked for.
    """

    def __init__(self) -> None:
        self.onset: int | None = None
        self.copies = 0
        self._few = [FewWords(words, different) for words, different in FEW]
        self._few_lone = [FewWords(runs, different) for runs, different in FEW_LONE]
        self._lone = ""  # the last characters without spaces, since another word
        self._sentences = 0
        self._times = Counter[int]()  # hash of a sentence -> how often it was there
        self._recalled: deque[tuple[int, bool]] = deque(maxlen=EQUAL)  # each of the last: its place, and if it is equal
        self._sentence: list[str] = []
        self._ended = False  # by a full stop, unless a digit follows
        self._line: list[str] = []  # the first words of the line
        self._lines: deque[tuple[int, bool]] = deque(maxlen=LINES)  # where each begins, and whether it is a branch

    def add(self, word: str, place: int) -> bool:
        """Take the word at a position, as `outputs.split` makes it; whether the last words are echoes now."""
        is_echo = self._ended and not word[0].isdigit() and self._end_sentence(place)
        self._ended = word[0] in ".!?"
        if word == "\n":
            is_echo = self._end_line(place) or is_echo
        elif len(self._line) < 3:
            self._line.append(word)
        if word in "\n。！？" or len(self._sentence) >= SENTENCE_WORDS:
            return self._end_sentence(place) or is_echo
        word = word.lower()
        self._sentence.append(word)
        if self._has_few_words(word, place):
            is_echo = True
        if self._has_few_lone(word, place):
            is_echo = True
        return is_echo

    def _has_few_words(self, word: str, place: int) -> bool:
        """Note a word; whether the last ones are few different ones."""
        is_few = False
        if word[0].isalnum():
            for tracker in self._few:
                onset = tracker.add(word, place)
                if onset is not None:
                    self.onset, self.copies = onset, max(tracker.copies, self._sentences)
                    is_few = True
        return is_few

    def _has_few_lone(self, word: str, place: int) -> bool:
        """Note a character without spaces; whether the last ones are few different runs, and half of the text."""
        if not is_lone(word):
            if word[0].isalnum():
                self._lone = ""
            return False
        self._lone = (self._lone + word)[-IN_A_ROW:]
        is_few = False
        for tracker in self._few_lone:
            onset = tracker.add(self._lone, place)
            if onset is not None and place - onset < 2 * tracker.words:
                self.onset, self.copies = onset, max(tracker.copies, self._sentences)
                is_few = True
        return is_few

    def _end_line(self, place: int) -> bool:
        """Note whether the line is a branch; whether half of the last ones are."""
        self._lines.append((place, _BRANCH.match(" ".join(self._line)) is not None))
        self._line = []
        branches = sum(is_branch for _, is_branch in self._lines)
        if branches < BRANCHES:
            return False
        self.onset, self.copies = self._lines[0][0], branches
        return True

    def _end_sentence(self, place: int) -> bool:
        """Note whether the sentence is one that was there twice before; whether nearly all of the last ones are."""
        sentence, self._sentence, self._ended = self._sentence, [], False
        if not any(word[0].isalpha() for word in sentence):
            return False
        key = hash(tuple(sentence))
        self._sentences += 1
        self._recalled.append((place - len(sentence), self._times[key] >= TIMES))
        self._times[key] += 1
        if sum(is_equal for _, is_equal in self._recalled) < RECALLED:
            return False
        self.onset, self.copies = self._recalled[0][0], self._sentences
        return True
