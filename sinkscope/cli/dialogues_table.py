"""`sinkscope dialogues table`."""

import json as json_files
from pathlib import Path
from typing import Annotated

import typer

from sinkscope.cli.common import Html, Json, Png, check_outputs, deliver
from sinkscope.cli.dialogues import group


@group.command("table")
def table_command(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Folders of runs, or of fidelity.")],
    json: Json = None,
    html: Html = None,
    png: Png = None,
) -> None:
    """Score by method and position of the question, with intervals, and what decoding read; or fidelity."""
    check_outputs(json, html, png)
    if folders and _command(folders[0]) == "dialogues fidelity":
        from sinkscope.bench.dialogues.fidelity_table import tabulate_fidelity

        deliver(tabulate_fidelity(folders), json, html, png)
        return

    from sinkscope.bench.dialogues.tables import tabulate_dialogues

    deliver(tabulate_dialogues(folders), json, html, png)


def _command(folder: Path) -> object:
    """Which command wrote a folder; None: it does not say."""
    try:
        settings = json_files.loads((folder / "settings.json").read_bytes())
    except (OSError, ValueError):
        return None
    return settings.get("command") if isinstance(settings, dict) else None
