"""Commands to look at models and results."""

from __future__ import annotations

import click

from sinkscope.app.commands.command import Command
from sinkscope.app.commands.options import EDITS, LOAD, MODEL, SETUP, OutputFile, OutputFolder, Several, TextFile

LOOK = "Look"

scan = Command(
    "scan",
    "app.scan:scan",
    LOOK,
    "sinkscope scan",
    "sinkscope scan llama-2-7b --out llama",
    "sinkscope scan llama-2-7b --quick --only find-sinks,repeat",
    params=[
        click.Option(["--out"], type=OutputFolder()),
        click.Option(["--quick"], is_flag=True),
        Several(["--only"], metavar="PART,..."),
    ],
    shared=[*MODEL, *SETUP],
    kinds=["sink-card"],
)

compare = Command(
    "compare",
    "app.compare:compare",
    LOOK,
    "sinkscope compare base.json fine-tuned.json --html compare.html",
    "sinkscope compare ./base ./run/checkpoints --out results",
    params=[
        click.Argument(["results"], metavar="A B [C ...]", nargs=-1, required=True),
        click.Option(["--measure"], default="find-sinks"),
        click.Option(["--out"], type=OutputFolder()),
    ],
    shared=[option for option in SETUP if option.name != "revision"],
    kinds=["compare"],
)

view_model = Command(
    "view",
    "app.view.command:view_model",
    LOOK,
    "sinkscope view",
    "sinkscope view llama-2-7b --text answer.txt --html view.html",
    params=[click.Option(["--text"], metavar="FILE|-"), click.Option(["--port"], default=0)],
    shared=[*MODEL, *SETUP],
    kinds=["view"],
)

print_generated = Command(
    "generate",
    "app.generate:print_generated",
    LOOK,
    'sinkscope generate "The bird sang the same song again:" --guard',
    params=[
        click.Argument(["prompt"], metavar="[PROMPT]", required=False),
        click.Option(["--prompt-file"], type=TextFile()),
        click.Option(["--chat/--no-chat"], default=None),
        click.Option(["--policy"], metavar="NAME[:BUDGET]"),
        click.Option(["--guard"], is_flag=True),
        click.Option(["--max-new-tokens"], default=100),
        click.Option(["--temperature"], default=0.0),
        click.Option(["--seed"], default=0),
    ],
    shared=[*MODEL[1:], *LOAD, *EDITS],
    processes=True,
)

report = Command(
    "report",
    "app.report:report",
    LOOK,
    "sinkscope report results --out everything.html",
    params=[click.Argument(["folder"], metavar="DIR"), click.Option(["--out"], type=OutputFile())],
)
