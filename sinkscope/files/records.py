"""Files of records: JSON lines, checked against a type, with one-line errors."""

from __future__ import annotations

import json
import os
from ast import literal_eval
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import cache, lru_cache
from math import nan
from typing import (
    Annotated,
    Any,
    NamedTuple,
    TypeVar,
    get_origin,
    get_type_hints,
)

from pydantic import (
    ConfigDict,
    Field,
    PydanticSchemaGenerationError,
    Strict,
    TypeAdapter,
    ValidationError,
)
from pydantic_core import SchemaValidator, core_schema

from sinkscope.errors import SinkscopeError
from sinkscope.files.output import PathName, read_text
from sinkscope.files.plain import parse_json

_INPUT = "Input should be "
"""How pydantic begins most of its messages."""


class Wording(NamedTuple):
    """What an error says that a type expects; for use in `Annotated`."""

    words: str

    def __get_pydantic_core_schema__(self, kind: Any, handler: Callable[[Any], Any]) -> Any:
        return core_schema.custom_error_schema(handler(kind), "said", custom_error_message=_INPUT + self.words)


Finite = Annotated[float, Strict(), Field(allow_inf_nan=False), Wording("a finite number")]
Share = Annotated[float, Strict(), Field(ge=0, le=1), Wording("a number from 0 to 1")]
PositiveShare = Annotated[float, Strict(), Field(gt=0, le=1), Wording("a share above 0 and up to 1")]
Whole = Annotated[int, Strict(), Field(ge=0), Wording("a whole number from 0")]
Natural = Annotated[int, Strict(), Field(ge=1), Wording("a whole number from 1")]
Budget = Annotated[
    Natural | PositiveShare,
    Wording("a number of tokens from 1, or a fraction of the prompt above 0.0 and up to 1.0"),
]
T = TypeVar("T")


def share_of(share: float, count: int) -> int:
    """Return a share of a count, rounded down: 0.29 of 100 is 29, of which floating point numbers make 28."""
    return int(share * count + 1e-6)


@lru_cache(256)
def _type_adapter(kind: Any) -> Any:
    """What checks values of a type; of a class that pydantic does not know, whether they are instances."""
    try:
        return TypeAdapter(kind)
    except PydanticSchemaGenerationError:
        return TypeAdapter(kind, config=ConfigDict(arbitrary_types_allowed=True))


def checked_value(kind: Any, value: Any, name: str, *, strict: bool = False) -> Any:
    """Return `value` if it is of the type `kind`.

    Args:
        kind: A type, such as `Whole` or `list[Share]`.
        value: Any object.
        name: Name of the value, for the error.
        strict: Whether nothing is converted, except a whole number to a float.

    Raises:
        SinkscopeError: It is not; the message says what was expected.
    """
    try:
        return _type_adapter(kind).validate_python(value, strict=strict)
    except ValidationError as error:
        raise _refusal(error, value, name) from None


def check_values(kind: Any, **values: Any) -> None:
    """Refuse settings that are not of the type `kind`; nothing is converted.

    Raises:
        SinkscopeError: One of the values is of another type; the message names it.
    """
    for name, value in values.items():
        checked_value(kind, value, name, strict=True)


def read_setting(text: str, kind: Any, name: str) -> Any:
    """Read a value of the type `kind` from a text: a number, true, false, none, or a word; of a tuple, between commas.

    A text that is a number is also taken as a word where only a word fits, as the name of a file.

    Raises:
        SinkscopeError: It is of another type; the message begins with `name`.
    """
    value = _literal(text)
    if get_origin(kind) is tuple:
        value = tuple(map(_literal, text.split(",")))
    try:
        return checked_value(kind, value, name, strict=True)
    except SinkscopeError:
        with suppress(SinkscopeError):
            return checked_value(kind, text, name, strict=True)
        raise


_WORDS = {"true": True, "false": False, "none": None}
"""What is typed for the values of Python that are no numbers, in letters of either size."""


def _literal(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        return literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text


def setting_types(cls: Any) -> dict[str, Any]:
    """Return the type of each field of a dataclass, by name; another class has none."""
    if not is_dataclass(cls):
        return {}
    hints = get_type_hints(cls, include_extras=True)
    return {field_of_class.name: hints[field_of_class.name] for field_of_class in fields(cls)}


def read_settings(parts: Sequence[str], types: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Read settings such as "key=value".

    Args:
        parts: The settings.
        types: The type of each, by key.
        where: Beginning of an error.

    Raises:
        SinkscopeError: A setting is unknown or given twice, or a value has the wrong type.
    """
    settings: dict[str, Any] = {}
    for part in parts:
        key, _, text = part.partition("=")
        if key not in types:
            raise SinkscopeError(f"{where}: unknown setting {key!r:.80}; known: {', '.join(types) or 'none'}")
        if key in settings:
            raise SinkscopeError(f"{where}: setting {key!r} is given twice")
        settings[key] = read_setting(text, types[key], f"{where}: {key}")
    return settings


def _refusal(error: ValidationError, value: Any, name: str, then: str = "") -> Any:
    """The error that states the first problem in one line: the place, the value there, and what was expected."""
    problems = error.errors(include_url=False)
    first = problems[0]
    place = f"{name}{_place(value, first)}".replace(": .", ": ")
    if "missing" in first["type"]:
        return SinkscopeError(f"{place} is missing{then}")
    cause = first.get("ctx", {}).get("error")  # raised by __post_init__
    if cause is not None:
        return SinkscopeError(f"{place}: {cause}{then}".replace(": : ", ": "))
    alternatives = [problem["msg"] for problem in problems if repr(problem["input"]) == repr(first["input"])]
    expected = " or ".join(dict.fromkeys(alternatives)).replace(_INPUT, "expected ", 1).replace(_INPUT, "")
    is_of = "" if place.endswith(": ") else "="
    return SinkscopeError(f"{place}{is_of}{first['input']!r:.80}: {expected}{then}")


def _place(value: Any, problem: Any) -> str:
    """Where in a value a problem is, such as ".parts[0].share"; pydantic's steps also name members of unions."""
    place = ""
    for step in problem["loc"]:
        try:
            value = value[step]
        except (LookupError, TypeError) as error:
            if isinstance(error, TypeError) or "missing" not in problem["type"]:
                continue
        place += f"[{step}]" if isinstance(step, int) else f".{step}"
    return place


def check_known(row: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    """Refuse fields of a record that nothing reads, such as a misspelt one.

    Raises:
        SinkscopeError: There is one; the message names it and those that are known.
    """
    for name in row:
        if name not in known:
            raise SinkscopeError(f"{where}: unknown field {name!r:.80}; known: {', '.join(known)}")


def check_fields(settings: Any) -> None:
    """Refuse fields of a dataclass that do not fit their annotations; a bool is not a number here, an int is.

    Raises:
        SinkscopeError: A field does not fit; the message names the first, its value and what was expected.
    """
    for name, kind in setting_types(type(settings)).items():
        checked_value(kind, getattr(settings, name), f"{type(settings).__name__}: {name}", strict=True)


def build(kind: type[T], value: Any, where: str, expected: str = "") -> T:
    """Make a value of a type from JSON, as `plain` writes it; unknown keys are ignored, missing ones take defaults.

    Args:
        kind: A dataclass, or another type.
        value: The content of a file.
        where: Beginning of the error.
        expected: What the caller should give, which ends the error.

    Raises:
        SinkscopeError: A field is missing or has another type.
    """
    then = f": give {expected}" if expected else ""
    text = json.dumps(value, default=repr, ensure_ascii=False)  # JSON: there alone pydantic takes an array for a tuple
    try:
        return _lenient(kind).validate_json(text.encode(errors="replace"), strict=True)
    except ValidationError as error:
        raise _refusal(error, value, f"{where}: ", then) from None
    except (TypeError, OverflowError) as error:  # an array of something else than numbers
        raise SinkscopeError(f"{where}: {error}{then}") from None


_NULL_AS_NAN = core_schema.no_info_after_validator_function(lambda _: nan, core_schema.none_schema())


@cache
def _lenient(kind: Any) -> SchemaValidator:
    """A reader of what `plain` wrote: null is NaN where only a number fits, and an array of numpy is a list."""
    return SchemaValidator(_lenient_schema(TypeAdapter(kind).core_schema))


def _lenient_schema(part: Any) -> Any:
    """A part of pydantic's schema, changed in this way."""
    if isinstance(part, list):
        return [_lenient_schema(value) for value in part]
    if not isinstance(part, dict):
        return part
    if part.get("type") == "is-instance" and hasattr(part["cls"], "array_type"):  # an annotation of jaxtyping
        return core_schema.no_info_after_validator_function(_array, core_schema.list_schema())
    changed: Any = {name: _lenient_schema(value) for name, value in part.items()}
    if part.get("type") == "float":
        return core_schema.union_schema([changed, _NULL_AS_NAN])
    return changed


def _array(value: Any) -> Any:
    import numpy as np  # slow to load, and few results hold arrays

    array = np.asarray(value)
    return array if array.dtype.kind in "bif" else array.astype(float)  # of null, which is NaN


def read_rows(path: PathName, expected: str) -> Iterator[tuple[str, Any]]:
    """Yield each row of a file and its location, such as "chat.jsonl line 3".

    Args:
        path: JSON lines, or one JSON array.
        expected: What the caller should give.

    Raises:
        SinkscopeError: The file does not exist, is empty or not UTF-8, or a line is not JSON (its number is given).
    """
    text, name = read_text(path, f"give {expected}"), os.path.basename(path)
    if not text.strip():
        raise SinkscopeError(f"{name} is empty: give {expected}")
    yield from rows_of_text(text, name, expected)


def rows_of_text(text: str, name: str, expected: str) -> Iterator[tuple[str, Any]]:
    """Yield each row of JSON lines, or each member of one JSON array, and its location.

    Args:
        text: The content of a file.
        name: Its name.
        expected: What the caller should give.

    Raises:
        SinkscopeError: A line is not JSON, or the array is empty.
    """
    members = _array_in(text)
    if members is None:
        yield from json_rows(text.split("\n"), name, expected)
        return
    if not members:
        raise SinkscopeError(f"{name} is empty: give {expected}")
    if all(isinstance(member, dict) and "role" in member for member in members):  # the messages of one chat
        members = [members]
    for number, member in enumerate(members, 1):
        yield f"{name} record {number}", member


def _array_in(text: str) -> list[Any] | None:
    """The members of a text that is one JSON array; None of JSON lines."""
    if not text.lstrip().startswith("["):
        return None
    try:
        return parse_json(text)
    except ValueError:
        return None


def json_rows(lines: Iterable[str | bytes], name: str, expected: str) -> Iterator[tuple[str, Any]]:
    """Yield each row of lines of a file, and its location; lines without a row are left out.

    Raises:
        SinkscopeError: A line is not JSON.
    """
    for number, line in enumerate(lines, 1):
        where = f"{name} line {number}"
        if line.strip():
            try:
                row = parse_json(line)
            except ValueError:
                raise SinkscopeError(f"{where} is not JSON: give {expected}") from None
            yield where, row
