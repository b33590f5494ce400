"""Holds back the end of a text while it may be a copy, so that a loop's copies can be dropped before anyone reads them.

1. A text becomes words, in which all numbers are equal, because items that count are copies as well.
2. The last eight words are always held. Where they stand earlier as well, all words since the second copy began are.
3. As soon as a word differs, everything but the last eight words is let go.
"""

from __future__ import annotations

from sinkscope.loops.text.outputs import spans

LAG = 8
"""Words that are held: as many as it takes to see that a copy begins."""


class HeldText:
    """One text that arrives in pieces.

    Attributes:
        text: All of it.
        copies: Whether its end may be a copy.
    """

    def __init__(self) -> None:
        self.text = ""
        self._ends_at: list[int] = []  # of each word: the place behind its last character
        self._keys: list[str] = []  # of each word
        self._ends: dict[tuple[str, ...], int] = {}  # last words -> number of words up to their last end
        self._distance = 0  # from a copy to the one before it
        self._start = 0  # number of words before the second copy
        self._split = 0  # place up to which words are complete

    @property
    def copies(self) -> bool:
        """Return whether the end may be a copy."""
        return self._distance > 0

    @property
    def safe(self) -> int:
        """Return the number of characters that are no part of a copy, for all that is known."""
        word = max(0, len(self._keys) - LAG)
        if self._distance:
            word = min(word, self._start)
        return self._ends_at[word - 1] if word else 0

    @property
    def kept(self) -> str:
        """Return the text up to the end of the first copy, without white space behind it."""
        if not self._distance:
            return self.text[: self.safe].rstrip()
        word = self._start
        while word < len(self._keys) and not any(map(str.isalnum, self._keys[word])):
            word += 1  # the full stop behind the copy
        return self.text[: self._ends_at[word - 1] if word else 0].rstrip()

    def feed(self, piece: str) -> None:
        """Take a piece."""
        self.text += piece
        rest = self.text[self._split :]
        begin = self._split
        for word, end in spans(rest)[:-1]:  # the last one may go on
            begin = self._split + end
            self._add("0" if word.isdigit() else word, begin)
        self._split = begin

    def _add(self, key: str, end: int) -> None:
        keys = self._keys
        keys.append(key)
        self._ends_at.append(end)
        count = len(keys)
        if self._distance and keys[-1 - self._distance] != key:
            self._distance = 0
        if count < LAG:
            return
        gram = tuple(keys[-LAG:])
        earlier = self._ends.get(gram)
        self._ends[gram] = count
        if self._distance or earlier is None:
            return
        distance, start = count - earlier, count - LAG
        while start > distance and keys[start - 1] == keys[start - 1 - distance]:
            start -= 1
        self._distance, self._start = distance, max(start, 0)
