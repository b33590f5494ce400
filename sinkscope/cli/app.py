"""The app that commands hang themselves on."""

from __future__ import annotations

from typing import Annotated

import typer

from sinkscope import __version__
from sinkscope.cli.build import Groups

app = typer.Typer(
    name="sinkscope",
    cls=Groups,
    help="Find the attention sink of a language model, prove it by ablation, and repair what it breaks.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> bool:
    if wanted:
        print(f"sinkscope {__version__}")
        raise typer.Exit
    return wanted


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Options of the command itself."""
