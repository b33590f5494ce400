"""Convert dataclasses to JSON types, and remove private folders from paths; `records.build` is the way back."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

from sinkscope.errors import SinkscopeError

_PATH = re.compile(r"(^|=)(?:/|~|\\\\|[A-Za-z]:[\\/]|\.\.(?=[\\/]))(?:.*[\\/])?([^\\/]+)[\\/]*$")
"""A path through folders, also behind the sign of an option, --text=/some/where, and its last part."""
_UNUSUAL = re.compile(r"[^ -~\n\t\u200c\u200d\u00a0\u1680\u2000-\u200a\u202f\u205f\u3000]")
"""Neither ASCII, nor a joiner of letters and of parts of an emoji, nor a space."""


def pathless(text: str) -> str:
    """Return a text in which a path through folders of this machine is cut to its last part."""
    if "\n" not in text:
        text = _PATH.sub(r"\1\2", text)
    home = str(Path.home())
    return re.sub(rf"(?<![\w.~-]){re.escape(home)}(?![\w.-])", "~", text) if len(home) > 1 else text


def visible(text: str) -> str:
    """Return a text with the characters escaped that steer a terminal or reverse the order of letters; spaces stay."""
    return _UNUSUAL.sub(_written_out, text)


def in_one_line(name: str) -> str:
    """Return a name with its control characters escaped, new lines and tabs too."""
    return visible(name).replace("\n", r"\n").replace("\t", r"\t")


def check_encodable(text: str, name: str) -> None:
    """Refuse a text that is not Unicode, which no tokenizer takes.

    Raises:
        SinkscopeError: It holds half of a surrogate pair, by which Python also writes a byte that is not UTF-8.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise SinkscopeError(
            f"{name} holds half of a surrogate pair, or a byte that is not UTF-8, character {error.start + 1}: replace "
            "it, as in text.encode(errors='replace').decode()"
        ) from None


def _written_out(match: re.Match[str]) -> str:
    character = match[0]
    return character if character.isprintable() else character.encode("unicode_escape").decode()


def parse_json(text: str | bytes) -> Any:
    """Parse JSON.

    Raises:
        ValueError: It is not JSON, or is nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def plain(value: Any) -> Any:
    """Convert to types of JSON: tuples, sets, arrays and tensors to lists, dataclasses to dicts, NaN and inf to None.

    Args:
        value: Anything that a result may hold.

    Raises:
        SinkscopeError: Something in it cannot be converted.
    """
    return to_jsonable_python(value, inf_nan_mode="null", fallback=_converted)


def named_file(value: Any) -> Any:
    """Return the value of a setting that names a file or folder, without the folders of this machine.

    Args:
        value: The name as it was given; None and objects stay.
    """
    if isinstance(value, str | os.PathLike):
        return pathless(os.fspath(value))
    return value


def _converted(value: Any) -> Any:
    to_list = getattr(value, "tolist", None)
    if callable(to_list):  # numpy arrays and scalars, tensors
        return to_list()
    if type(value).__module__ == "torch":  # a dtype or a device
        return str(value).removeprefix("torch.")
    raise SinkscopeError(
        f"{type(value).__name__} cannot be written to a result: use numbers, strings, None, tuples, dicts, dataclasses"
    )
