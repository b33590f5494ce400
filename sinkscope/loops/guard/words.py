"""Where words begin in a row of token ids, as the tokenizer marks it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Words:
    """Tokens by what stands at their edges. A word goes on where both sides of a seam are inside of one.

    Attributes:
        inside: Tokens that begin inside a word: with a letter, and without the mark of a boundary.
        left_open: Tokens that end inside a word.
    """

    inside: frozenset[int]
    left_open: frozenset[int]

    def goes_on(self, before: int, token: int) -> bool:
        """Return whether a token goes on with the word in which the token before it ends."""
        return token in self.inside and before in self.left_open

    def begins(self, ids: Sequence[int], place: int) -> bool:
        """Return whether the token at a place begins a word, or is no part of one."""
        return place == 0 or not self.goes_on(ids[place - 1], ids[place])

    def seam(self, ids: Sequence[int], place: int, period: int) -> int | None:
        """Return the first place from this one on, within a period, where a word begins; None if there is none."""
        for seam in range(place, min(place + period, len(ids))):
            if self.begins(ids, seam):
                return seam
        return None

    def rest(self, ids: Sequence[int], first: int) -> frozenset[int]:
        """Return the tokens that go on with a row after a token, to the end of the word, and this one if it is open."""
        found = set(self.inside & {first})
        within = False
        for place in range(1, len(ids)):
            if ids[place - 1] == first:
                within = ids[place] in self.inside
            elif self.begins(ids, place):
                within = False
            if within:
                found.add(ids[place])
        return frozenset(found)

    def whole(self, ids: Sequence[int]) -> frozenset[int]:
        """Return all tokens that are whole words somewhere, or no part of one."""
        found: set[int] = set()
        for place in range(len(ids) - 1):
            if self.begins(ids, place) and self.begins(ids, place + 1):
                found.add(ids[place])
        return frozenset(found)


def words_of(tokenizer: Any) -> Words | None:
    """Return the words of a tokenizer whose tokens mark boundaries: byte-level (Ġ), SentencePiece (▁), or spaces.

    Args:
        tokenizer: One of transformers, or None.

    Returns:
        None if no token begins with a mark, so that nothing is known about words.
    """
    if tokenizer is None or not hasattr(tokenizer, "convert_ids_to_tokens"):
        return None
    tokens: list[Any] = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    for marks in ("▁ ", "ĠĊĉč "):  # the second: space, newline, tab and return, as byte-level tokens write them
        if any(str(token)[:1] == marks[0] for token in tokens):
            break
    else:
        return None
    special = set(tokenizer.all_special_ids)
    inside: set[int] = set()
    left_open: set[int] = set()
    for number, token in enumerate(tokens):
        if not token or number in special:
            continue
        if _in_word(token[0], marks):
            inside.add(number)
        if _in_word(token[-1], marks):
            left_open.add(number)
    return Words(frozenset(inside), frozenset(left_open))


def _in_word(char: str, marks: str) -> bool:
    """Whether a character is part of a word; of other scripts all are, because byte-level tokens do not show them."""
    return char not in marks and (char.isalnum() or char == "'" or ord(char) > 127)
