"""`sinkscope dialogues`: its commands are in the files beside this one, or in the registry."""

import typer

from sinkscope.cli.app import app

group = typer.Typer(name="dialogues", help="Dialogues of several turns, with the question at begin, middle and end.")
app.add_typer(group)
