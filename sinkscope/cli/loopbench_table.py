"""`sinkscope loopbench table`."""

from pathlib import Path
from typing import Annotated

import typer

from sinkscope.cli.common import Html, Json, Png, check_outputs, deliver
from sinkscope.cli.loopbench import group


@group.command("table")
def table_command(
    folders: Annotated[list[Path] | None, typer.Argument(metavar="DIR...", help="Folders of runs.")] = None,
    json: Json = None,
    html: Html = None,
    png: Png = None,
) -> None:
    """The paper's Tables 1 to 3, its numbers beside ours, and what it has no table of."""
    check_outputs(json, html, png)

    from sinkscope.bench.loopbench.tables import tabulate

    deliver(tabulate(folders or []), json, html, png)
