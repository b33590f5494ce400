"""What a repetition repeats: prose, which has no reason to, or a table, code, markup or logs, which may."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from sinkscope.loops.text.outputs import RUN

Kind = Literal["prose", "data", "table"]
BYTES = 6  # of a text as UTF-8 that count as a token, unless a word is longer
CODE = frozenset("{}[]<>=;|\\@~^/+%$&_")
CODE_SHARE, NUMBER_SHARE = 0.12, 0.3  # of words that are such signs, or numbers, in data
SHORT_LINE = 8  # words of a line of data that does not end as a sentence does
_ENDS = frozenset(".!?,;:…'\"”’»)。！？，、；：")


def size_of(word: str) -> int:
    """Return the number of tokens as which a word counts: 1, one for each digit, or one for 6 bytes if it is long."""
    if word.isdigit():
        return len(word)
    return max(1, len(word.encode("utf-8", "replace")) // BYTES)


def kind_of(words: Sequence[str]) -> Kind:
    """Return what repeated words are: two copies, which may begin anywhere in them, and two words more."""
    said = [word for word in words if not word.isspace()]
    if not said:
        return "prose"
    if is_tabular(words):
        return "table"
    if "\n" in words and not any(map(str.isalnum, said)):
        return "data"  # rows of signs, such as empty cells
    codes = numbers = 0
    for place, word in enumerate(said):
        codes += not CODE.isdisjoint(word) or f"{word}{''.join(said[place + 1 : place + 2])}" in ('":', "()")
        numbers += word.isdigit()
    if codes >= CODE_SHARE * len(said) or numbers >= NUMBER_SHARE * len(said):
        return "data"
    return "data" if _has_short_lines(words) else "prose"


def is_tabular(words: Sequence[str]) -> bool:
    """Return whether repeated words may be a table: numbers, single letters and signs, and the keys of JSON."""
    is_table = False
    for place, word in enumerate(words[:-2]):
        is_name = word[0].isalpha() and len(word) > 1
        is_sign = word[0].isascii() and len(word) < RUN and not is_name
        is_key = [*words[place + 1 : place + 3]] == ['"', ":"]
        is_cell = word.isdigit() or is_sign or word == "x"
        if word == " " or not (is_cell or is_key):
            return False
        is_table = is_table or word.isalnum() or word == "\n"
    return is_table


def _has_short_lines(words: Sequence[str]) -> bool:
    """Whether most whole lines are short and end as no sentence does; items of a numbered list are sentences."""
    lines: list[list[str]] = [[]]
    for word in words:
        if word == "\n":
            lines.append([])
        else:
            lines[-1].append(word)
    whole = [line for line in lines[1:-1] if line]
    short = 0
    for line in whole:
        is_item = line[0].isdigit() and [*line[1:2]] in (["."], [")"])
        short += len(line) <= SHORT_LINE and line[-1][0] not in _ENDS and not is_item
    return 2 * short > len(whole)
