"""Near copies, which may be honest: sentences and rows that resemble earlier ones but for a few words or numbers."""

from __future__ import annotations

from collections import Counter, deque

SIMILAR, REWORDED = 0.8, 0.55  # shared words of two sentences, as a share of the words of both
LAST, ECHOES = 12, 11  # 11 of the last 12 sentences must echo
BACK, TIMES = 48, 2  # an echo matches at least 2 of the previous 48 sentences
EQUAL, RECALLED = 24, 22  # 22 of the last 24 sentences or lines must equal two earlier ones, anywhere
KEPT_SENTENCES = 1 << 16
FEW, FEW_OF = 3, 96  # at most 3 different words in the last 96
LEAST_WORDS, SENTENCE_WORDS = 3, 200  # of a sentence
CHANGING = 0.2  # an echo may change values: this share of its words and values, and always one
GRAM, RECENT_WORDS, RECYCLED = 5, 250, 0.7  # 70 % of the last 250 words lie in 5-grams that occurred twice before
_ENDS = ".!?"


class Echoes:
    """Says when nearly all sentences resemble earlier ones, whatever the order of their words.

    A sentence or row is an echo if it shares 80 % of its words with two of the 48 before it, and nearly all of its
    values (numbers, times, dates and ids) are the same. 55 % are enough where 70 % of the last 250 words lie in n-grams
    of 5 words that were there twice before. Records that people and programs write differ in words or several values.
    A text in which the last 96 words are at most 3 different ones, in any order, echoes as well.
    Sentences and lines of any length, such as "OK.", echo if nearly all of the last 24 equal two earlier ones, however
    far back these are.

    Attributes:
        onset: Position of the first word of the echoes; None until there are any.
        sentences: Number of sentences and lines with a word.
    """

    def __init__(self) -> None:
        self.onset: int | None = None
        self.sentences = 0
        self._times: dict[int, int] = {}  # hash of a sentence -> how often it was there
        self._recalled: deque[tuple[int, bool]] = deque(maxlen=EQUAL)  # each of the last: its place, and if it is equal
        self._latest: deque[tuple[int, str]] = deque(maxlen=FEW_OF)  # the last words and their places
        self._different: Counter[str] = Counter()  # how often each is among them
        self._earlier: deque[tuple[frozenset[str], frozenset[str]]] = deque(maxlen=BACK)
        self._recent: deque[tuple[int, float]] = deque(maxlen=LAST)  # of each sentence: its place, how similar it is
        self._words: list[str] = []
        self._ended = False  # by a full stop, unless a digit follows
        self._gram: deque[str] = deque(maxlen=GRAM)
        self._seen: Counter[tuple[str, ...]] = Counter()
        self._covered: deque[bool] = deque(maxlen=RECENT_WORDS)

    def add(self, word: str, place: int) -> bool:
        """Take the word at a position, as `outputs.split` makes it; whether the last sentences are echoes now."""
        is_echo = self._count(word, place)
        if self._ended and not word[0].isdigit():
            is_echo = self._end_sentence(place) or is_echo
        self._ended = word[0] in _ENDS
        if word in "\n。！？" or len(self._words) >= SENTENCE_WORDS:
            return self._end_sentence(place) or is_echo
        self._words.append(word)
        return is_echo

    def _end_sentence(self, place: int) -> bool:
        """Compare the sentence with those before it."""
        begin = place - len(self._words)
        words: set[str] = set()
        values: set[str] = set()
        for part in map(str.lower, self._words):
            if any(map(str.isdigit, part)):
                values.add(part)
                self._recycle("0")
                continue
            if part[0].isalnum():
                self._recycle(part)
            if part[0].isalpha() and (len(part) > 1 or part >= "\u3000"):
                words.add(part)
        recalled = self._recall(begin)
        self._words = []
        self._ended = False
        values = {value for value in values if len(value) > 1}
        if len(words) + len(values) < LEAST_WORDS:
            return recalled
        sentence = (frozenset(words), frozenset(values))
        self._recent.append((begin, self._similarity(*sentence)))
        self._earlier.append(sentence)
        least = SIMILAR
        if sum(self._covered) >= RECYCLED * RECENT_WORDS:
            least = REWORDED
        if sum(similar >= least for _, similar in self._recent) < ECHOES:
            return recalled
        self.onset = self._recent[0][0]
        return True

    def _count(self, word: str, place: int) -> bool:
        """Count a word among the last ones; whether these are few different ones."""
        if not word[0].isalpha():
            return False
        if len(self._latest) == FEW_OF:
            first = self._latest[0][1]
            self._different[first] -= 1
            if not self._different[first]:
                del self._different[first]
        self._latest.append((place, word.lower()))
        self._different[word.lower()] += 1
        if len(self._latest) < FEW_OF or len(self._different) > FEW:
            return False
        self.onset = self._latest[0][0]
        self.sentences = max(self.sentences, FEW_OF)
        return True

    def _recall(self, begin: int) -> bool:
        """Note whether the sentence is one that was there twice before; whether nearly all of the last ones are."""
        if not any(word[0].isalpha() for word in self._words):
            return False
        self.sentences += 1
        sentence = hash(tuple(map(str.lower, self._words)))
        times = self._times.pop(sentence, 0)
        self._times[sentence] = times + 1
        if len(self._times) > KEPT_SENTENCES:
            del self._times[next(iter(self._times))]
        self._recalled.append((begin, times >= TIMES))
        if sum(is_equal for _, is_equal in self._recalled) < RECALLED:
            return False
        self.onset = self._recalled[0][0]
        return True

    def _recycle(self, word: str) -> None:
        """Note whether the last words lie in an n-gram that was there twice before."""
        self._gram.append(word)
        self._covered.append(False)
        gram = tuple(self._gram)
        if self._seen[gram] >= TIMES:
            for back in range(1, len(gram) + 1):
                self._covered[-back] = True
        self._seen[gram] += 1

    def _similarity(self, words: frozenset[str], values: frozenset[str]) -> float:
        """The Jaccard index of words and values with the second most similar sentence."""
        similar = [0.0] * TIMES
        changes = max(1, CHANGING * (len(words) + len(values)))
        for other_words, other_values in self._earlier:
            same = len(values & other_values)
            shared = len(words & other_words) + same
            if max(len(values), len(other_values)) - same <= changes and shared >= LEAST_WORDS - 1:
                similar.append(shared / (len(words) + len(other_words) + 2 * same - shared))
        return sorted(similar)[-TIMES]
