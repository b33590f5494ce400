"""`sinkscope loops`: check files for repetition, follow a stream, or stand as a proxy. Loads no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sinkscope.app.loops.check import check_files
from sinkscope.app.loops.follow import follow_stream
from sinkscope.app.loops.proxy import serve_proxy
from sinkscope.errors import SinkscopeError
from sinkscope.files.arguments import parameters_of
from sinkscope.loops.text.check import LoopCheck

TASKS: dict[str, Callable[..., LoopCheck | None]] = {"": check_files, "follow": follow_stream, "proxy": serve_proxy}
"""The three tasks of the command, by the option that asks for each."""


def loops(*, to_files: Mapping[str, str] | None = None, **arguments: Any) -> LoopCheck | None:
    """Check whether texts or a stream repeat themselves, and since when. Loads no model.

    Each one loops, looped, is suspicious, is clean, or has no text. The exit status is 3 if one loops or looped, and
    else 1 if one has no text, or cannot be read.

    Args:
        to_files: What is written of the result: the paths by "json", "html" and "csv".
        arguments: Arguments of `check_files`, `follow_stream` or `serve_proxy`.

    Raises:
        SinkscopeError: An option belongs to another task.
    """
    written = dict(to_files or {})
    task = next((name for name in ("proxy", "follow") if arguments.get(name)), "")
    own = {parameter.name: parameter for parameter in parameters_of(TASKS[task])}
    chosen: dict[str, Any] = {}
    for name, value in arguments.items():
        if name in own:
            chosen[name] = value
        elif name not in ("follow", "progress") and value not in _defaults_of(name):
            raise SinkscopeError(f"{flag_of(name)} has no effect {_where(name, task)}: leave it out")
    if task and written.keys() - {"json"}:
        raise SinkscopeError("--html and --csv write the check of a file: leave them out beside a stream")
    if task:
        chosen["json_file"] = written.get("json")
    return TASKS[task](**chosen)


def flag_of(name: str) -> str:
    """Return how an option is typed."""
    return {"files": "FILE", "form": "--format"}.get(name, "--" + name.replace("_", "-"))


def _defaults_of(name: str) -> list[Any]:
    """What an option has where it was not given."""
    defaults: list[Any] = [None, ()]
    for function in TASKS.values():
        defaults += [parameter.default for parameter in parameters_of(function) if parameter.name == name]
    return defaults


def _where(name: str, task: str) -> str:
    """Where an option has no effect: with the task that was asked for, or without the only one that takes it."""
    takers = [
        word for word, function in TASKS.items() if name in {parameter.name for parameter in parameters_of(function)}
    ]
    if takers and takers != [""] and "" not in takers and not task:
        return " or ".join(f"without --{word}" for word in takers)
    return f"with --{task}" if task else "here"
