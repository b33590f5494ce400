"""`sinkscope loops`: check files for repetition, or watch a stream. Loads no torch."""

from __future__ import annotations

import io
import sys
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import click
from pydantic import Field

from sinkscope.errors import SinkscopeError
from sinkscope.files.output import path_of, read_json, reason_of
from sinkscope.files.plain import visible
from sinkscope.loops import Alarm, LoopCheck, Monitor, MonitorSettings, Watch, check_file
from sinkscope.loops.servers.proxy import LOOPBACK, application, listen
from sinkscope.loops.text.forms import StreamForm
from sinkscope.results.console import note
from sinkscope.results.options import Option, command

PROXY_HOST, PROXY_PORT = "127.0.0.1", 8790
LOOP_IN_STREAM = 3  # exit status of --follow if there was a loop


@command(
    words="loops",
    group="Loops",
    help="Check outputs for repetition, or watch a stream.",
)
def check_loops(
    file: Annotated[str | None, Option(argument=True, metavar="FILE|-")] = None,
    *,
    follow: bool = False,
    form: Annotated[StreamForm, Option("--format")] = "auto",
    settings: Annotated[str | None, Option(metavar="FILE")] = None,
    variant: str = "repeats",
    first: bool = False,
    proxy: Annotated[str | None, Option(metavar="URL")] = None,
    port: Annotated[int | None, Field(ge=0, le=65535)] = None,
    host: Annotated[str | None, Option(metavar="ADDRESS")] = None,
) -> LoopCheck | None:
    """Check whether texts or a stream repeat themselves, and since when. Loads no model.

    Each one loops, looped, is suspicious or is clean; the exit status is 3 if one loops or looped.

    Args:
        file: Text, or JSON with text, output or tokens, or with the answers of a server; - is standard input.
        follow: Watch a stream instead, print each loop as it occurs, and exit with status 3 if there was one.
        form: What the file is. By default .json, .jsonl and .ndjson are JSON, any other file is one text; of standard
            input the first line decides, and it may also be server-sent events (sse).
        settings: Settings of the monitor, a JSON object such as {"window": 128}.
        variant: Which monitor decides. "repeats" finds exact repetitions of anything, "full" is the paper's.
        first: With --follow: stop at the first loop.
        proxy: Stand between clients and the server at this address, and end answers that loop.
        port: With --proxy: port to listen at. By default 8790.
        host: With --proxy: address to listen at. By default 127.0.0.1, which other machines cannot reach.

    Example:
        sinkscope loops answers.jsonl
        tail -f server.log | sinkscope loops --follow
        sinkscope loops --proxy http://127.0.0.1:11434
    """
    monitor = _monitor_settings(settings, variant)
    Monitor(monitor).update(0)  # no file holds probabilities: settings that need them are refused at once
    if proxy is not None:
        _refuse({"FILE": file, "--follow": follow, "--first": first}, "with --proxy")
        return _proxy(proxy, monitor, host or PROXY_HOST, PROXY_PORT if port is None else port)
    _refuse({"--port": port, "--host": host}, "without --proxy")
    if follow:
        return _follow(file or "-", form, monitor, first)
    _refuse({"--first": first}, "without --follow")
    if file is None:
        raise SinkscopeError("give the file to check, or - for standard input")
    with closing(_open_bytes(file)) as source:
        return check_file(source, form=_form(file, form), settings=monitor, name=_name(file), told=_tell)


def _tell(alarm: Alarm) -> None:
    """Say at once that there is a loop; the table follows at the end."""
    note(str(alarm))


def _form(file: str, form: StreamForm) -> StreamForm:
    """The form of a file, by its name."""
    if form != "auto" or file == "-":
        return form
    if file.lower().endswith((".json", ".jsonl", ".ndjson")):
        return "jsonl"
    return "text"


def _monitor_settings(file: str | None, variant: str) -> MonitorSettings:
    """The settings of a variant, overridden by those of a file.

    Args:
        variant: As for `MonitorSettings.variant`.
        file: JSON file with an object of names and values.

    Raises:
        SinkscopeError: The file cannot be read or has another content, or a value is invalid.
    """
    data: Any = {}
    if file is not None:
        data = read_json(file, 'expected an object such as {"window": 128}')
    if not isinstance(data, dict):
        raise SinkscopeError(f'{file} holds no settings: expected an object such as {{"window": 128}}')
    return MonitorSettings.variant(variant, **data)


def _open_bytes(file: str) -> Any:
    """Open a file, or standard input for "-", to read bytes.

    Raises:
        SinkscopeError: The file cannot be opened.
    """
    if file == "-":
        return getattr(sys.stdin, "buffer", io.BytesIO())  # there is none if it is closed
    try:
        return open(path_of(file, "give another path"), "rb")
    except OSError as error:
        raise SinkscopeError(f"cannot read {file}: {reason_of(error)}; give another path") from None


def _refuse(options: dict[str, object], where: str) -> None:
    """Refuse options that have no effect."""
    for option, value in options.items():
        if value not in (None, False):
            raise SinkscopeError(f"{option} has no effect {where}: leave it out")


def _name(file: str) -> str:
    if file == "-":
        return "standard input"
    return Path(file).name


def _proxy(upstream: str, monitor: MonitorSettings, host: str, port: int) -> None:
    """Stand between clients and a server until Ctrl-C."""
    served = application(upstream, monitor, note, LOOPBACK if host in LOOPBACK else ())

    def ready(address: str) -> None:
        print(f"{address} passes on to {upstream} until Ctrl-C. It watches streamed answers only.", flush=True)
        if host not in LOOPBACK:
            note(f"note: everyone who can reach {host} can use that server now")

    listen(served, host, port, ready)


def _follow(file: str, form: StreamForm, monitor: MonitorSettings, first: bool) -> None:
    """Print the loops of a stream as they occur, and exit with status 3 if there was one."""
    loops = False
    try:
        for alarm in Watch(monitor).follow(_open_bytes(file), form=form, name=_name(file)):
            loops = True
            print(visible(str(alarm)), flush=True)
            if first:
                break
    except OSError:  # standard output cannot be written; that there was a loop is still said
        if not loops:
            raise
    if loops:
        raise click.exceptions.Exit(LOOP_IN_STREAM)
