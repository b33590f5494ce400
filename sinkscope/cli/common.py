"""Options that commands share, and what every command does before and after its work."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from sinkscope._console import emit, print_result
from sinkscope.errors import SinkscopeError
from sinkscope.output import check_writable, read_text


class Backend(StrEnum):
    """Kinds of model object."""

    bridge = "bridge"
    hf = "hf"
    nnsight = "nnsight"


def check_outputs(json: str | None = None, html: str | None = None, png: str | None = None, **more: str | None) -> None:
    """Refuse before the work what could not be written after it; `more` are files that only this command writes."""
    paths = (json, html, png, *more.values())
    files = [path for path in paths if path not in (None, "-")]
    written = [str(check_writable(path)) for path in files if path is not None]
    for path in written:
        if written.count(path) > 1 and not path.startswith("/dev/"):
            raise SinkscopeError(f"{Path(path).name} is given for two outputs: give each its own file")
    if "-" in paths[1:]:
        raise SinkscopeError("only --json writes to standard output with -: give the name of a file")
    if png is not None:
        from sinkscope.html import check_png

        check_png()


def deliver(
    result: Any, json: str | None, html: str | None, png: str | None, also: Mapping[str, Any] | None = None
) -> None:
    """Standard output first: what cannot be written to a file is at least seen.

    Args:
        result: what the command found.
        json: file for it.
        html: file for it.
        png: file for its figure.
        also: further results, printed below; in the JSON each is a key beside the envelope's own.
    """
    more = also or {}
    if json != "-":
        print_result(result)
        for other in more.values():
            print()
            print_result(other)
    if json is not None:
        emit(json, result.to_json(**more))
    if html is not None:
        from sinkscope.html import save_html

        save_html(result, html, *more.values())
    if png is not None:
        from sinkscope.html import save_png

        save_png(result, png)


def layer_head(name: str) -> tuple[int, int]:
    """What `--head LAYER.HEAD` names."""
    layer, dot, head = name.partition(".")
    if not (dot and layer.isdigit() and head.isdigit()):
        raise SinkscopeError(f"--head {name!r}: expected layer and head with a dot between, such as 5.3")
    return int(layer), int(head)


def read_prompt(name: str) -> str:
    """Text of a file, or of standard input for "-"; it may not be empty."""
    text = read_text(name)
    if not text.strip():
        raise SinkscopeError("the prompt is empty: write at least one word into the file")
    return text
