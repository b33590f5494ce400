"""Commands about sinks and repeated tokens."""

from __future__ import annotations

import click

from sinkscope.app.commands.command import measures
from sinkscope.app.commands.options import Several

SINKS, REPETITION = "Sinks", "Repetition"

repeated = Several(["--tokens"], metavar="TOKEN,...")
spike = click.Option(["--spike"], type=int)
patched_repeats = click.Option(["--max-repeats"], type=int)
piece_length = click.Option(["--length"], default=64)

find_sinks = measures(
    "find-sinks",
    SINKS,
    "sinkscope find-sinks --model llama-2-7b --json sinks.json",
    params=[repeated, click.Option(["--max-repeats"], type=int)],
)

circuit = measures(
    "circuit",
    SINKS,
    "sinkscope circuit --model llama-2-7b --html circuit.html",
    params=[
        repeated,
        click.Option(["--max-repeats"], type=int),
        click.Option(["--only"], type=click.Choice(["conditions", "purpose"])),
    ],
)

heads = measures(
    "heads",
    SINKS,
    "sinkscope heads --model llama-2-7b --n-tokens 8",
    params=[Several(["--tokens"], metavar="TOKEN,..."), click.Option(["--n-tokens"], type=int), spike],
)

patch_make = measures(
    "patch make",
    SINKS,
    "sinkscope patch make --model llama-2-7b --out patch.json",
    params=[
        spike,
        patched_repeats,
        click.Option(["--limit"], default=0.01),
        click.Option(["--pieces"], default=32),
        piece_length,
        click.Option(["--out"], metavar="FILE", required=True),
    ],
)

patch_eval = measures(
    "patch eval",
    SINKS,
    "sinkscope patch eval --model llama-2-7b --patch patch.json",
    params=[
        click.Option(["--patch"], metavar="FILE", required=True),
        patched_repeats,
        click.Option(["--pieces"], default=32),
        piece_length,
    ],
)

precision = measures(
    "precision",
    SINKS,
    "sinkscope precision --model llama-2-7b --html precision.html",
    params=[
        Several(
            ["--schemes"],
            type=click.Choice(["a8-tensor", "a8-token", "kv8", "kv4"]),
            default=["a8-tensor,a8-token,kv8,kv4"],
            metavar="SCHEME,...",
        ),
        click.Option(["--pieces"], default=16),
        piece_length,
    ],
)

repeat = measures(
    "repeat",
    REPETITION,
    "sinkscope repeat --model llama-2-7b --max-repeats 500",
    params=[
        click.Option(["--quantity"], type=click.Choice(["norm", "attention", "probability", "sight"]), default="norm"),
        Several(["--tokens"], metavar="A,B,...|all"),
        click.Option(["--prefix"]),
        click.Option(["--max-repeats"], type=int),
        click.Option(["--sample"], type=int),
        click.Option(["--resume"], metavar="DIR"),
    ],
)

attack = measures(
    "attack",
    REPETITION,
    "sinkscope attack --model llama-2-7b --length 8 --sequences 100",
    params=[
        Several(["--tokens"], metavar="A,B,..."),
        click.Option(["--n-tokens"], type=int),
        spike,
        click.Option(["--length"], default=8),
        click.Option(["--sequences"], default=32),
    ],
)
