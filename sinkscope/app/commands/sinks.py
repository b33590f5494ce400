"""Commands about sinks and repeated tokens."""

from __future__ import annotations

import click

from sinkscope.app.commands.command import measures
from sinkscope.app.commands.options import OutputFile, Several

SINKS, REPETITION = "Sinks", "Repetition"

find_sinks = measures(
    "find-sinks",
    SINKS,
    "sinkscope find-sinks --model llama-2-7b --json sinks.json",
)

why_sink = measures(
    "why-sink",
    SINKS,
    "sinkscope why-sink llama-2-7b --html why-sink.html",
)

patch = measures(
    "patch",
    SINKS,
    "sinkscope patch llama-2-7b --out patch.json",
    "sinkscope patch llama-2-7b --file patch.json",
    params=[
        click.Option(["--file"], metavar="FILE"),
        click.Option(["--max-repeats"], type=int),
        click.Option(["--limit"], default=0.01),
        click.Option(["--pieces"], default=32),
        click.Option(["--length"], default=64),
        click.Option(["--out"], type=OutputFile()),
    ],
)

repeat = measures(
    "repeat",
    REPETITION,
    "sinkscope repeat --model llama-2-7b --max-repeats 500",
    params=[
        click.Option(["--quantity"], type=click.Choice(["norm", "attention", "probability"]), default="norm"),
        Several(["--tokens"], spaces=True, metavar="A,B,..."),
        click.Option(["--max-repeats"], type=int),
    ],
)

attack = measures(
    "attack",
    REPETITION,
    "sinkscope attack --model llama-2-7b --length 8 --sequences 100",
    params=[
        Several(["--tokens"], spaces=True, metavar="A,B,..."),
        click.Option(["--n-tokens"], type=int),
        click.Option(["--length"], default=8),
        click.Option(["--sequences"], default=32),
    ],
)
