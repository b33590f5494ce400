"""Convert dataclasses to JSON types, and remove private folders from paths; `records.build` is the way back."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path, PurePath
from typing import Any

from sinkscope.errors import SinkscopeError

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
