"""Texts as words, which stand for tokens where there is no tokenizer."""

from __future__ import annotations

import re

# Scripts that are written without spaces: Thai to Myanmar, Khmer, kana, bopomofo, Han, Hangul, half-width kana.
_ALONE = (
    r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u312f\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af"
    r"\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003ffff"
)
RUN = 4  # equal signs in a row that are a token; they are no cell of a table
IMAGE = "base64,"
_WORDS = re.compile(
    r"base6(?:4(?:,[A-Za-z0-9+/=]*)?)?"  # an image, or what may become one as its text arrives
    rf"|[{_ALONE}]"  # a character each
    rf"|(?:(?![{_ALONE}])[^\W\d]){{1,12}}"
    r"|\d{1,12}"
    rf"|([^\w\s])\1{{0,{RUN - 1}}}"
    r"|\s{16}"
    r"|[^\S\n]*\n\s*"
)
_GAP = 16  # characters of white space that are a token
_LONE = re.compile(f"[{_ALONE}]")


def is_lone(word: str) -> bool:
    """Return whether a word of `split` is a character of a script that is written without spaces."""
    return word[0] >= "\u0e00" and _LONE.match(word) is not None


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
            self._rest = words.pop()  # of an image its beginning, however long it becomes
        elif "\n" in self._rest:
            words.pop()
        return words


def split(text: str) -> list[str]:
    r"""Split into up to 12 letters, up to 12 digits (longer words in pieces), other characters, line breaks and gaps.

    No tokenizer is needed, and the tokens are about as long as those of a large vocabulary. Up to 4 equal signs in a
    row form one token. Characters of scripts that are written without spaces stand alone. An image in base64 is one
    token.
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
        if word.startswith(IMAGE):
            word = IMAGE
        words.append((word, match.end()))
    return words
