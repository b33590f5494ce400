"""Follow a stream and print each loop as it occurs."""

from __future__ import annotations

from collections.abc import Sequence

import click

from sinkscope.app.loops.common import Variant, json_writer, monitor_of, name_of, open_bytes
from sinkscope.errors import SinkscopeError
from sinkscope.files.arguments import checks_arguments
from sinkscope.files.plain import visible
from sinkscope.loops import Watch
from sinkscope.loops.text.check import LOOP_FOUND, NO_TEXT, FailOn
from sinkscope.loops.text.copies import Cut
from sinkscope.loops.text.pieces import StreamForm
from sinkscope.results.console import note


@checks_arguments
def follow_stream(
    files: Sequence[str] = (),
    *,
    follow: bool = False,
    first: bool = False,
    field: str | None = None,
    fail_on: FailOn = "loops",
    form: StreamForm = "auto",
    settings: str | None = None,
    variant: Variant = "repeats",
    cut: Cut = "auto",
    prompt: str = "",
    json_file: str | None = None,
) -> None:
    """Print the repetitions of a stream as they occur; exit with status 3 if one was a loop, or 1 without any text.

    Args:
        files: As for `check_files`; none is standard input.
        follow: Watch a stream instead, print each loop as it occurs, and exit with status 3 if there was one. With
            --json, each is a line of JSON, also under --proxy.
        first: With --follow: stop at the first loop.
        field: As for `check_files`.
        fail_on: As for `check_files`.
        form: As for `check_files`.
        settings: As for `check_files`.
        variant: As for `check_files`.
        cut: As for `check_files`.
        prompt: As for `check_files`.
        json_file: File of lines of JSON, one for each repetition; "-" is standard output.

    Raises:
        SinkscopeError: More than one file is given, or nothing can be read.
    """
    if len(files) > 1:
        raise SinkscopeError("--follow watches one file: give one, or none for standard input")
    (file,) = files or ["-"]
    watch, failed = Watch(monitor_of(settings, variant, cut), prompt), False
    alarms = watch.follow(open_bytes(file), form=form, name=name_of(file), field=field)
    with json_writer(json_file) as told:
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
    for entry in watch.checked:
        if entry.verdict == "empty":
            note(f"note: no text was found in {entry.name}")
            raise click.exceptions.Exit(NO_TEXT)
