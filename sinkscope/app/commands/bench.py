"""Commands that compare methods and check caches."""

from __future__ import annotations

from pathlib import Path

import click

from sinkscope.app.commands.command import Command
from sinkscope.app.commands.options import LOAD, OutputFolder, Several

BENCHMARK = "Benchmark"

bench = Command(
    "bench",
    "bench.benchmark:bench",
    BENCHMARK,
    "sinkscope bench --task recall --methods full,h2o:0.25 --out runs",
    "sinkscope bench runs --beside h2o:0.25",
    params=[
        click.Argument(["folders"], metavar="[DIR]...", nargs=-1, type=Path),
        click.Option(["--model"]),
        click.Option(["--task"], metavar="TASK|FILE"),
        Several(["--methods"], metavar="LIST"),
        click.Option(["--out"], type=OutputFolder()),
        click.Option(["--max-new-tokens"], type=int),
        click.Option(["--batch-size"], type=int),
        click.Option(["--temperature"], type=float),
        click.Option(["--seed"], type=int),
        click.Option(["--beside"], metavar="METHOD"),
    ],
    shared=LOAD,
    described=["bench.benchmark:run"],
    kinds=["bench"],
)

check_cache = Command(
    "check-cache",
    "conformance.check_cache:check_cache",
    BENCHMARK,
    "sinkscope check-cache transformers:DynamicCache",
    "sinkscope check-cache snapkv",
    params=[
        click.Argument(["factory"], metavar="POLICY|MODULE:FACTORY"),
        Several(["--only"], metavar="CHECK,..."),
        click.Option(["--tolerance"], default=0.001),
        click.Option(["--budget"], metavar="BUDGET"),
        click.Option(["--seed"], default=0),
    ],
    kinds=["check-cache"],
)
