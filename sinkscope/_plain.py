"""Convert between dataclasses and JSON types, and remove private folders from paths."""

from __future__ import annotations

import json
import math
import os
import re
import types
from collections.abc import Mapping, Sequence, Set
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from pathlib import Path, PurePath
from typing import Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from sinkscope.errors import SinkscopeError

T = TypeVar("T")
_ROOTED = re.compile(r"^(?:/|~|\\\\|[A-Za-z]:[\\/]|\.\.(?:[\\/]|$))")


def pathless(text: str) -> str:
    """`text`, but a path that leads through folders of this machine becomes relative, or its last part."""
    if not _ROOTED.match(text):
        head, equals, tail = text.partition("=")
        text = f"{head}={pathless(tail)}" if equals else text  # --text=/some/where
    elif "\n" not in text:
        text = _below_here(text) or re.split(r"[\\/]", text.rstrip("\\/"))[-1]
    home = str(Path.home())
    return re.sub(rf"(?<![\w.~-]){re.escape(home)}(?![\w.-])", "~", text) if len(home) > 1 else text


def _below_here(path: str) -> str | None:
    """`path` relative to the current folder, if it lies below and the way there does not lead through the home."""
    try:
        here = Path.cwd()
        inside = Path(os.path.normpath(Path(path).expanduser())).relative_to(here)
    except (OSError, RuntimeError, ValueError):
        return None
    return inside.as_posix() if here not in Path.home().parents else None


def visible(text: str) -> str:
    """`text` with control characters written out: what a model or a file says must not steer a terminal."""
    return "".join(c if c in "\n\t" or c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def parse_json(text: str | bytes) -> Any:
    """Parse JSON.

    Raises:
        ValueError: It is not JSON, is nested too deeply, or has an integer too large for any field.
    """
    try:
        return json.loads(text, parse_int=_whole)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _whole(digits: str) -> int:
    if len(digits) > 20:
        raise ValueError(f"a number has {len(digits)} digits")
    return int(digits)


def plain(value: Any, *, scrub: bool = False) -> Any:
    """`value` in the types of JSON: tuples, sets, arrays and tensors as lists, dataclasses as dicts, NaN and inf None.

    Args:
        value: Anything that a result may hold.
        scrub: Also remove this machine's folders from strings (see `pathless`).

    Raises:
        SinkscopeError: Something in it cannot be converted.
    """
    if isinstance(value, Enum):
        value = value.value
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, str):
        return pathless(value) if scrub else str(value)
    if isinstance(value, PurePath):
        return pathless(str(value))
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name), scrub=scrub) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(k): plain(v, scrub=scrub) for k, v in value.items()}
    if isinstance(value, Sequence | Set):
        return [plain(v, scrub=scrub) for v in (sorted(value, key=repr) if isinstance(value, Set) else value)]
    if callable(to_list := getattr(value, "tolist", None)):  # numpy arrays and scalars, tensors
        return plain(to_list(), scrub=scrub)
    if type(value).__module__ == "torch":  # a dtype or a device
        return str(value).removeprefix("torch.")
    raise SinkscopeError(
        f"{type(value).__name__} cannot be written to a result: use numbers, strings, None, tuples, dicts, dataclasses"
    )


def build(cls: type[T], data: Any, where: str) -> T:
    """Rebuild the dataclass `cls` from the output of `plain`; unknown keys are ignored, missing ones take defaults.

    Raises:
        SinkscopeError: A field is missing or has another type; `where` begins the message.
    """
    if not isinstance(data, dict):
        raise SinkscopeError(f"{where} is {_short(data)}, expected an object with the fields of {cls.__name__}")
    hints = get_type_hints(cls)
    values: dict[str, Any] = {}
    for field in fields(cls):  # type: ignore[arg-type]
        if get_origin(hints[field.name]) is ClassVar or not field.init:
            continue
        if field.name in data:
            values[field.name] = _read(hints[field.name], data[field.name], f"{where}: {field.name}")
        elif field.default is MISSING and field.default_factory is MISSING:
            raise SinkscopeError(f"{where} lacks {field.name!r}: it was not written by this version, or is not whole")
    return cls(**values)


def _read(hint: Any, value: Any, where: str) -> Any:
    """`value` as the type `hint`."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _read_union(hint, value, where)
    if isinstance(hint, type) and is_dataclass(hint):
        return build(hint, value, where)
    if isinstance(value, list) and origin in (tuple, list):
        each = [args[0]] * len(value) if origin is list or args[1:] == (...,) else list(args)
        if len(each) == len(value):
            return origin(_read(h, v, f"{where}[{i}]") for i, (h, v) in enumerate(zip(each, value, strict=True)))
    if origin in (dict, Mapping) and isinstance(value, dict):
        return {k: _read(args[1], v, f"{where}.{k}") for k, v in value.items()}
    if hasattr(hint, "array_type") and isinstance(value, list):
        return _array(hint, value)
    if _fits(hint, origin, value):
        return _number(value) if hint is float else value
    expected = getattr(hint, "__name__", None) if origin is None else str(hint).replace("typing.", "")
    raise SinkscopeError(f"{where} is {_short(value)}, expected {expected or hint}")


def _number(value: Any) -> float:
    """A float; NaN and infinity have no form in JSON but null."""
    return math.nan if value is None else float(value)


def _array(hint: Any, value: list[Any]) -> Any:
    """A numpy array as its jaxtyping annotation names it."""
    import numpy as np

    return np.asarray(value, dtype=float if any("float" in str(dtype) for dtype in hint.dtypes) else None)


def _read_union(hint: Any, value: Any, where: str) -> Any:
    options = get_args(hint)
    if value is None and type(None) in options:
        return None
    for option in options:
        try:
            return _read(option, value, where)
        except SinkscopeError:
            continue
    raise SinkscopeError(f"{where} is {_short(value)}, expected {str(hint).replace('typing.', '')}")


def _fits(hint: Any, origin: Any, value: Any) -> bool:
    if hint is Any:
        return True
    if origin is Literal:
        return value in get_args(hint)
    if hint is float:
        return value is None or (isinstance(value, int | float) and not isinstance(value, bool))
    if hint is int and isinstance(value, bool):
        return False
    return origin is None and isinstance(hint, type) and isinstance(value, hint)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
