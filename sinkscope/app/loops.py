"""`sinkscope loops`: check files for repetition, or watch a stream. Loads no torch."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Annotated

import click

from sinkscope.errors import SinkscopeError
from sinkscope.files.options import Hidden, Option
from sinkscope.files.output import read_text
from sinkscope.files.records import rows_of
from sinkscope.files.plain import visible
from sinkscope.loops import LoopCheck, MonitorSettings, Watch, check
from sinkscope.loops.compare import KnownText, LoopComparison, compare, named_detector
from sinkscope.loops.forms import StreamForm
from sinkscope.loops.outputs import parse
from sinkscope.loops.rivals import Detector
from sinkscope.loops.streams import monitor_settings, open_bytes

LOOP_IN_STREAM = 3  # exit status of --follow if there was a loop


def check_loops(
    file: Annotated[str | None, Option(argument=True, metavar="FILE|-")] = None,
    *,
    follow: bool = False,
    form: Annotated[StreamForm, Option("--format")] = "auto",
    settings: Annotated[str | None, Option(metavar="FILE")] = None,
    variant: str = "repeats",
    max_new: int | None = None,
    first: bool = False,
    progress: Hidden = None,
) -> LoopCheck | None:
    """Check whether outputs repeat themselves: diversity, redundancy, period and onset of each record. Loads no model.

    Args:
        file: Text, or JSON lines with text, output or tokens; - is standard input.
        follow: Watch a stream instead, print each loop as it occurs, and exit with status 3 if there was one.
        form: What the file is. By default .jsonl and .ndjson are JSON lines, anything else is one text; with --follow
            the first line decides, and it may also be server-sent events (sse).
        settings: Settings of the monitor, a JSON object such as {"window": 128}.
        variant: Which monitor decides. "repeats" finds repetitions of anything, "tolerant" also lists that count up and
            copies that differ more, "full" is the paper's.
        max_new: Tokens that were allowed: adds the loop rule with length.
        first: With --follow: stop at the first loop.
        progress: Called as `progress(what, done, total)`.

    Example:
        sinkscope loops answers.jsonl --max-new 2500
        tail -f server.log | sinkscope loops --follow
    """
    monitor = monitor_settings(settings, variant)
    if monitor.needs_probabilities:
        raise SinkscopeError(
            "--variant p1 judges by a model's probabilities, and no file holds them: take another variant, or "
            "MonitorSettings.variant('p1') in Python and give `Monitor.update` the probabilities"
        )
    if follow:
        if max_new is not None:
            raise SinkscopeError("--max-new has no effect with --follow: leave it out")
        return _follow(file or "-", form, monitor, first)
    if first:
        raise SinkscopeError("--first has no effect without --follow: leave it out")
    if file is None or form == "sse":
        raise SinkscopeError("give the file to check, or - for standard input; --format sse is for --follow")
    name = _name(file)
    records = parse(read_text(file), name, form)
    return check(records, settings=monitor, max_new=max_new, name=name, progress=progress)


def compare_loops(
    file: Annotated[str, Option(argument=True, metavar="FILE", required=True)],
    *,
    detector: tuple[str, ...] = (),
    half: str | None = None,
) -> LoopComparison:
    """Compare detectors of loops on texts whose truth is known: recall, delay and false alarms. Loads no model.

    Args:
        file: JSON lines with text, class, and start, the character at which the loop of the text begins, or null;
            `python -m experiments.loopset.make` makes a set.
        detector: Another detector, as module:function. It takes a text and returns the number of characters after which
            it would stop, or None.
        half: Only the lines whose field half is this.

    Example:
        sinkscope loops compare texts.jsonl --half report
        sinkscope loops compare texts.jsonl --detector mine:detect
    """
    expected = "JSON lines with text, class and start"
    name = _name(file)
    texts: list[KnownText] = []
    for where, row in rows_of(read_text(file), name, expected):
        if not isinstance(row, dict) or not isinstance(row.get("text"), str):
            raise SinkscopeError(f"{where} has no text: expected {expected}")
        if half is None or row.get("half") == half:
            texts.append(KnownText(row["text"], str(row.get("class", "texts")), row.get("start")))
    functions: dict[str, Detector] = {}
    for place in detector:
        functions[place] = named_detector(place)
    return compare(texts, functions, name)


def _name(file: str) -> str:
    if file == "-":
        return "standard input"
    return Path(file).name


def _follow(file: str, form: StreamForm, monitor: MonitorSettings, first: bool) -> None:
    """Print the loops of a stream as they occur, and exit with status 3 if there was one."""
    gc.enable()  # the command line turns it off while libraries are imported
    loops = False
    try:
        for alarm in Watch(monitor).follow(open_bytes(file), form=form, name=_name(file)):
            loops = True
            print(visible(str(alarm)), flush=True)
            if first:
                break
    except OSError:  # standard output cannot be written; that there was a loop is still said
        if not loops:
            raise
    if loops:
        raise click.exceptions.Exit(LOOP_IN_STREAM)
