"""`sinkscope loops`: check files for repetition, or watch a stream. Loads no torch."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any, Literal

import click
from pydantic import Field

from sinkscope.errors import SinkscopeError
from sinkscope.files.arguments import checks_arguments
from sinkscope.files.output import path_of, read_json, reason_of
from sinkscope.files.plain import visible
from sinkscope.files.records import checked_value
from sinkscope.loops import LoopCheck, MonitorSettings, PaperSettings, Watch, check_file
from sinkscope.loops.servers.proxy import LOOPBACK, application, listen
from sinkscope.loops.text.check import LOOP_FOUND, NO_TEXT
from sinkscope.loops.text.copies import Cut
from sinkscope.loops.text.forms import StreamForm
from sinkscope.loops.text.monitor import Settings
from sinkscope.results.console import note

HOST, PORT = "127.0.0.1", 8790


@checks_arguments
def check_loops(
    file: str | None = None,
    *,
    follow: bool = False,
    form: StreamForm = "auto",
    settings: str | None = None,
    variant: Literal["repeats", "full"] = "repeats",
    cut: Cut = "auto",
    prompt: str = "",
    first: bool = False,
    proxy: str | None = None,
    port: Annotated[int, Field(ge=0, le=65535)] = PORT,
    host: str = HOST,
    to_files: Any = None,
) -> LoopCheck | None:
    """Check whether texts or a stream repeat themselves, and since when. Loads no model.

    Each one loops, looped, is suspicious, is clean, or has no text. The exit status is 3 if one loops or looped, and
    else 1 if one has no text.

    Args:
        file: Text, or JSON with text, output or tokens, or with the answers of a server; - is standard input.
        follow: Watch a stream instead, print each loop as it occurs, and exit with status 3 if there was one. With
            --json, each is a line of JSON, also under --proxy.
        form: What the input is. By default .json, .jsonl and .ndjson are JSON, what a server streamed is read as such,
            also behind its headers and keep-alive lines, and any other file is one text.
        settings: Settings of the monitor, a JSON object such as {"window": 128}.
        variant: Which monitor decides. "repeats" finds exact repetitions of anything, "full" is the paper's.
        cut: Which repetitions are loops, and end an answer under --proxy; the others are only reported. "auto": equal
            copies, and in prose also copies whose numbers change. "exact": equal copies. "all": also those of code,
            markup and logs whose numbers change. "none": no repetition.
        prompt: What was asked; copies that it asks for, such as "ten lines", are no loop. The proxy reads requests.
        first: With --follow: stop at the first loop.
        proxy: Stand between clients and the server at this address, and end answers that loop.
        port: With --proxy: port to listen at.
        host: With --proxy: address to listen at, by default one that other machines cannot reach.
        to_files: What is written of the result: the paths by "json", "html" and "csv".
    """
    data: dict[str, Any] = {}
    if settings is not None:
        data = checked_value(
            dict[str, Any], read_json(settings, 'expected an object such as {"window": 128}'), settings
        )
    if cut != "auto":
        if variant != "repeats":
            raise SinkscopeError(f"--cut has no effect with --variant {variant}: leave it out")
        data["cut"] = cut
    monitor = PaperSettings(**data) if variant == "full" else MonitorSettings(**data)
    files: Mapping[str, str] = to_files or {}
    if files.keys() - {"json"} and (follow or proxy is not None):
        raise SinkscopeError("--html and --csv write the check of a file: leave them out beside a stream")
    if first and not follow:
        raise SinkscopeError("--first has no effect without --follow: leave it out")
    if proxy is None and (host, port) != (HOST, PORT):
        raise SinkscopeError("--host and --port have no effect without --proxy: leave them out")
    if proxy is not None:
        if file is not None or follow or form != "auto" or prompt:
            raise SinkscopeError("FILE, --follow, --format and --prompt have no effect with --proxy: leave them out")
        return _proxy(proxy, monitor, host, port, files.get("json"))
    name = "standard input" if file in (None, "-") else Path(file).name
    if follow:
        return _follow(file or "-", form, Watch(monitor, prompt), first, name, files.get("json"))
    if file is None:
        raise SinkscopeError("give the file to check, or - for standard input")
    with closing(_open_bytes(file)) as source:
        # A loop is said at once; the table follows at the end.
        return check_file(
            source, form=form, settings=monitor, prompt=prompt, name=name, told=lambda alarm: note(str(alarm))
        )


def _open_bytes(file: str) -> Any:
    """Open a file, or standard input for "-", to read bytes.

    Raises:
        SinkscopeError: The file cannot be opened.
    """
    if file == "-":
        return getattr(sys.stdin, "buffer", io.BytesIO())  # there is none if it is closed
    try:
        source = open(path_of(file, "give another path"), "rb")
        source.peek()  # what can be opened and not read says so here
        return source
    except OSError as error:
        raise SinkscopeError(f"cannot read {file}: {reason_of(error)}; give another path") from None


@contextmanager
def _json_lines(path: str | None) -> Iterator[Callable[[Mapping[str, Any]], None] | None]:
    """Give what writes a line of JSON at once, to a file or, for "-", to standard output; None without a path."""
    if path is None:
        yield None
        return
    with nullcontext(sys.stdout) if path == "-" else open(path, "w", encoding="utf-8") as file:
        yield lambda told: print(json.dumps(told), file=file, flush=True)


def _proxy(upstream: str, monitor: Settings, host: str, port: int, json_file: str | None) -> None:
    """Stand between clients and a server until Ctrl-C."""

    def ready(address: str) -> None:
        text = f"{address} passes on to {upstream} until Ctrl-C. It watches streamed answers only."
        if json_file == "-":
            note(text)
        else:
            print(text, flush=True)
        if host not in LOOPBACK:
            note(f"note: everyone who can reach {host} can use that server now")

    with _json_lines(json_file) as told:
        listen(application(upstream, monitor, note, LOOPBACK if host in LOOPBACK else (), told), host, port, ready)


def _follow(file: str, form: StreamForm, watch: Watch, first: bool, name: str, json_file: str | None) -> None:
    """Print the repetitions of a stream as they occur; exit with status 3 if one was a loop, or 1 without any text."""
    loops = False
    with _json_lines(json_file) as told:
        for alarm in watch.follow(_open_bytes(file), form=form, name=name):
            loops = loops or alarm.cut
            if told is not None:
                told({**alarm.about(), "output": alarm.stream, "text": alarm.text})
            if json_file != "-":
                print(visible(str(alarm)), flush=True)
            if first and loops:
                break
    if loops:
        raise click.exceptions.Exit(LOOP_FOUND)
    for one in watch.checked:
        if one.verdict == "empty":
            note(f"note: no text was found in {one.name}")
            raise click.exceptions.Exit(NO_TEXT)
