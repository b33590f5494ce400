"""`sinkscope dialogues table`."""

from pathlib import Path
from typing import Annotated

import typer

from sinkscope.cli.common import Html, Json, Png, check_outputs, deliver
from sinkscope.cli.dialogues import group


@group.command("table")
def table_command(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Folders of runs.")],
    json: Json = None,
    html: Html = None,
    png: Png = None,
) -> None:
    """Score by method and position of the question, with intervals, and what decoding read of the cache."""
    check_outputs(json, html, png)

    from sinkscope.bench.dialogues.tables import tabulate_dialogues

    deliver(tabulate_dialogues(folders), json, html, png)
