"""Settings of the wrong type, before anything is computed with them."""

from __future__ import annotations

from dataclasses import fields
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from sinkscope.errors import SinkscopeError

_NAMES: dict[Any, str] = {int: "a whole number", float: "a number", bool: "True or False", NoneType: "None"}


def check_fields(made: Any) -> None:
    """Refuse fields of a dataclass whose values are of another type than numbers, switches and words annotated there.

    A bool is no number here, a whole number is a number, and fields of any other type are left alone. So are those of
    a class whose annotations name what is imported for type checkers only.

    Raises:
        SinkscopeError: the first such field, with its value and what was expected.
    """
    try:
        hints = get_type_hints(type(made))
    except NameError:
        return
    for field in fields(made):
        hint, value = hints[field.name], getattr(made, field.name)
        kinds = list(get_args(hint)) if get_origin(hint) in (Union, UnionType) else [hint]
        words = [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
        types = [kind for kind in kinds if get_origin(kind) is not Literal]
        if (
            any(not isinstance(kind, type) or kind not in _NAMES for kind in types)
            or value in words
            or _fits(value, types)
        ):
            continue
        names = [_NAMES[kind] for kind in types if not (kind is int and float in types)]
        quoted = [f'"{word}"' for word in words]
        expected = " or ".join([*names, *quoted]) if names else f"one of {', '.join(words)}"
        raise SinkscopeError(f"{type(made).__name__}: {field.name}={value!r}: expected {expected}")


def _fits(value: Any, types: list[Any]) -> bool:
    if isinstance(value, bool):
        return bool in types
    return isinstance(value, (*types, int)) if float in types else isinstance(value, tuple(types))
