"""Commands that compare methods and check caches."""

from __future__ import annotations

from pathlib import Path

import click

from sinkscope.app.commands.command import command
from sinkscope.app.commands.options import LOAD, Several

BENCHMARK = "Benchmark"

bench = command(
    "bench",
    "bench.run:bench",
    BENCHMARK,
    "sinkscope bench --task recall --methods full,h2o:0.25 --out runs",
    params=[
        click.Option(["--model"]),
        click.Option(["--task"], metavar="TASK|FILE", required=True),
        Several(["--methods"], metavar="LIST", required=True),
        click.Option(["--out"], metavar="DIR"),
        click.Option(["--max-new-tokens"], type=int),
        click.Option(["--batch-size"], default=1),
        click.Option(["--temperature"], default=0.0),
        click.Option(["--seed"], default=0),
    ],
    shared=LOAD,
    described=["bench.run:run_bench"],
    kinds=["bench"],
)

bench_table = command(
    "bench table",
    "bench.table:bench_table",
    BENCHMARK,
    "sinkscope bench table runs --by turn",
    "sinkscope bench table runs --beside snapkv:0.25",
    params=[
        click.Argument(["folders"], metavar="DIR...", nargs=-1, type=Path, required=True),
        click.Option(["--by"], metavar="NAME", default="part"),
        click.Option(["--beside"], metavar="METHOD"),
    ],
    kinds=["bench"],
)

check_cache = command(
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
        click.Option(["--thorough"], is_flag=True),
        click.Option(["--seed"], default=0),
    ],
    kinds=["check-cache"],
)
