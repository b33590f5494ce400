"""Texts and token ids to check for repetition, from a file or a caller, as records of plain ids."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

from sinkscope.errors import SinkscopeError
from sinkscope.loops.signals import Ids

Format = Literal["auto", "text", "jsonl"]
FIELDS = ("tokens", "output", "text")  # of a JSON line, the first that is there: ids are more exact than text
_EXPECTED = "text or output (a string) or tokens (a list of ids)"
_LINES = (".jsonl", ".ndjson")
_WORDS = re.compile(
    r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff]"  # written without spaces: a character each
    r"|(?:(?![\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff])\w){1,12}"
    r"|[^\w\s]"
)


class TokenRecord(NamedTuple):
    """What a model wrote, as ids.

    Attributes:
        name: what it is called in the result.
        ids: its tokens, as numbers.
    """

    name: str
    ids: list[int]


def split(text: str) -> list[str]:
    """Words of at most 12 letters or digits (longer ones in pieces), and every other sign; white space is dropped.

    No tokenizer is needed, and the tokens are about as long as those of a large vocabulary. Chinese, Japanese and
    Korean characters stand alone.
    """
    return _WORDS.findall(text)


def number(tokens: Iterable[object]) -> list[int]:
    """Tokens as ids, counted in the order in which they first come."""
    known: dict[object, int] = {}
    return [known.setdefault(token, len(known)) for token in tokens]


def as_records(given: str | Sequence[Any] | Ids) -> list[TokenRecord]:
    """Records of a text, of token ids, or of several of either; records stay what they are.

    Raises:
        SinkscopeError: it is something else, or there is nothing in it.
    """
    if isinstance(given, str):
        return [_record("text", given)]
    listed = _listed(given)
    if not isinstance(listed, list | tuple) or not listed:
        raise SinkscopeError(f"{_short(given)} cannot be checked: give a text, token ids, or several of either")
    if all(isinstance(one, TokenRecord) for one in listed):
        return list(listed)
    if isinstance(listed[0], int):
        return [_record("ids", listed)]
    return [_record(f"{i}", one) for i, one in enumerate(listed, 1)]


def parse(text: str, name: str, form: Format = "auto") -> list[TokenRecord]:
    """Records of a file's text.

    Args:
        text: the file's content.
        name: of the file; `.jsonl` and `.ndjson` are JSON lines, anything else is one text.
        form: "text" or "jsonl" instead of what the name says.

    Raises:
        SinkscopeError: it is empty, or a line is not an object with one of the fields `FIELDS`.
    """
    if not text.strip():
        raise SinkscopeError(f"{name} is empty: expected a text, or JSON lines with {_EXPECTED}")
    lines = form == "jsonl" or (form == "auto" and name.lower().endswith(_LINES))
    if not lines:
        return [_record(name, text)]
    return [_line(line, f"{name} line {i}", i) for i, line in enumerate(text.split("\n"), 1) if line.strip()]


def _line(line: str, where: str, number_: int) -> TokenRecord:
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise SinkscopeError(f"{where} is not JSON ({reason.lower()}): expected an object with {_EXPECTED}") from None
    field = next((f for f in FIELDS if f in data), None) if isinstance(data, dict) else None
    if field is None:
        raise SinkscopeError(f"{where} has none of the fields {', '.join(FIELDS)}: expected an object with {_EXPECTED}")
    return _record(f"line {number_}", data[field], f"{where}: {field}")


def _record(name: str, value: Any, where: str = "the input") -> TokenRecord:
    """A string, a list of ids, or a list of strings."""
    if isinstance(value, str):
        return TokenRecord(name, number(split(value)))
    value = _listed(value)
    if isinstance(value, list | tuple):
        if all(isinstance(v, str) for v in value):
            return TokenRecord(name, number(value))
        if all(isinstance(v, int) and not isinstance(v, bool) and 0 <= v < 1 << 32 for v in value):
            return TokenRecord(name, list(value))
    raise SinkscopeError(f"{where} is {_short(value)}: expected a string, or a list of token ids from 0 to 2**32 - 1")


def _listed(value: Any) -> Any:
    """Arrays and tensors as lists."""
    to_list = getattr(value, "tolist", None)
    return to_list() if callable(to_list) else value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
