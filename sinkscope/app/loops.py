"""`sinkscope loops`: check files for repetition, or watch a stream. Loads no torch."""

from __future__ import annotations

import gc
import html
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click

from sinkscope.errors import SinkscopeError
from sinkscope.files.options import Hidden, Option
from sinkscope.files.output import read_text
from sinkscope.files.plain import visible
from sinkscope.loops import LoopCheck, MonitorSettings, Watch, check
from sinkscope.loops.forms import StreamForm
from sinkscope.loops.outputs import parse
from sinkscope.loops.streams import monitor_settings, open_bytes

if TYPE_CHECKING:
    import plotly.graph_objects as go

LOOP_IN_STREAM = 3  # exit status of --follow if there was a loop
SHOWN_RECORDS = 60  # lines in the figure


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


def draw_check(result: LoopCheck) -> go.Figure:
    """Diversity of the window over the tokens, a line per record, with the detection of each loop."""
    import pandas as pd
    import plotly.express as px

    from sinkscope.measure.style import GREY, ORANGE, RED, finished

    # Loops are drawn above the others.
    records = sorted(result.records, key=lambda record: record.loop)[-SHOWN_RECORDS:]
    named = [replace(record, name=html.escape(record.name)) for record in records]
    frame = pd.DataFrame(named).explode(["steps", "curve"])
    frame["outcome"] = frame["loop"].replace({False: "does not", True: "loops"})
    lines: dict[str, Any] = {"line_group": "name", "hover_name": "name", "color": "outcome"}
    lines["color_discrete_map"] = {"does not": GREY, "loops": ORANGE}
    figure = px.line(frame, x="steps", y="curve", **lines)
    alarms = frame[frame["loop"] & (frame["steps"] >= frame["detected"])].groupby("name").first()
    marker = {"color": RED, "size": 9, "symbol": "x"}
    figure.add_scatter(x=alarms["detected"], y=alarms["curve"], mode="markers", marker=marker, name="detected")
    threshold = result.settings["theta_ttr"]
    window = html.escape(str(result.settings["window"]))
    figure.add_hline(threshold, line={"color": GREY, "dash": "dot"}, annotation_text=f"threshold {threshold:g}")
    figure.update_xaxes(title_text=f"tokens ({len(records)} of {len(result.records)} records)", rangemode="tozero")
    figure.update_yaxes(title_text=f"type-token ratio of the last {window} tokens", range=[0, 1.03])
    return finished(figure, result, width=1000, height=520)
