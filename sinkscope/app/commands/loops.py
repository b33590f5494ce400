"""Commands about loops and dialogues."""

from __future__ import annotations

import click

from sinkscope.app.commands.command import Command, measures
from sinkscope.app.commands.options import Several, TextFile

LOOPS, DIALOGUES = "Loops", "Dialogues"
ALL = ("patch", "policy", "guard")

prompt = click.Option(["--prompt-file", "prompt"], type=TextFile())
length = click.Option(["--max-new-tokens"], type=int)

loops = Command(
    "loops",
    "app.loops:loops",
    LOOPS,
    "sinkscope loops answers.jsonl",
    "sinkscope loops log.jsonl --field response.choices",
    "tail -f answer.txt | sinkscope loops --follow",
    params=[
        click.Argument(["files"], metavar="[FILE|-]...", nargs=-1),
        click.Option(["--field"]),
        click.Option(["--prompt"], metavar="TEXT"),
        click.Option(["--follow"], is_flag=True),
    ],
    kinds=["loops"],
)

barcode = measures(
    "barcode",
    LOOPS,
    "sinkscope barcode --html barcode.html",
    params=[prompt, length, Several(["--heads"], metavar="L0.H4,...")],
    edits=ALL,
)

why_loop = measures(
    "why-loop",
    LOOPS,
    "sinkscope why-loop --max-new-tokens 200",
    params=[
        prompt,
        click.Option(["--answer-file", "answer"], type=TextFile()),
        length,
        click.Option(["--cuts"], default=3),
    ],
    edits=ALL,
)

lines = measures(
    "lines",
    DIALOGUES,
    "sinkscope lines --model llama-3.1-8b --data samsum.jsonl",
    params=[
        click.Option(["--data"]),
        click.Option(["--count"], default=4),
        click.Option(["--length"], type=int),
        Several(["--etas"], default=["0.05,0.1,0.15,0.2,0.25,0.3"], type=click.FLOAT, metavar="ETA,..."),
        Several(["--layers"], type=click.INT, metavar="LAYER,..."),
        click.Option(["--whole"], is_flag=True),
    ],
    edits=["patch"],
)
