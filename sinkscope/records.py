"""Files of records: JSON lines, one JSON array, or parquet, checked against a type, with one-line errors."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from functools import cache, wraps
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, dataclass_transform, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, Field, Strict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from sinkscope._plain import parse_json
from sinkscope.errors import SinkscopeError

Number = Annotated[float, Strict(), Field(allow_inf_nan=False)]
Share = Annotated[float, Strict(), Field(ge=0, le=1, allow_inf_nan=False)]
Whole = Annotated[int, Strict(), Field(ge=0)]
Natural = Annotated[int, Strict(), Field(ge=1)]
_type_adapter: Callable[[Any], Any] = cache(TypeAdapter)


def conform(kind: Any, value: Any, name: str, *, page: str | None = None) -> Any:
    """Return `value` if it is of the type `kind`.

    Args:
        kind: A type, such as `Whole` or `list[Share]`.
        value: Any object.
        name: Name of the value, for the error.
        page: Documentation page to name in the error.

    Raises:
        SinkscopeError: It is not; the message says what was expected.
    """
    try:
        return _type_adapter(kind).validate_python(value)
    except ValidationError as error:
        raise SinkscopeError(_refusal(error, value, name), page=page) from None


@dataclass_transform(frozen_default=True)
def checked(cls: type[T]) -> type[T]:
    """Make a frozen dataclass whose fields are checked against their annotations; the error is a SinkscopeError."""
    made: Any = dataclass(frozen=True, config=ConfigDict(extra="forbid"))(cls)
    build: Callable[..., None] = made.__init__
    usual = {name: field.default for name, field in made.__dataclass_fields__.items() if field.default is not MISSING}

    @wraps(build)
    def init(self: Any, *args: Any, **given: Any) -> None:
        try:
            build(self, *args, **given)
        except ValidationError as error:
            problem = error.errors()[0]
            if isinstance(cause := problem.get("ctx", {}).get("error"), SinkscopeError):
                raise cause from None  # what __post_init__ said
            field = str(problem["loc"][0])
            default = f"; the default is {usual[field]}" if field in usual else ""
            raise SinkscopeError(f"{_refusal(error, given, '')}{default}") from None

    made.__init__ = init
    return made


def _refusal(error: ValidationError, data: Any, name: str) -> str:
    """The first problem in one line: the place, what is there, what was expected."""
    problems = error.errors(include_url=False)
    missing = problems[0]["type"] == "missing"
    place, value = "", data
    for part in problems[0]["loc"]:  # names of members of a union stand in between
        if isinstance(value, Mapping) and (part in value or missing):
            place, value = f"{place}.{part}".removeprefix("."), value.get(part)
        elif isinstance(value, Sequence) and isinstance(part, int):
            place, value = f"{place}[{part}]", value[part]
    place = f"{name}: {place}" if name and place else name + place
    if missing:
        return f"{place} is missing"
    same = [p["msg"] for p in problems if p["input"] is problems[0]["input"]]
    expected = " or ".join(dict.fromkeys(m.removeprefix("Input should be ") for m in same))
    shown = repr(problems[0]["input"])
    return f"{place} is {shown if len(shown) <= 80 else f'{shown[:77]}...'}: expected {expected}"


_WORDS = {
    "a valid integer": "a whole number",
    "a valid number": "a number",
    "a valid boolean": "True or False",
    "a whole number or a number": "a number",
    "greater than or equal to": "a number from",
}
"""How errors say what pydantic says."""


def check_fields(made: Any) -> None:
    """Refuse fields of a dataclass whose values do not fit the numbers, switches and words that are annotated there.

    A bool is not a number here, an int is, and fields of any other type are not checked. Neither are those of a class
    whose annotations use names that are imported for type checkers only. `Natural`, `Whole` and `Share` are
    numbers with a range.

    Raises:
        SinkscopeError: A field does not fit; the message names the first, its value and what was expected.
    """
    try:
        hints = get_type_hints(type(made), include_extras=True)
    except NameError:
        return
    for field in fields(made):
        value = getattr(made, field.name)
        try:
            if _checkable(hints[field.name]):
                _type_adapter(hints[field.name]).validate_python(value, strict=True)
        except ValidationError as error:
            found = dict.fromkeys(problem["msg"].removeprefix("Input should be ") for problem in error.errors())
            expected = " or ".join(found)
            for theirs, ours in _WORDS.items():
                expected = expected.replace(theirs, ours)
            raise SinkscopeError(f"{type(made).__name__}: {field.name}={value!r}: expected {expected}") from None


def _checkable(hint: Any) -> bool:
    if get_origin(hint) in (Annotated, Union, UnionType):
        return all(_checkable(part) for part in get_args(hint)[: 1 if get_origin(hint) is Annotated else None])
    return hint in (int, float, bool, NoneType) or get_origin(hint) is Literal


T = TypeVar("T")


def read_records(path: str | os.PathLike[str], type_: type[T], expected: str, *, key: str = "") -> list[T]:
    """The records of a file, each checked against a type.

    Args:
        path: JSON lines, one JSON array, or `.parquet`.
        type_: A dataclass or pydantic model. Nothing is converted: "7" is not a number. Further checks belong in its
            `__post_init__`, as a ValueError whose message says what was found and what was expected.
        expected: What the caller should give; errors end with ": give {expected}".
        key: Field whose value must differ between records.

    Raises:
        SinkscopeError: The file cannot be read or has no records, or a record has another form; the message names
            the file, the line, the field, what was found and what was expected.
    """
    found = [(where, check(row, type_, where, expected)) for where, row in read_rows(path, expected)]
    if key:
        refuse_twins([(where, getattr(record, key)) for where, record in found], key, expected)
    return [record for _, record in found]


def check(value: Any, type_: type[T], where: str, expected: str) -> T:
    """Make one record from a JSON value.

    Raises:
        SinkscopeError: The value has another form; the message begins with `where`.
    """
    try:  # from JSON, because pydantic takes an array for a tuple there alone
        return _type_adapter(type_).validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field, wanted = _field(first["loc"]), first["msg"].removeprefix("Input should be ")
        if first["type"] == "value_error":
            said = f"{where}{', ' + field if field else ''}: {wanted.removeprefix('Value error, ')}"
        elif first["type"] == "missing":
            said = f"{where} has no field {field!r}"
        elif first["type"] == "unexpected_keyword_argument":
            said = f"{where}: the field {field!r} is unknown"
        else:
            shown = f"{where}: {field} is {first['input']!r:.40}" if field else f"{where} is {first['input']!r:.40}"
            said = f"{shown}, expected {wanted}"
        raise SinkscopeError(f"{said}: give {expected}") from None


def refuse_twins(keys: list[tuple[str, Any]], name: str, expected: str) -> None:
    """Refuse records with the same name.

    Args:
        keys: Where each record stands, and its name.
        name: Name of the field.
        expected: What the caller should give.

    Raises:
        SinkscopeError: Two records have the same name.
    """
    first: dict[Any, str] = {}
    for where, key in keys:
        if key in first:
            raise SinkscopeError(f"{where}: {name} {key!r} is that of {first[key]} too: give {expected}")
        first[key] = where


def read_rows(path: str | os.PathLike[str], expected: str) -> Iterator[tuple[str, Any]]:
    """Each row of a file and its location, such as "chat.jsonl line 3".

    Args:
        path: `.parquet`, one JSON array, or one JSON value per line.
        expected: What the caller should give.

    Raises:
        SinkscopeError: The file does not exist, is empty or not UTF-8, a line is not JSON (its number is given), or it
            is parquet and no library for it is installed.
    """
    file = Path(path).expanduser()
    return (
        _parquet(file, expected)
        if file.suffix == ".parquet"
        else rows_of(read_text(file, expected), file.name, expected)
    )


def rows_of(text: str, name: str, expected: str) -> Iterator[tuple[str, Any]]:
    """Each row of a text: one JSON array or object, or one JSON value per line.

    Raises:
        SinkscopeError: A line is not JSON.
    """
    try:
        whole = _loads(text)
    except RecursionError:
        problem = f"{name} line 1 is not JSON (it is nested too deeply)"
    except ValueError as error:
        # An array over many lines is broken elsewhere than in its first.
        problem = f"{name} line {getattr(error, 'lineno', 1)} is not JSON"
    else:
        if isinstance(whole, list):
            yield from ((f"{name} row {number}", row) for number, row in enumerate(whole, 1))
        else:
            yield f"{name} line {1 + text[: -len(text.lstrip())].count(chr(10))}", whole
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield f"{name} line {number}", json_line(line, problem or f"{name} line {number} is not JSON", expected)
            problem = ""


def json_line(line: str | bytes, problem: str, expected: str) -> Any:
    """The value on a line.

    Raises:
        SinkscopeError: It is not JSON, not UTF-8, or nested too deeply; the message is `problem`, and what to give.
    """
    try:
        return _loads(line if isinstance(line, str) else line.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        raise SinkscopeError(f"{problem}: give {expected}") from None


def _loads(text: str) -> Any:
    """Parse JSON. Half a surrogate pair, which JSON allows, becomes "?", because tokenizers and files reject it."""
    value = parse_json(text)
    if "\\ud" in text or "\\uD" in text:
        value = json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
    return value


def read_text(path: str | os.PathLike[str], expected: str) -> str:
    """The text of a file.

    Raises:
        SinkscopeError: The file does not exist, is empty, or is not UTF-8.
    """
    file = Path(path).expanduser()
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise SinkscopeError(f"{file.name} is not UTF-8 text: give {expected}") from None
    except OSError as error:
        reason = (error.strerror or "it cannot be read").lower()
        raise SinkscopeError(f"{os.fspath(path)!r}: {reason}: give {expected}") from None
    if not text.strip():
        raise SinkscopeError(f"{file.name} is empty: give {expected}")
    return text


def _field(place: tuple[int | str, ...]) -> str:
    """A path such as `turns[1].answers`; pydantic counts from 0, as JSON does."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in place if part != "[key]")
    return "".join(parts).removeprefix(".")


def _parquet(file: Path, expected: str) -> Iterator[tuple[str, Any]]:
    if not file.is_file():
        raise SinkscopeError(f"{file.name!r}: no such file: give {expected}")
    import pandas as pd

    try:
        rows = json.loads(pd.read_parquet(file).to_json(orient="records") or "[]")
    except ImportError:
        raise SinkscopeError(f"{file.name} is a parquet file, which needs pyarrow: pip install pyarrow") from None
    except Exception as error:  # pyarrow's own kinds, which may not be there to be named
        raise SinkscopeError(f"{file.name} cannot be read as parquet ({error!s:.60}): give {expected}") from None
    if not rows:
        raise SinkscopeError(f"{file.name} is empty: give {expected}")
    yield from ((f"{file.name} row {number}", row) for number, row in enumerate(rows, 1))
