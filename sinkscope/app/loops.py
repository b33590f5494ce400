"""`sinkscope loops`: check files for repetition, or watch a stream. Loads no torch."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Annotated

import click
from pydantic import Field

from sinkscope.errors import SinkscopeError
from sinkscope.files.output import read_text, write_output
from sinkscope.files.plain import visible
from sinkscope.loops import LoopCheck, MonitorSettings, Watch, check
from sinkscope.loops.servers.proxy import LOOPBACK, ProxySettings, check_proxy, serve
from sinkscope.loops.text.forms import StreamForm
from sinkscope.loops.text.outputs import parse
from sinkscope.loops.text.sessions import check_history, cleaned, is_session_file, read_history
from sinkscope.loops.text.streams import Tee, monitor_settings, open_bytes
from sinkscope.results.console import note
from sinkscope.results.options import Hidden, Option, command

PROXY_HOST, PROXY_PORT = "127.0.0.1", 8790
LOOP_IN_STREAM = 3  # exit status of --follow if there was a loop


@command(
    words="loops",
    group="Loops",
    order=1,
    help="Check outputs for repetition, or watch a stream.",
)
def check_loops(
    file: Annotated[str | None, Option(argument=True, metavar="FILE|-")] = None,
    *,
    follow: bool = False,
    form: Annotated[StreamForm, Option("--format")] = "auto",
    settings: Annotated[str | None, Option(metavar="FILE")] = None,
    variant: str = "repeats",
    max_new: int | None = None,
    first: bool = False,
    tee: bool = False,
    clean: Annotated[str | None, Option(metavar="OUT", writes="Session")] = None,
    proxy: Annotated[str | None, Option(metavar="URL")] = None,
    port: Annotated[int | None, Field(ge=0, le=65535)] = None,
    host: Annotated[str | None, Option(metavar="ADDRESS")] = None,
    retry: bool = False,
    progress: Hidden = None,
) -> LoopCheck | None:
    """Check whether texts, sessions or a stream repeat themselves, and since when. Loads no model.

    Each one loops, looped, is suspicious or is clean; the exit status is 3 if one loops or looped.

    Args:
        file: Text, JSON lines with text, output or tokens, or the messages of a chat or an agent; - is standard input.
        follow: Watch a stream instead, print each loop as it occurs, and exit with status 3 if there was one.
        form: What the file is. By default .json, .jsonl and .ndjson are outputs or messages (session), anything else is
            one text; with --follow the first line decides, and it may also be server-sent events (sse).
        settings: Settings of the monitor, a JSON object such as {"window": 128}.
        variant: Which monitor decides. "repeats" finds repetitions of anything, "tolerant" also lists that count up and
            copies that differ more, "full" is the paper's.
        max_new: Tokens that were allowed: adds the loop rule with length.
        first: With --follow: stop at the first loop.
        tee: With --follow: pass the input on to standard output, and print loops on standard error.
        clean: Write the session without the copies of repeated turns.
        proxy: Stand between clients and the server at this address, and end answers that loop.
        port: With --proxy: port to listen at. By default 8790.
        host: With --proxy: address to listen at. By default 127.0.0.1, which other machines cannot reach.
        retry: With --proxy: ask once more for an answer that loops, with the server's own penalty. Answers are then
            passed on when they are complete.
        progress: Called as `progress(what, done, total)`.

    Example:
        sinkscope loops answers.jsonl --max-new 2500
        sinkscope loops session.json --clean shorter.json
        tail -f server.log | sinkscope loops --follow
        sinkscope loops --proxy http://127.0.0.1:11434
    """
    monitor = monitor_settings(settings, variant)
    if monitor.needs_probabilities:
        raise SinkscopeError(
            "--variant p1 judges by a model's probabilities, and no file holds them: take another variant, or "
            "MonitorSettings.variant('p1') in Python and give `Monitor.update` the probabilities"
        )
    if proxy is not None:
        ignored = {"FILE": file, "--follow": follow, "--first": first, "--tee": tee, "--clean": clean}
        _refuse({**ignored, "--max-new": max_new}, "with --proxy")
        return _proxy(proxy, monitor, retry, host or PROXY_HOST, PROXY_PORT if port is None else port)
    _refuse({"--port": port, "--host": host, "--retry": retry}, "without --proxy")
    if follow:
        session = form == "session"
        _refuse({"--max-new": max_new, "--clean": clean, "--format session": session}, "with --follow")
        return _follow(file or "-", form, monitor, first, tee)
    _refuse({"--first": first, "--tee": tee}, "without --follow")
    if file is None or form == "sse":
        raise SinkscopeError("give the file to check, or - for standard input; --format sse is for --follow")
    name = _name(file)
    text = read_text(file)
    if not is_session_file(text, name, form):
        _refuse({"--clean": clean}, f"on {name}, which holds no session")
        records = parse(text, name, "auto" if form == "session" else form)
        return check(records, settings=monitor, max_new=max_new, name=name, progress=progress)
    _refuse({"--max-new": max_new}, f"on {name}, which holds sessions")
    history = read_history(text, name)
    result = check_history(history, monitor, name, progress)
    if clean is not None:
        write_output(clean, cleaned(history))
    return result


def _refuse(options: dict[str, object], where: str) -> None:
    """Refuse options that have no effect."""
    for option, value in options.items():
        if value not in (None, False):
            raise SinkscopeError(f"{option} has no effect {where}: leave it out")


def _name(file: str) -> str:
    if file == "-":
        return "standard input"
    return Path(file).name


def _proxy(upstream: str, monitor: MonitorSettings, retry: bool, host: str, port: int) -> None:
    """Stand between clients and a server until Ctrl-C."""
    check_proxy()
    settings = ProxySettings(upstream, monitor, retry, note)

    def ready(address: str) -> None:
        print(f"{address} passes on to {upstream} until Ctrl-C.", flush=True)
        if host not in LOOPBACK:
            note(f"note: everyone who can reach {host} can use that server now")

    gc.enable()  # the command line turns it off while libraries are imported
    serve(settings, host, port, ready)


def _follow(file: str, form: StreamForm, monitor: MonitorSettings, first: bool, tee: bool) -> None:
    """Print the loops of a stream as they occur, and exit with status 3 if there was one."""
    gc.enable()  # the command line turns it off while libraries are imported
    source = open_bytes(file)
    if tee:
        source = Tee(source, sys.stdout.buffer)
    loops = False
    try:
        for alarm in Watch(monitor).follow(source, form=form, name=_name(file)):
            loops = True
            if tee:
                note(str(alarm))
            else:
                print(visible(str(alarm)), flush=True)
            if first:
                break
    except OSError:  # standard output cannot be written; that there was a loop is still said
        if not loops:
            raise
    if loops:
        raise click.exceptions.Exit(LOOP_IN_STREAM)
