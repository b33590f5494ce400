"""`sinkscope loopbench`: its commands are in the files beside this one."""

import typer

from sinkscope.cli.app import app

group = typer.Typer(name="loopbench", help="LoopBench-DC and LoopBench-RI: prompts that draw a model into a loop.")
app.add_typer(group)
