"""`sinkscope loopbench show`."""

from pathlib import Path
from typing import Annotated

import typer

from sinkscope.cli.common import Html, Json, Png, check_outputs, deliver
from sinkscope.cli.loopbench import group


@group.command("show")
def show_command(
    run: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a run.")],
    prompt: Annotated[str, typer.Option(metavar="ID|NUMBER", help="Which prompt; numbers begin at 0.")] = "0",
    methods: Annotated[
        str | None, typer.Option(help="Names with commas between.", show_default="all that were run")
    ] = None,
    json: Json = None,
    html: Html = None,
    png: Png = None,
) -> None:
    """What each method made of one prompt, side by side; the whole texts are in the HTML."""
    check_outputs(json, html, png)

    from sinkscope.bench.loopbench.show import show

    names = None if methods is None else [name.strip() for name in methods.split(",") if name.strip()]
    deliver(show(run, prompt, methods=names), json, html, png)
