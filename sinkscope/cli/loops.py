"""`sinkscope loops`."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from sinkscope._console import Progress
from sinkscope.cli.app import app
from sinkscope.cli.common import Html, Json, Png, check_outputs, deliver, read_text


class Form(StrEnum):
    """Kinds of file."""

    auto = "auto"
    text = "text"
    jsonl = "jsonl"


@app.command("loops")
def loops_command(
    file: Annotated[str, typer.Argument(help="Text, or JSON lines with text, output or tokens; - is standard input.")],
    form: Annotated[
        Form, typer.Option("--format", help="What the file is.", show_default="jsonl for .jsonl and .ndjson, else text")
    ] = Form.auto,
    window: Annotated[int | None, typer.Option(help="Tokens that the signals look at.", show_default="256")] = None,
    theta_ttr: Annotated[
        float | None, typer.Option(help="Type-token ratio below which a window is repetitive.", show_default="0.2")
    ] = None,
    theta_cr: Annotated[
        float | None, typer.Option(help="Compression ratio below which it is.", show_default="0.12")
    ] = None,
    warmup: Annotated[
        int | None, typer.Option(help="First token at which a loop may be found.", show_default="64")
    ] = None,
    max_new: Annotated[
        int | None, typer.Option(help="Tokens that were allowed: adds the loop rule with length.", show_default="none")
    ] = None,
    json: Json = None,
    html: Html = None,
    png: Png = None,
) -> None:
    """Whether outputs repeat themselves: diversity, redundancy, period and onset of each record; loads no model."""
    check_outputs(json, html, png)

    from sinkscope.loops.checker import check
    from sinkscope.loops.monitor import MonitorSettings
    from sinkscope.loops.records import parse

    given = {"window": window, "theta_ttr": theta_ttr, "theta_cr": theta_cr, "warmup": warmup}
    settings = MonitorSettings().with_(**{name: value for name, value in given.items() if value is not None})
    name = "standard input" if file == "-" else Path(file).name
    records = parse(read_text(file), name, form.value)
    with Progress() as progress:
        result = check(records, settings=settings, max_new=max_new, name=name, progress=progress)
    deliver(result, json, html, png)
