"""`sinkscope loops`: check files for repetition, or watch a stream. Loads no torch."""

from __future__ import annotations

import gzip
import io
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import click
from pydantic import Field

from sinkscope.errors import SinkscopeError
from sinkscope.files.arguments import checks_arguments
from sinkscope.files.listen import listen
from sinkscope.files.opener import open_regular, reason_of
from sinkscope.files.output import path_of, paths_below, read_json
from sinkscope.files.plain import in_one_line, visible
from sinkscope.files.records import checked_value
from sinkscope.loops import Alarm, LoopCheck, MonitorSettings, PaperSettings, Watch
from sinkscope.loops.servers.proxy import LOOPBACK, application
from sinkscope.loops.text.check import LOOP_FOUND, NO_TEXT, FailOn, check_of
from sinkscope.loops.text.copies import Cut
from sinkscope.loops.text.forms import StreamForm
from sinkscope.loops.text.monitor import Settings
from sinkscope.results.console import note
from sinkscope.results.notation import count_of

HOST, PORT = "127.0.0.1", 8790
ENDINGS = (".txt", ".md", ".log", ".json", ".jsonl", ".ndjson", ".sse")
"""Names of the files of a folder that are read."""


@checks_arguments
def check_loops(
    files: Sequence[str] = (),
    *,
    field: str | None = None,
    fail_on: FailOn = "loops",
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
    else 1 if one has no text, or cannot be read.

    Args:
        files: Texts, or JSON with the answers of a server, a log or a data set; also folders of these, and .gz. - is
            standard input.
        field: Where the answers of a line of JSON are, such as response.choices or turns.1. By default under one of the
            names of servers, logs and data sets.
        fail_on: From which verdict on the exit status is 3; "suspicious" counts repetitions that may be honest as well.
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
    monitor, written = _monitor(settings, variant, cut), to_files or {}
    if written.keys() - {"json"} and (follow or proxy is not None):
        raise SinkscopeError("--html and --csv write the check of a file: leave them out beside a stream")
    if first and not follow:
        raise SinkscopeError("--first has no effect without --follow: leave it out")
    if proxy is None and (host, port) != (HOST, PORT):
        raise SinkscopeError("--host and --port have no effect without --proxy: leave them out")
    if proxy is not None:
        if any((files, follow, form != "auto", prompt, field, fail_on != "loops")):
            raise SinkscopeError(
                "FILE, --field, --fail-on, --follow, --format and --prompt have no effect with --proxy: leave them out"
            )
        return _proxy(proxy, monitor, host, port, written.get("json"))
    watch = Watch(monitor, prompt)
    if follow:
        if len(files) > 1:
            raise SinkscopeError("--follow watches one file: give one, or none for standard input")
        alarms = watch.follow(_open_bytes(*(files or ["-"])), form=form, name=_name(*(files or ["-"])), field=field)
        return _follow(alarms, watch, first, fail_on, written.get("json"))
    if not files:
        raise SinkscopeError("give the file to check, or - for standard input")
    return _check(files, watch, form, field, fail_on)


def _monitor(settings: str | None, variant: str, cut: Cut) -> Settings:
    """The settings of the monitor.

    Raises:
        SinkscopeError: A setting is not valid, or has no effect.
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
    return PaperSettings(**data) if variant == "full" else MonitorSettings(**data)


def _check(files: Sequence[str], watch: Watch, form: StreamForm, field: str | None, fail_on: FailOn) -> LoopCheck:
    """Check files: a loop is said at once, and the table follows at the end."""
    started, every, missing = time.perf_counter(), _listed(files), list[str]()
    for name, file in every.items():
        label, skipped = f"{name} " if len(every) > 1 else "", watch.skipped
        try:
            with closing(_open_bytes(file)) as source:
                for alarm in watch.read(source, form=form, name=name, field=field, label=label):
                    if alarm.cut:
                        note(str(alarm))
        except SinkscopeError as error:
            if len(every) == 1:
                raise
            if not (file == "-" or Path(file).is_file()):
                missing.append(file)
                note(f"error: {error}")
            if watch.skipped == skipped:  # else its lines are counted
                watch.skip(str(error))
    if not watch.checked:
        raise SinkscopeError(f"nothing could be read: {watch.problems[0]}")
    name = next(iter(every)) if len(every) == 1 else count_of(len(every), "file")
    return replace(check_of(watch, name, started, fail_on), missing=tuple(missing))


def _listed(files: Sequence[str]) -> dict[str, str]:
    """The files by their names, with those in folders whose endings say text or JSON.

    Raises:
        SinkscopeError: A folder holds none.
    """
    listed: dict[str, str] = {}
    for file in files:
        folder, count = Path(file), len(listed)
        if not file or not folder.is_dir():
            name = _name(file)
            listed[file if name in listed else name] = file
            continue
        for path in paths_below(folder):
            if path.name.removesuffix(".gz").endswith(ENDINGS) and path.is_file():
                name = in_one_line(str(path.relative_to(folder)))
                listed[str(path) if name in listed else name] = str(path)
        if len(listed) == count:
            raise SinkscopeError(f"{file} holds no file that ends in {', '.join(ENDINGS)}, also .gz: name the files")
    return listed


def _name(file: str) -> str:
    """Name of a file, for the result and errors."""
    return "standard input" if file == "-" else in_one_line(Path(file).name)


def _open_bytes(file: str) -> Any:
    """Open a file, or standard input for "-", to read bytes; of .gz what is packed in it.

    Raises:
        SinkscopeError: The file cannot be opened.
    """
    if file == "-":
        return getattr(sys.stdin, "buffer", io.BytesIO())  # there is none if it is closed
    remedy = "give another path, or - for standard input"
    source: Any = open_regular(path_of(file, remedy), file, remedy)
    try:
        if file.endswith(".gz"):
            source = gzip.open(source)
        source.peek(1)  # what can be opened and not read says so here
    except (OSError, EOFError) as error:
        reason = reason_of(error) if isinstance(error, OSError) else "it ends too early"
        raise SinkscopeError(f"cannot read {file}: {reason}; {remedy}") from None
    return source


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


def _follow(alarms: Iterator[Alarm], watch: Watch, first: bool, fail_on: FailOn, json_file: str | None) -> None:
    """Print the repetitions of a stream as they occur; exit with status 3 if one was a loop, or 1 without any text."""
    failed = False
    with _json_lines(json_file) as told:
        for alarm in alarms:
            failed = failed or alarm.cut or fail_on == "suspicious"
            if told is not None:
                told({**alarm.about(), "output": alarm.stream, "text": alarm.text})
            if json_file != "-":
                print(visible(str(alarm)), flush=True)
            if first and alarm.cut:
                break
    if failed:
        raise click.exceptions.Exit(LOOP_FOUND)
    for one in watch.checked:
        if one.verdict == "empty":
            note(f"note: no text was found in {one.name}")
            raise click.exceptions.Exit(NO_TEXT)
