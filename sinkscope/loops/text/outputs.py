"""Texts as words, which stand for tokens where there is no tokenizer."""

from __future__ import annotations

import re
from collections.abc import Sequence

_CJK = r"\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff"  # written without spaces
_WORDS = re.compile(
    rf"[{_CJK}]"  # a character each
    rf"|(?:(?![{_CJK}])\w){{1,12}}"
    r"|([^\w\s])\1{0,11}"
    r"|\s{16}"
    r"|[^\S\n]*\n\s*"
)
SIGNS = 12  # equal signs in a row are no cell of a table
_GAP = 16  # characters of white space that are a token


class Splitter:
    """Splits a text that arrives in pieces, as `split` splits the whole text."""

    def __init__(self) -> None:
        self._rest = ""  # it may belong to a word that goes on

    def feed(self, piece: str, last: bool = False) -> list[str]:
        """Return the words that a piece completes; with `last`, also the one that is not complete."""
        text = self._rest + piece
        words = split(text)
        if last:
            text = ""
        self._rest = text[len(text) - (len(text) - len(text.rstrip())) % _GAP :]  # white space that may go on
        if text and not text[-1].isspace():
            self._rest = words.pop()
        elif "\n" in self._rest:
            words.pop()
        return words


def split(text: str) -> list[str]:
    r"""Split into words of up to 12 letters or digits (longer ones in pieces), other characters, line breaks and gaps.

    No tokenizer is needed, and the tokens are about as long as those of a large vocabulary. Up to 12 equal signs
    in a row form one token, so a ruler is only a few tokens. Chinese, Japanese and Korean characters stand alone.
    16 characters of white space in a row are a token " ". Other white space that has a line break is a token "\n".
    """
    return [word for word, _ in spans(text)]


def spans(text: str) -> list[tuple[str, int]]:
    """Return the words of `split`, each with the number of characters up to its end."""
    words: list[tuple[str, int]] = []
    for match in _WORDS.finditer(text):
        word = match[0]
        if word.isspace():
            word = " " if len(word) == _GAP else "\n"
        words.append((word, match.end()))
    return words


def is_tabular(words: Sequence[str]) -> bool:
    """Return whether repeated words may be a table: numbers, single letters and signs, and the keys of JSON."""
    is_table = False
    for place, word in enumerate(words[:-2]):
        is_name = word[0].isalpha() and len(word) > 1
        is_sign = word[0].isascii() and len(word) < SIGNS and not is_name  # 0x1f and 2nd are numbers, too
        is_key = [*words[place + 1 : place + 3]] == ['"', ":"]
        if word == " " or not (is_sign or is_key):
            return False
        is_table = is_table or word.isalnum() or word == "\n"
    return is_table
