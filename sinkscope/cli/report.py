"""`sinkscope report`."""

from pathlib import Path
from typing import Annotated

import typer

from sinkscope._console import Progress, note
from sinkscope.cli.app import app


@app.command("report")
def report_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of results; those below it are read too.")],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File to write.", show_default="report.html in DIR")
    ] = None,
) -> None:
    """All results of a folder as one HTML file that needs nothing else, with figures, tables and provenance."""
    from sinkscope.report.build import report

    with Progress() as progress:
        made = report(folder, out, progress=progress)
    for skipped in made.skipped[:_SHOWN]:
        note(f"left out: {skipped}")
    if len(made.skipped) > _SHOWN:
        note(f"left out: {len(made.skipped) - _SHOWN} files more; the report names them all")
    count = len(made.files)
    print(f"{folder / 'report.html' if out is None else out}: {count} result{'s' if count != 1 else ''}")


_SHOWN = 20
