"""The command `sinkscope loops`: check finished outputs, watch a stream, or calibrate the monitor."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import click

from sinkscope.errors import SinkscopeError
from sinkscope.files.console import silent
from sinkscope.files.options import Hidden, Option, refuse_unused
from sinkscope.files.output import read_text
from sinkscope.loops import LoopCalibration, LoopCheck, MonitorSettings, calibrate, check
from sinkscope.loops.checker import parse
from sinkscope.loops.follow import Form, follow_loops, monitor_settings, read_outputs

LOOP_IN_STREAM = 3
"""Exit status of `--follow` if there was a loop."""


def check_loops(
    file: Annotated[str | None, Option(argument=True, metavar="FILE|-")] = None,
    *,
    follow: bool = False,
    calibration: Annotated[bool, Option("--calibrate")] = False,
    form: Annotated[Form, Option("--format")] = "auto",
    settings: Annotated[str | None, Option(metavar="FILE")] = None,
    window: int | None = None,
    theta_ttr: float | None = None,
    theta_cr: float | None = None,
    warmup: int | None = None,
    variant: str = "repeats",
    max_new: int | None = None,
    metrics: Annotated[str | None, Option(metavar="[HOST:]PORT")] = None,
    first: bool = False,
    tokenizer: Annotated[str | None, Option(metavar="NAME")] = None,
    rate: float | None = None,
    progress: Hidden = None,
) -> LoopCheck | LoopCalibration | None:
    """Check whether outputs repeat themselves: diversity, redundancy, period and onset of each record. Loads no model.

    Args:
        file: Text, or JSON lines with text, output or tokens; - is standard input.
        follow: Watch a stream, print each loop as it occurs, and exit with status 3 if there was one.
        calibration: Fit the monitor to ordinary text: settings with few false alarms, also for vLLM and llama.cpp.
        form: What the file is. By default .jsonl and .ndjson are JSON lines, anything else is one text; with --follow
            the first line decides, and it may also be server-sent events (sse).
        settings: Settings of the monitor, as --calibrate writes them with --json.
        window: Tokens that the signals look at; 256 by default.
        theta_ttr: Type-token ratio below which a window is repetitive; 0.2 by default.
        theta_cr: Compression ratio below which a window is repetitive; 0.12 by default.
        warmup: First token at which a loop may be found; 64 by default in the paper's monitor, else none.
        variant: Which monitor decides. "repeats" finds three copies of anything, "full" is the paper's.
        max_new: Tokens that were allowed: adds the loop rule with length.
        metrics: With --follow: serve counts to Prometheus on this port.
        first: With --follow: stop at the first loop.
        tokenizer: With --calibrate: the model whose vocabulary it is. By default text is split into words.
        rate: With --calibrate: false alarms per million tokens that are accepted; 10 by default.
        progress: Called as `progress(what, done, total)`.

    Example:
        sinkscope loops answers.jsonl --max-new 2500
        tail -f server.log | sinkscope loops --follow
        sinkscope loops ordinary.txt --calibrate --json settings.json
    """
    if follow and calibration:
        raise SinkscopeError("--follow and --calibrate do different things: give one of them")
    if not follow:
        refuse_unused("give --follow, too", metrics=metrics, first=first)
    if not calibration:
        refuse_unused("give --calibrate, too", tokenizer=tokenizer, rate=rate)
    if follow or calibration:
        refuse_unused("it belongs to the check of finished outputs", max_new=max_new)
    if calibration:
        refuse_unused("--calibrate finds it", settings=settings, theta_ttr=theta_ttr, theta_cr=theta_cr, warmup=warmup)
        return _calibrated(file, form, tokenizer, rate, window, progress)
    thresholds: dict[str, Any] = {"window": window, "theta_ttr": theta_ttr, "theta_cr": theta_cr, "warmup": warmup}
    if follow:
        if follow_loops(
            file, form=form, settings=settings, variant=variant, metrics=metrics, first=first, **thresholds
        ):
            raise click.exceptions.Exit(LOOP_IN_STREAM)
        return None
    if file is None or form == "sse":
        raise SinkscopeError("give the file to check, or - for standard input; --format sse is for --follow")
    name = _name(file)
    records = parse(read_text(file), name, form)
    monitor = monitor_settings(settings, variant, **thresholds)
    return check(records, settings=monitor, max_new=max_new, name=name, progress=progress)


def _calibrated(
    file: str | None, form: Form, tokenizer: str | None, rate: float | None, window: int | None, progress: Hidden
) -> LoopCalibration:
    """Settings of the monitor that fit a text."""
    encode = None
    if tokenizer is not None:
        from sinkscope.models.load import open_tokenizer  # loads torch

        encode = open_tokenizer(tokenizer)[0]
    settings = MonitorSettings()
    if window is not None:
        settings = MonitorSettings(window=window)
    if rate is None:
        rate = 10.0
    outputs, vocabulary = read_outputs(file or "-", form, encode)
    return calibrate(
        outputs, vocabulary=vocabulary, rate=rate, settings=settings, name=_name(file), progress=progress or silent
    )


def _name(file: str | None) -> str:
    if file in (None, "-"):
        return "standard input"
    return Path(file).name
