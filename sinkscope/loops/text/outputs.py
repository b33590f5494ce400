"""Outputs of models as token ids: from texts, lists of ids, and files of either."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

from sinkscope.errors import SinkscopeError
from sinkscope.files.records import rows_of
from sinkscope.loops.text.signals import Ids, id_list, is_token_id

FileForm = Literal["auto", "text", "jsonl"]
FIELDS = ("tokens", "output", "text")  # of a JSON line, the first that is there: ids are more exact than text
_EXPECTED = "text or output (a string) or tokens (a list of ids)"
_CJK = r"\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff"  # written without spaces
_WORDS = re.compile(
    rf"[{_CJK}]"  # a character each
    rf"|(?:(?![{_CJK}])\w){{1,12}}"
    r"|([^\w\s])\1{0,11}"
    r"|\s{16,}"
)
_GAP, _BLANK = 16, 4  # white space that is a token, and characters of each further one


class TokenRecord(NamedTuple):
    """A model's output as token ids.

    Attributes:
        name: Name of the record in the result.
        ids: Token ids.
        text: The text of which they are the words; None if only the ids are known.
    """

    name: str
    ids: list[int]
    text: str | None = None


class Splitter:
    """Splits a text that arrives in pieces, as `split` splits the whole text."""

    def __init__(self) -> None:
        self._rest = ""  # it may belong to a word that goes on

    def feed(self, piece: str, last: bool = False) -> list[str]:
        """The words that a piece completes; with `last`, also the one that is not complete."""
        text = self._rest + piece
        found = spans(text)
        words = [word for word, _ in found]
        self._rest = ""
        if last or not text:
            return words
        if words and words[-1] == " ":  # a gap that goes on
            self._rest = " " * (_GAP - _BLANK + len(text) - found[-1][1])
        elif words and found[-1][1] == len(text):
            self._rest = words.pop()
        else:
            self._rest = text[len(text.rstrip()) :]
        return words


def split(text: str) -> list[str]:
    """Split into words of at most 12 letters or digits (longer ones in pieces), other characters, and long gaps.

    No tokenizer is needed, and the tokens are about as long as those of a large vocabulary. Up to 12 equal characters
    in a row form one token, so a ruler is only a few tokens. Chinese, Japanese and Korean characters stand alone. White
    space counts from 16 characters in a row on: they are a token " ", and each further 4 another one.
    """
    return [word for word, _ in spans(text)]


def spans(text: str) -> list[tuple[str, int]]:
    """The words of `split`, each with the number of characters up to its end; a gap ends with its last character."""
    words: list[tuple[str, int]] = []
    for match in _WORDS.finditer(text):
        word = match[0]
        if not word.isspace():
            words.append((word, match.end()))
            continue
        for place in range(match.start() + _GAP, match.end() + 1, _BLANK):
            words.append((" ", place))
    return words


def number(tokens: Iterable[object]) -> list[int]:
    """Number the tokens in the order of their first occurrence."""
    numbers: dict[object, int] = {}
    return [numbers.setdefault(token, len(numbers)) for token in tokens]


def is_output(row: Any) -> bool:
    """Whether a JSON value is an output: it has a text, or tokens, in one of the fields `FIELDS`."""
    if not isinstance(row, dict):
        return False
    for field in FIELDS:
        value = row.get(field)
        if isinstance(value, str) or (isinstance(value, list) and value and not isinstance(value[0], dict)):
            return True
    return False


def as_records(outputs: str | Sequence[Any] | Ids) -> list[TokenRecord]:
    """Records of a text, of token ids, or of several of either; records are returned unchanged.

    Raises:
        SinkscopeError: The input is of another type, or is empty.
    """
    items: Any = id_list(outputs)
    if not isinstance(items, str | list | tuple) or not items:
        raise SinkscopeError(f"{outputs!r} cannot be checked: give a text, token ids, or several of either")
    if isinstance(items, str) or isinstance(items[0], int):
        return [_record("text", items, "the input")]
    records: list[TokenRecord] = []
    for place, item in enumerate(items, 1):
        records.append(item if isinstance(item, TokenRecord) else _record(str(place), item, "the input"))
    return records


def parse(text: str, name: str, form: FileForm = "auto") -> list[TokenRecord]:
    """Split the text of a file into records.

    Args:
        text: The file's content.
        name: Name of the file; `.jsonl` and `.ndjson` are JSON lines, anything else is one text.
        form: "text" or "jsonl", overriding the name; `.json` counts as JSON lines, because it may be a list.

    Raises:
        SinkscopeError: The text is empty, or a line is not an object with one of the fields `FIELDS`.
    """
    if not text.strip():
        raise SinkscopeError(f"{name} is empty: expected a text, or JSON lines with {_EXPECTED}")
    if form == "auto":
        form = "jsonl" if name.lower().endswith((".json", ".jsonl", ".ndjson")) else "text"
    if form == "text":
        return [_record(name, text, name)]
    records: list[TokenRecord] = []
    for where, row in rows_of(text, name, f"JSON lines with {_EXPECTED}"):
        fields = [field for field in FIELDS if isinstance(row, dict) and field in row]
        if not fields:
            raise SinkscopeError(
                f"{where} has none of the fields {', '.join(FIELDS)}: expected an object with {_EXPECTED}"
            )
        records.append(_record(where.removeprefix(f"{name} "), row[fields[0]], f"{where}: {fields[0]}"))
    return records


def _record(name: str, value: Any, where: str) -> TokenRecord:
    """A record of a string, a list of ids, or a list of strings."""
    if isinstance(value, str):
        return TokenRecord(name, number(split(value)), value)
    tokens: Any = id_list(value)
    if isinstance(tokens, list | tuple):
        if all(isinstance(token, str) for token in tokens):
            return TokenRecord(name, number(tokens))
        if all(is_token_id(token) for token in tokens):
            return TokenRecord(name, list(tokens))
    raise SinkscopeError(f"{where} is {value!r}: expected a string, or a list of token ids from 0 to 2**32 - 1")
